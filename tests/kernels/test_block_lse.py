import pytest
import torch

from kernels import dispatch
from kernels.block_lse import block_lse, block_masses
from kernels.block_lse.reference import block_lse as reference
from tests.kernels.arguments import DTYPES, HAS_GPU, attention_inputs, generator, paths
from tests.kernels.tolerances import LSE_ERROR, lse_error

# tokens, heads, kv_heads, row_offset, head_dim, key_block, samples, per_head
SHAPES = [
    pytest.param(1, 4, 1, 0, 64, 64, 1, 1, id="one sample"),
    pytest.param(211, 9, 3, 77, 64, 32, 60, 4, id="groups of 3"),
    pytest.param(300, 4, 1, 500, 128, 128, 130, 2, id="more samples than a tile"),
    pytest.param(97, 16, 1, 31, 96, 64, 33, 1, id="group of 16, head_dim 96"),
    pytest.param(66, 2, 1, 0, 256, 64, 20, 1, id="head_dim 256"),
]


@pytest.mark.parametrize("path", paths("block_lse"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "row_offset", "head_dim", "key_block", "samples", "per_head"), SHAPES
)
def test_equals_reference(
    tokens, heads, kv_heads, row_offset, head_dim, key_block, samples, per_head, dtype, path, device
):
    q, k, _ = attention_inputs(tokens, heads, kv_heads, row_offset + tokens, head_dim, dtype, device)
    rows = torch.randint(0, tokens, (kv_heads, samples), generator=generator(1), dtype=torch.int32).to(device)
    options = {"per_head": per_head, "key_block": key_block, "row_offset": row_offset, "scale": head_dim**-0.5}
    with dispatch.override("block_lse", path):
        lse = block_lse(q, k, rows, **options)
    want = reference(q.double(), k.double(), rows, **options)
    assert lse.shape == want.shape
    assert lse_error(lse, want) <= LSE_ERROR[dtype]


@pytest.mark.parametrize("path", paths("block_lse"))
def test_masses_of_rows_far_apart(path, device):
    """Some rows have whole runs of key blocks behind them that are the future of others."""
    q, k, _ = attention_inputs(700, 6, 2, 700, 64, torch.float32, device)
    rows = torch.tensor([[0, 1, 15, 16, 130, 699], [3, 255, 256, 257, 600, 698]], dtype=torch.int32, device=device)
    options = {"per_head": 2, "key_block": 4, "row_offset": 0, "scale": 0.125}
    with dispatch.override("block_lse", path):
        masses = block_masses(q, k, rows, **options)
    want = reference(q.double(), k.double(), rows, **options).double().transpose(1, 2).exp2()
    want = want / want.sum(-1, keepdim=True)
    assert masses.shape == want.shape
    assert (masses.double() - want).abs().max() <= 2e-3
    assert torch.equal(masses == 0, want == 0)


def test_wrong_arguments():
    q, k, _ = attention_inputs(70, 4, 2, 70, 64, torch.float32, torch.device("cpu"))
    options = {"per_head": 1, "key_block": 64, "row_offset": 0, "scale": 0.1}
    with pytest.raises(ValueError, match=r"rows: expected shape \[2, samples\], got \[4, 3\]"):
        block_lse(q, k, torch.zeros(4, 3, dtype=torch.int32), **options)
    with pytest.raises(ValueError, match=r"rows: expected a dense tensor"):
        block_lse(q, k, torch.zeros(3, 2, dtype=torch.int32).T, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("path", ["gluon", "triton"])
@pytest.mark.parametrize(("head_dim", "key_block"), [(64, 64), (128, 64), (128, 128)])
def test_many_key_blocks(head_dim, key_block, path, device):
    """Several runs of key blocks, odd counts, samples whose tiles see very different parts of them."""
    q, k, _ = attention_inputs(4000, 8, 2, 20_000, head_dim, torch.bfloat16, device)
    rows = torch.randint(0, 4000, (2, 700), generator=generator(1), dtype=torch.int32).sort(-1).values.to(device)
    options = {"per_head": 1, "key_block": key_block, "row_offset": 16_000 - 77, "scale": head_dim**-0.5}
    with dispatch.override("block_lse", path):
        lse = block_lse(q, k, rows, **options)
    want = reference(q.double(), k.double(), rows, **options)
    assert lse_error(lse, want) <= LSE_ERROR[torch.bfloat16]
