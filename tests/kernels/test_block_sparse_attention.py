import pytest
import torch

from kernels import dispatch
from kernels.block_lists import BlockLists, causal_lists, lists_from_mask
from kernels.block_sparse_attention import block_sparse_attention
from kernels.block_sparse_attention.reference import block_sparse_attention as reference
from tests.kernels.arguments import DTYPES, attention_inputs, normal, paths, random_lists
from tests.kernels.tolerances import LSE_ERROR, RELATIVE_ERROR, lse_error, relative_error

# tokens, heads, kv_heads, row_offset, head_dim, row_block, key_block
SHAPES = [
    pytest.param(1, 4, 1, 0, 64, 64, 64, id="one token"),
    pytest.param(1, 4, 2, 1000, 64, 64, 64, id="one token behind an offset"),
    pytest.param(127, 4, 1, 0, 128, 128, 128, id="one below a block"),
    pytest.param(129, 2, 2, 0, 64, 128, 64, id="one above a block"),
    pytest.param(211, 9, 3, 77, 64, 64, 32, id="prime length, groups of 3, odd offset"),
    pytest.param(150, 8, 1, 130, 64, 64, 64, id="group of 8"),
    pytest.param(70, 16, 1, 0, 64, 32, 64, id="group of 16"),
    pytest.param(97, 5, 1, 31, 96, 64, 64, id="head_dim 96, group of 5"),
    pytest.param(66, 2, 1, 0, 256, 64, 64, id="head_dim 256"),
    pytest.param(140, 7, 1, 300, 128, 128, 64, id="group of 7"),
]


def run(path, q, k, v, lists, row_offset):
    with dispatch.override("block_sparse_attention", path):
        return block_sparse_attention(q, k, v, lists, row_offset=row_offset)


def expected(q, k, v, lists, row_offset):
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    end = row_offset + q.shape[0]
    lse = reference(q.double(), k[:, :end].double(), v[:, :end].double(), lists, row_offset, q.shape[2] ** -0.5, out)
    return out, lse


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "row_offset", "head_dim", "row_block", "key_block"), SHAPES)
def test_equals_reference(tokens, heads, kv_heads, row_offset, head_dim, row_block, key_block, dtype, path, device):
    q, k, v = attention_inputs(tokens, heads, kv_heads, row_offset + tokens + 5, head_dim, dtype, device)
    lists = random_lists(tokens, row_offset, kv_heads, row_block, key_block, 0.6, device)
    out, lse = run(path, q, k, v, lists, row_offset)
    want, want_lse = expected(q, k, v, lists, row_offset)
    assert out.dtype == dtype
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert lse_error(lse, want_lse) <= LSE_ERROR[dtype]


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
@pytest.mark.parametrize("list_heads", [1, 2, 6])
def test_lists_per_kv_head_or_query_head(list_heads, path, device):
    dtype = DTYPES[0]
    q, k, v = attention_inputs(90, 6, 1, 150, 64, dtype, device)
    lists = random_lists(90, 60, list_heads, 64, 64, 0.5, device)
    out, lse = run(path, q, k, v, lists, 60)
    want, want_lse = expected(q, k, v, lists, 60)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert lse_error(lse, want_lse) <= LSE_ERROR[dtype]


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
def test_empty_lists_give_zero_and_minus_infinity(path, device):
    q, k, v = attention_inputs(100, 4, 2, 100, 64, DTYPES[0], device)
    mask = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    mask[0, 1, 0] = True  # one list of four is not empty
    out, lse = run(path, q, k, v, lists_from_mask(mask, row_block=64, key_block=64), 0)
    assert (out[:, :2] == 0).all()
    assert lse[:, :2].isneginf().all()
    assert (out[64:] == 0).all()
    assert lse[:64, 2:].isfinite().all()


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
def test_later_tokens_change_no_bit_of_earlier_rows(path, device):
    q, k, v = attention_inputs(200, 6, 2, 200, 64, DTYPES[0], device)
    lists = causal_lists(rows=200, row_offset=0, list_heads=2, row_block=64, key_block=64, device=device)
    out, lse = run(path, q, k, v, lists, 0)
    for cut in (1, 63, 64, 100, 199):
        other_q, other_k, other_v = q.clone(), k.clone(), v.clone()
        other_q[cut:] += 3
        other_k[:, cut:] = -other_k[:, cut:] * 5
        other_v[:, cut:] += 7
        other_out, other_lse = run(path, other_q, other_k, other_v, lists, 0)
        assert torch.equal(out[:cut], other_out[:cut])
        assert torch.equal(lse[:cut], other_lse[:cut])


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
def test_keys_behind_the_rows_are_never_read(path, device):
    q, k, v = attention_inputs(100, 2, 1, 256, 64, DTYPES[0], device)
    k[:, 130:], v[:, 130:] = float("nan"), float("nan")
    lists = causal_lists(rows=100, row_offset=30, list_heads=1, row_block=64, key_block=64, device=device)
    out, lse = run(path, q, k, v, lists, 30)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
def test_same_input_twice_gives_the_same_bits(path, device):
    q, k, v = attention_inputs(200, 4, 1, 200, 128, DTYPES[0], device)
    lists = random_lists(200, 0, 1, 128, 64, 0.7, device)
    first, second = run(path, q, k, v, lists, 0), run(path, q, k, v, lists, 0)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("path", paths("block_sparse_attention"))
def test_strides_are_free(path, device):
    dtype = DTYPES[0]
    q = normal(4, 90, 64, dtype=dtype, device=device, seed=1).transpose(0, 1)
    k = normal(90, 2, 3, 64, dtype=dtype, device=device, seed=2)[:, :, 1].transpose(0, 1)
    v = normal(2, 100, 72, dtype=dtype, device=device, seed=3)[:, 5:95, 8:]
    lists = random_lists(90, 0, 2, 64, 64, 0.8, device)
    out, _ = run(path, q, k, v, lists, 0)
    assert relative_error(out, expected(q, k, v, lists, 0)[0]) <= RELATIVE_ERROR[dtype]


def test_out_is_written_in_place(device):
    q, k, v = attention_inputs(70, 4, 2, 70, 64, DTYPES[0], device)
    lists = causal_lists(rows=70, row_offset=0, list_heads=2, row_block=64, key_block=64, device=device)
    room = torch.empty(80, 4, 64, dtype=q.dtype, device=device)
    out, _ = block_sparse_attention(q, k, v, lists, out=room[:70])
    assert out.data_ptr() == room.data_ptr()
    assert room[:70].isfinite().all()


def arguments():
    q, k, v = attention_inputs(70, 4, 2, 70, 64, torch.float32, torch.device("cpu"))
    lists = causal_lists(rows=70, row_offset=0, list_heads=2, row_block=64, key_block=64, device="cpu")
    return {"q": q, "k": k, "v": v, "lists": lists}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(70, 4)}, r"q: expected shape \[tokens, heads, head_dim\], got \[70, 4\]"),
        ({"k": torch.zeros(2, 70, 32)}, r"k: expected shape .*64\], got \[2, 70, 32\]"),
        ({"v": torch.zeros(2, 60, 64)}, r"v: expected shape \[2, 70, 64\], got \[2, 60, 64\]"),
        ({"k": torch.zeros(2, 70, 64).half()}, r"k: expected dtype torch.float32, got torch.float16"),
        ({"k": torch.zeros(3, 70, 64), "v": torch.zeros(3, 70, 64)}, r"multiple of 3 KV heads, got 4"),
        ({"row_offset": 1}, r"at least row_offset \+ tokens = 71 keys, got 70"),
        ({"row_offset": -1}, r"row_offset: expected at least 0, got -1"),
        ({"scale": -1.0}, r"scale: expected a positive number, got -1.0"),
        ({"q": torch.zeros(70, 64, 4).transpose(1, 2)}, r"q: expected stride 1"),
        (
            {"q": torch.zeros(70, 4, 48), "k": torch.zeros(2, 70, 48), "v": torch.zeros(2, 70, 48)},
            r"head_dim: expected",
        ),
        ({"q": torch.zeros(130, 4, 64), "k": torch.zeros(2, 130, 64), "v": torch.zeros(2, 130, 64)}, r"3 row blocks"),
        (
            {"lists": causal_lists(rows=70, row_offset=0, list_heads=1, row_block=64, key_block=64, device="cpu")},
            r"list heads between 2 KV heads and 4 heads",
        ),
        ({"out": torch.zeros(70, 4, 64).half()}, r"out: expected dtype"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**{**arguments(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, "offsets: expected int64"),
        ({"blocks": torch.zeros(4, dtype=torch.int64)}, "blocks: expected int32"),
        ({"list_heads": 3}, "2 lists do not divide into 3 list heads"),
        ({"row_block": 48}, "row_block: expected a power of two"),
    ],
)
def test_wrong_lists(change, message):
    fields = {"offsets": torch.zeros(3, dtype=torch.int64), "blocks": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        BlockLists(**{**fields, "list_heads": 1, "row_block": 64, "key_block": 64, **change})


@pytest.mark.gpu
def test_hopper_takes_the_warp_specialised_kernel(device):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper device")
    q, k, v = attention_inputs(300, 8, 2, 300, 128, torch.bfloat16, device)
    lists = random_lists(300, 0, 2, 128, 128, 0.8, device)
    block_sparse_attention(q, k, v, lists)
    assert dispatch.paths()["block_sparse_attention"][0] == "gluon"
    from kernels.block_sparse_attention import gluon_kernel

    assert gluon_kernel.takes(q, k, v, lists)
    assert gluon_kernel.block_sparse_attention_kernel.device_caches[torch.cuda.current_device()][0]


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["gluon", "triton"])
@pytest.mark.parametrize(("head_dim", "key_block"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_many_tiles_a_program(head_dim, key_block, path, device):
    """More tiles than multiprocessors, lists of very unequal length: the ring and its phases go on across tiles."""
    q, k, v = attention_inputs(4096, 8, 2, 4096 + 640, head_dim, torch.bfloat16, device)
    lists = random_lists(4096, 640, 2, 128, key_block, 0.4, device)
    out, lse = run(path, q, k, v, lists, 640)
    want, want_lse = expected(q, k, v, lists, 640)
    assert relative_error(out, want) <= RELATIVE_ERROR[torch.bfloat16]
    assert lse_error(lse, want_lse) <= LSE_ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["gluon", "triton"])
def test_offsets_past_two_to_the_31(path, device):
    """q, k and out are views into buffers of more than 2³¹ elements; the rows that count lie at their ends."""
    heads, tokens, k_tokens = 4, 256, 8_500_000
    k = torch.zeros(2, k_tokens, 128, dtype=torch.bfloat16, device=device)
    v = torch.zeros_like(k)
    assert k.numel() > 2**31
    k[:, -1024:] = normal(2, 1024, 128, dtype=k.dtype, device=device, seed=5)
    v[:, -1024:] = normal(2, 1024, 128, dtype=k.dtype, device=device, seed=6)
    q = normal(tokens, heads, 128, dtype=k.dtype, device=device, seed=7)
    offset = k_tokens - tokens
    first = (k_tokens - 1024) // 128 + 1
    blocks = torch.arange(first, -(-k_tokens // 128), dtype=torch.int32, device=device)
    offsets = torch.arange(5, device=device) * blocks.numel()
    lists = BlockLists(offsets, blocks.repeat(4), 2, 128, 128)
    out, lse = run(path, q, k, v, lists, offset)
    near = k_tokens - first * 128
    near_lists = causal_lists(
        rows=tokens, row_offset=near - tokens, list_heads=2, row_block=128, key_block=128, device=device
    )
    want, want_lse = expected(q, k[:, -near:], v[:, -near:], near_lists, near - tokens)
    assert relative_error(out, want) <= RELATIVE_ERROR[torch.bfloat16]
    assert lse_error(lse, want_lse) <= LSE_ERROR[torch.bfloat16]
