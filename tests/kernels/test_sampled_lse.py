import pytest
import torch

from kernels import block_lse, dispatch
from kernels.sampled_lse import sampled_lse
from kernels.sampled_lse.reference import sampled_lse as reference
from tests.kernels.arguments import DTYPES, attention_inputs, generator, paths, random_lists
from tests.kernels.tolerances import LSE_ERROR, lse_error

SHAPES = [
    pytest.param(1, 4, 1, 0, 64, 1, 1, id="one token"),
    pytest.param(211, 9, 3, 77, 64, 7, 3, id="prime length, groups of 3"),
    pytest.param(129, 8, 1, 300, 128, 20, 1, id="group of 8"),
    pytest.param(130, 6, 2, 0, 96, 5, 6, id="a list for each query head"),
]


@pytest.mark.parametrize("path", paths("sampled_lse"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "row_offset", "head_dim", "samples", "list_heads"), SHAPES)
def test_equals_reference(tokens, heads, kv_heads, row_offset, head_dim, samples, list_heads, dtype, path, device):
    q, k, _ = attention_inputs(tokens, heads, kv_heads, row_offset + tokens + 3, head_dim, dtype, device)
    lists = random_lists(tokens, row_offset, list_heads, 64, 64, 0.4, device)
    rows = torch.randint(0, tokens, (heads, samples), generator=generator(8), dtype=torch.int32).to(device)
    with dispatch.override("sampled_lse", path):
        lse_all, lse_kept = sampled_lse(q, k, rows, lists, row_offset=row_offset)
    seen = k[:, : row_offset + tokens].double()
    want_all, want_kept = reference(q.double(), seen, rows, lists, row_offset, head_dim**-0.5)
    assert lse_error(lse_all, want_all) <= LSE_ERROR[dtype]
    assert lse_error(lse_kept, want_kept) <= LSE_ERROR[dtype]
    assert (lse_kept <= lse_all + 1e-5).all()


def test_passes_over_a_bounded_scratch_give_the_same(monkeypatch, device):
    q, k, _ = attention_inputs(200, 4, 2, 200, 64, DTYPES[0], device)
    lists = random_lists(200, 0, 2, 64, 64, 0.5, device)
    rows = torch.randint(0, 200, (4, 9), generator=generator(8), dtype=torch.int32).to(device)
    with dispatch.override("sampled_lse", "triton"):
        whole = sampled_lse(q, k, rows, lists)
        monkeypatch.setattr(block_lse, "_SCRATCH_VALUES", 2 * 4 * 6)  # three samples a pass
        parts = sampled_lse(q, k, rows, lists)
    assert torch.allclose(whole[0], parts[0], atol=1e-5)
    assert torch.allclose(whole[1], parts[1], atol=1e-5)


def test_wrong_arguments():
    q, k, _ = attention_inputs(70, 4, 2, 70, 64, torch.float32, torch.device("cpu"))
    lists = random_lists(70, 0, 2, 64, 64, 0.5, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"rows: expected shape \[4, samples\], got \[2, 3\]"):
        sampled_lse(q, k, torch.zeros(2, 3, dtype=torch.int32), lists)
    with pytest.raises(ValueError, match=r"rows: expected dtype torch.int32, got torch.int64"):
        sampled_lse(q, k, torch.zeros(4, 3, dtype=torch.int64), lists)
    with pytest.raises(ValueError, match=r"expected 1 row blocks, got 2"):
        sampled_lse(q[:60], k, torch.zeros(4, 3, dtype=torch.int32), lists)
