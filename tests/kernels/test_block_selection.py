import itertools

import pytest
import torch

from kernels import dispatch
from kernels.block_selection import select_blocks
from tests.kernels.arguments import HAS_GPU, generator, paths

# The reference shows the meaning; other paths must equal it exactly. Bisection is slow in the interpreter.
MEANING = ["reference", *(paths("block_selection") if HAS_GPU else [])]


def masses_of(row_blocks, kv_heads, key_blocks, device, *, row_block=64, key_block=64, row_offset=0, sharpness=4.0):
    """Folds that agree roughly, as two sets of sampled rows do."""
    common = torch.randn(row_blocks, kv_heads, 1, key_blocks, generator=generator(1)) * sharpness
    own = torch.randn(row_blocks, kv_heads, 2, key_blocks, generator=generator(2))
    last = torch.arange(1, row_blocks + 1) * row_block + row_offset - 1
    future = torch.arange(key_blocks) * key_block > last[:, None]
    return (common + own).masked_fill(future[:, None, None], float("-inf")).softmax(-1).to(device)


def chosen(path, masses, **arguments):
    with dispatch.override("block_selection", path):
        lists = select_blocks(masses, row_block=64, key_block=64, **arguments)
    return lists.offsets, lists.blocks[: int(lists.offsets[-1])]


@pytest.mark.parametrize("path", paths("block_selection"))
@pytest.mark.parametrize(
    ("row_blocks", "kv_heads", "key_blocks", "row_offset"), [(1, 1, 1, 0), (3, 2, 37, 34 * 64), (2, 1, 131, 129 * 64)]
)
@pytest.mark.parametrize("target", [0.3, 0.97, 1.0])
def test_chooses_the_reference_blocks_exactly(row_blocks, kv_heads, key_blocks, row_offset, target, path, device):
    masses = masses_of(row_blocks, kv_heads, key_blocks, device, row_offset=row_offset)
    arguments = {"target": target, "row_offset": row_offset, "smooth_blocks": 2, "budget_factor": 1.1}
    offsets, blocks = chosen(path, masses, **arguments)
    want_offsets, want_blocks = chosen("reference", masses, **arguments)
    assert torch.equal(offsets, want_offsets)
    assert torch.equal(blocks, want_blocks)


@pytest.mark.parametrize("path", MEANING)
def test_keeps_the_target_on_rows_that_did_not_order(path, device):
    masses = masses_of(8, 2, 64, device, row_offset=56 * 64)
    for target in (0.5, 0.8, 0.95):
        offsets, blocks = chosen(path, masses, target=target, row_offset=56 * 64, smooth_blocks=1)
        counts = offsets.diff()
        which = torch.repeat_interleave(torch.arange(16, device=device), counts)
        kept = torch.zeros(16, device=device).index_add_(0, which, masses.mean(2).flatten(0, 1)[which, blocks.long()])
        # The joint order knows more than either fold alone: it keeps the target and not much more.
        assert float(kept.mean()) >= target
        assert float(counts.float().mean()) < 64 * 0.9


@pytest.mark.parametrize("path", MEANING)
def test_sink_and_local_are_always_kept(path, device):
    masses = torch.zeros(4, 1, 2, 20, device=device)
    masses[..., 7] = 1.0
    offsets, blocks = chosen(path, masses, target=0.9, row_offset=16 * 64, sink_blocks=2, local_blocks=3)
    lists = [blocks[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert lists == [[0, 1, 7, 14 + i, 15 + i, 16 + i] for i in range(4)]


@pytest.mark.parametrize("path", MEANING)
def test_target_one_keeps_all_and_lists_ascend(path, device):
    masses = masses_of(5, 2, 5, device)
    offsets, blocks = chosen(path, masses, target=1.0)
    lists = [blocks[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert lists == [list(range(block + 1)) for block in range(5) for _ in range(2)]


@pytest.mark.parametrize("path", MEANING)
def test_targets_of_the_lists_are_their_own(path, device):
    masses = masses_of(2, 2, 40, device, row_offset=38 * 64)
    target = torch.tensor([[0.3, 0.99], [0.99, 0.3]], device=device)
    counts = chosen(path, masses, target=target, row_offset=38 * 64, smooth_blocks=1)[0].diff().view(2, 2)
    assert counts[0, 0] < counts[0, 1]
    assert counts[1, 1] < counts[1, 0]


@pytest.mark.parametrize("path", MEANING)
def test_a_segment_does_not_see_the_next(path, device):
    masses = masses_of(8, 1, 40, device, row_offset=30 * 64)
    changed = masses.clone()
    changed[4:] = changed[4:].flip(-1)
    before = chosen(path, masses, target=0.8, row_offset=30 * 64, smooth_blocks=4)
    after = chosen(path, changed, target=0.8, row_offset=30 * 64, smooth_blocks=4)
    end = int(before[0][4])
    assert torch.equal(before[0][:5], after[0][:5])
    assert torch.equal(before[1][:end], after[1][:end])


def test_one_fold_orders_and_measures(device):
    masses = masses_of(3, 1, 30, device, row_offset=27 * 64)
    masses[:, :, 1] = 0
    for path in paths("block_selection"):
        for mine, want in zip(
            chosen(path, masses, target=0.7, row_offset=27 * 64),
            chosen("reference", masses, target=0.7, row_offset=27 * 64),
            strict=True,
        ):
            assert torch.equal(mine, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masses": torch.zeros(2, 1, 3, 4)}, r"masses: expected shape \[row_blocks, kv_heads, 2, key_blocks\]"),
        ({"target": 0.0}, r"target: expected a share in \(0, 1\], got 0.0"),
        ({"target": torch.zeros(3, 1)}, r"target: expected shape \[2, 1\], got \[3, 1\]"),
        ({"local_blocks": 0}, r"local_blocks: expected at least 1, got 0"),
        ({"row_offset": 500}, r"4 key blocks of 64 do not reach"),
    ],
)
def test_wrong_arguments(change, message):
    good = {"masses": torch.zeros(2, 1, 2, 4), "target": 0.9, "row_block": 64, "key_block": 64}
    with pytest.raises(ValueError, match=message):
        select_blocks(**{**good, **change})
