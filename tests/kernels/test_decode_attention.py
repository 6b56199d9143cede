import pytest
import torch

from kernels import dispatch
from kernels.decode_attention import PAGE_TOKENS, decode_attention, pages_view
from kernels.decode_attention.reference import decode_attention as reference
from kernels.kv_quant import STORED_DTYPES, quantise_kv
from tests.kernels.arguments import DTYPES, HAS_GPU, generator, normal, paths
from tests.kernels.tolerances import LSE_ERROR, RELATIVE_ERROR, lse_error, relative_error


def run(path, *arguments, **options):
    with dispatch.override("decode_attention", path):
        return decode_attention(*arguments, **options)


def expected(q, k_pages, v_pages, table, lengths, k_scales=None, v_scales=None):
    k, v = ((t if t.dtype in STORED_DTYPES else t.double()) for t in (k_pages, v_pages))
    return reference(q.double(), k, v, table, lengths, k_scales, v_scales, q.shape[2] ** -0.5)


def pool(pages, kv_heads, head_dim, dtype, device):
    k = normal(pages, kv_heads, PAGE_TOKENS, head_dim, dtype=dtype, device=device, seed=2)
    v = normal(pages, kv_heads, PAGE_TOKENS, head_dim, dtype=dtype, device=device, seed=3)
    return k, v


@pytest.mark.parametrize("path", paths("decode_attention"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (8, 1, 128), (16, 1, 96), (2, 1, 256)]
)
def test_unequal_documents_over_scattered_pages(heads, kv_heads, head_dim, dtype, path, device):
    lengths = torch.tensor([0, 1, 127, 128, 129, 640, 333], dtype=torch.int32, device=device)
    k, v = pool(20, kv_heads, head_dim, dtype, device)
    table = torch.randint(0, 20, (7, 5), generator=generator(4), dtype=torch.int32).to(device)
    q = normal(7, heads, head_dim, dtype=dtype, device=device, seed=1)
    out, lse = run(path, q, k, v, table, lengths)
    want, want_lse = expected(q, k, v, table, lengths)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert lse_error(lse, want_lse) <= LSE_ERROR[dtype]
    assert (out[0] == 0).all()


@pytest.mark.parametrize("path", paths("decode_attention"))
@pytest.mark.parametrize("stored", STORED_DTYPES, ids=str)
def test_quantised_pages(stored, path, device):
    dtype = DTYPES[0]
    k, v = (normal(2, 512, 64, dtype=dtype, device=device, seed=s) * 3 for s in (1, 2))
    with dispatch.override("kv_quant", "reference"):
        (k8, k_scales), (v8, v_scales) = quantise_kv(k, dtype=stored), quantise_kv(v, dtype=stored)
    table = torch.arange(4, dtype=torch.int32, device=device).expand(3, 4)
    lengths = torch.tensor([512, 200, 77], dtype=torch.int32, device=device)
    q = normal(3, 6, 64, dtype=dtype, device=device, seed=3)
    arguments = (q, pages_view(k8), pages_view(v8), table, lengths)
    out, lse = run(path, *arguments, k_scales=k_scales.T, v_scales=v_scales.T)
    want, want_lse = expected(*arguments, k_scales.T, v_scales.T)
    # Quantised pages are multiplied in float16, whatever q's dtype.
    assert relative_error(out, want) <= max(RELATIVE_ERROR[dtype], RELATIVE_ERROR[torch.float16])
    assert lse_error(lse, want_lse) <= LSE_ERROR[torch.float16]


@pytest.mark.parametrize("path", paths("decode_attention"))
def test_a_document_is_a_view_of_pages(path, device):
    dtype = DTYPES[0]
    k, v = (normal(2, 384, 64, dtype=dtype, device=device, seed=s) for s in (1, 2))
    assert pages_view(k).data_ptr() == k.data_ptr()
    q = normal(2, 4, 64, dtype=dtype, device=device, seed=3)
    table = torch.arange(3, dtype=torch.int32, device=device).expand(2, 3)
    lengths = torch.tensor([300, 301], dtype=torch.int32, device=device)
    out, _ = run(path, q, pages_view(k), pages_view(v), table, lengths)
    for entry, length in enumerate((300, 301)):
        scores = q[entry].double().view(2, 2, 64) @ k[:, :length].double().transpose(1, 2) / 8
        want = (scores.softmax(-1) @ v[:, :length].double()).view(4, 64)
        assert relative_error(out[entry], want) <= RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("path", paths("decode_attention"))
def test_an_entry_does_not_feel_its_neighbours(path, device):
    dtype = DTYPES[0]
    k, v = pool(8, 2, 64, dtype, device)
    q = normal(2, 4, 64, dtype=dtype, device=device, seed=1)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32, device=device)
    lengths = torch.tensor([300, 384], dtype=torch.int32, device=device)
    before = run(path, q, k, v, table, lengths)[0][0]
    k[3:], v[3:], q[1] = 5.0, float("nan"), 2.0
    assert torch.equal(before, run(path, q, k, v, table, lengths)[0][0])


def test_wrong_arguments():
    q, (k, v) = torch.zeros(2, 4, 64), pool(3, 2, 64, torch.float32, torch.device("cpu"))
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_pages: expected shape \[pages, kv_heads, 128, 64\]"):
        decode_attention(q, k[:, :, :64], v, table, lengths)
    with pytest.raises(ValueError, match=r"page_table: expected shape \[2, max_pages\], got \[1, 2\]"):
        decode_attention(q, k, v, table[:1], lengths)
    with pytest.raises(ValueError, match=r"lengths: expected dtype torch.int32"):
        decode_attention(q, k, v, table, lengths.long())
    with pytest.raises(ValueError, match=r"expected scales \[pages, kv_heads\] with quantised pages, got None"):
        decode_attention(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), table, lengths)
    with pytest.raises(ValueError, match=r"expected None with torch.float32 pages"):
        decode_attention(q, k, v, table, lengths, k_scales=torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"expected a multiple of 128, got 100"):
        pages_view(torch.zeros(2, 100, 64))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_many_splits(device):
    """Long enough that every program has several pages and the merge more than one split."""
    k, v = pool(600, 2, 128, torch.bfloat16, device)
    q = normal(3, 8, 128, dtype=torch.bfloat16, device=device, seed=1)
    table = torch.randperm(600, generator=generator(3), dtype=torch.int32).to(device).expand(3, 600)
    lengths = torch.tensor([600 * 128, 70_001, 5], dtype=torch.int32, device=device)
    out, lse = decode_attention(q, k, v, table, lengths)
    want, want_lse = expected(q, k, v, table, lengths)
    assert dispatch.paths()["decode_attention"][0] == "triton"
    # Each entry on its own: one norm over the batch would hide an error in the longest, whose values are smallest.
    for entry in range(3):
        assert relative_error(out[entry], want[entry]) <= RELATIVE_ERROR[torch.bfloat16]
    assert lse_error(lse, want_lse) <= LSE_ERROR[torch.bfloat16]
