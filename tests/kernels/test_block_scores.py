import pytest
import torch

from kernels import block_lse, dispatch
from kernels.block_scores import block_scores
from kernels.block_scores.reference import block_scores as reference
from tests.kernels.arguments import DTYPES, attention_inputs, generator, paths

SHAPES = [
    pytest.param(1, 4, 1, 0, 64, 64, 64, 2, id="one token"),
    pytest.param(129, 6, 2, 0, 64, 128, 64, 1, id="one above a block"),
    pytest.param(211, 9, 3, 77, 64, 64, 32, 4, id="prime length, groups of 3"),
    pytest.param(100, 4, 4, 500, 128, 64, 128, 3, id="group of 1, offset"),
    pytest.param(97, 16, 1, 31, 96, 32, 64, 2, id="group of 16, head_dim 96"),
    pytest.param(40, 1, 1, 0, 64, 32, 16, 1, id="one sample: second fold empty"),
]


def sample_offsets(heads, samples, row_block, device):
    return torch.randint(0, row_block, (heads, samples), generator=generator(9), dtype=torch.int32).to(device)


@pytest.mark.parametrize("path", paths("block_scores"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "row_offset", "head_dim", "row_block", "key_block", "samples"), SHAPES
)
def test_equals_reference(
    tokens, heads, kv_heads, row_offset, head_dim, row_block, key_block, samples, dtype, path, device
):
    q, k, _ = attention_inputs(tokens, heads, kv_heads, row_offset + tokens + 7, head_dim, dtype, device)
    offsets = sample_offsets(heads, samples, row_block, device)
    with dispatch.override("block_scores", path):
        masses = block_scores(q, k, offsets, row_block=row_block, key_block=key_block, row_offset=row_offset)
    seen = k[:, : row_offset + tokens].double()
    want = reference(q.double(), seen, offsets[None], row_block, key_block, row_offset, head_dim**-0.5)
    assert masses.shape == want.shape
    assert masses.dtype == torch.float32
    # Masses are probabilities: an absolute error of 2e-3 is far below what a choice of blocks can feel.
    assert float((masses - want).abs().max()) <= 2e-3
    assert torch.allclose(masses[:, :, 0].sum(-1), torch.ones_like(masses[:, :, 0, 0]), atol=1e-3)


@pytest.mark.parametrize("path", paths("block_scores"))
def test_row_blocks_may_have_offsets_of_their_own(path, device):
    q, k, _ = attention_inputs(200, 4, 2, 200, 64, DTYPES[0], device)
    offsets = torch.stack([sample_offsets(4, 2, 64, device) for _ in range(4)]) // torch.tensor(
        [[[1]], [[2]], [[3]], [[4]]], device=device
    )
    offsets = offsets.int()
    with dispatch.override("block_scores", path):
        together = block_scores(q, k, offsets, row_block=64, key_block=64)
        for index in range(4):
            alone = block_scores(q, k, offsets[index], row_block=64, key_block=64)
            assert torch.allclose(together[index], alone[index], atol=1e-6)


def test_passes_over_a_bounded_scratch_give_the_same(monkeypatch, device):
    q, k, _ = attention_inputs(260, 4, 2, 260, 64, DTYPES[0], device)
    offsets = sample_offsets(4, 2, 64, device)
    with dispatch.override("block_scores", "triton"):
        whole = block_scores(q, k, offsets, row_block=64, key_block=64)
        monkeypatch.setattr(block_lse, "_SCRATCH_VALUES", 2 * 5 * 4)  # one row block a pass
        parts = block_scores(q, k, offsets, row_block=64, key_block=64)
    assert torch.allclose(whole, parts, atol=1e-6)


@pytest.mark.parametrize("path", paths("block_scores"))
def test_nothing_of_the_future(path, device):
    q, k, _ = attention_inputs(200, 4, 1, 200, 64, DTYPES[0], device)
    offsets = sample_offsets(4, 2, 64, device)
    with dispatch.override("block_scores", path):
        masses = block_scores(q, k, offsets, row_block=64, key_block=64)
        k[:, 128:] = 9.0
        q[128:] = 1.0
        later = block_scores(q, k, offsets, row_block=64, key_block=64)
    assert torch.equal(masses[:2], later[:2])
    assert (masses[0, :, :, 1:] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_offsets": torch.zeros(3, 2, dtype=torch.int32)}, r"sample_offsets: expected shape \[4, samples\]"),
        ({"sample_offsets": torch.zeros(4, 2, dtype=torch.int64)}, r"sample_offsets: expected dtype torch.int32"),
        ({"row_block": 100}, r"row_block: expected a power of two"),
        ({"key_block": 8}, r"key_block: expected a power of two"),
    ],
)
def test_wrong_arguments(change, message):
    q, k, _ = attention_inputs(70, 4, 2, 70, 64, torch.float32, torch.device("cpu"))
    good = {"sample_offsets": torch.zeros(4, 2, dtype=torch.int32), "row_block": 64, "key_block": 64}
    with pytest.raises(ValueError, match=message):
        block_scores(q, k, **{**good, **change})
