"""What the CPU paths have of their own: the fused attention's probe, key splits, overflow, threads."""

from functools import partial
from typing import Any

import pytest
import torch

from kernels import cpu_workers, dispatch, flash_cpu
from kernels.block_lse import block_lse
from kernels.full_attention import full_attention


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_fused_attention_is_used_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_cpu.obstacle() is None
    dispatch.reset()
    for op in ("dense_attention", "block_sparse_attention", "full_attention"):
        assert dispatch.implementation(op, torch.device("cpu")).__name__ == f"kernels.{op}.cpu"
    monkeypatch.setattr(flash_cpu, "_OP", "_no_such_operation")
    flash_cpu.obstacle.cache_clear()
    dispatch.reset()
    assert (
        dispatch.implementation("dense_attention", torch.device("cpu")).__name__ == "kernels.dense_attention.reference"
    )
    assert "no aten::_no_such_operation" in dispatch.paths()["dense_attention"][1]
    monkeypatch.undo()
    flash_cpu.obstacle.cache_clear()
    dispatch.reset()


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 5000), (3, 4097), (40, 4096), (200, 70)])
def test_full_attention_equals_the_reference(rows: int, keys: int) -> None:
    q, k, v = normal(rows, 6, 64), normal(2, keys, 64, seed=1), normal(2, keys, 64, seed=2)
    got = full_attention(q, k, v)
    with dispatch.override("full_attention", "reference"):
        expected = full_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(got[0], expected[0].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (64, 65), (65, 128), (100, 1000), (191, 577), (300, 300)])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_sixteen_bit_tiles_come_in_few_sizes(rows: int, keys: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or PyTorch would compile, and keep, a product for each pair."""
    sizes: list[tuple[int, int]] = []
    fused = flash_cpu._fused

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append((q.shape[2], k.shape[2]))
        return fused(q, k, v, **options)

    monkeypatch.setattr(flash_cpu, "_fused", seen)
    keys = rows if kind == "causal" else keys
    q, k, v = (normal(2, 3, size, 64, seed=size).bfloat16() for size in (rows, keys, keys))
    mask = torch.zeros(2, 3, rows, keys, dtype=q.dtype)
    if kind == "masked":
        mask.masked_fill_(normal(2, 3, rows, keys) > 0.5, -torch.inf)
    elif kind == "causal":
        mask.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu(1), -torch.inf)
    out, lse = flash_cpu.flash_batch(
        q, k, v, scale=0.125, causal=kind == "causal", mask=mask if kind == "masked" else None
    )
    assert all(size % 64 == 0 for pair in sizes for size in pair)
    scores = q.double() @ k.double().transpose(2, 3) * 0.125 + mask.double()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-2, rtol=0)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("spike", [0.0, 40.0])
def test_block_sums_of_scores_far_apart(spike: float) -> None:
    """One far key whose score exceeds everything next to the row by more than an exponential can hold."""
    q, k = normal(300, 4, 64), normal(2, 2300, 64, seed=1)
    q[..., 0] = 16
    k[..., 0] = 0
    k[:, 1200, 0] = spike
    rows = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(s))[:26] for s in (3, 4)]).int()
    arguments = {"per_head": 13, "key_block": 64, "row_offset": 2000, "scale": 0.125}
    got = block_lse(q, k, rows, **arguments)
    with dispatch.override("block_lse", "reference"):
        expected = block_lse(q.double(), k.double(), rows, **arguments)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (expected.amax() > 100) == (spike > 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_run_all_whatever_the_threads(threads: int) -> None:
    before = torch.get_num_threads()
    done: list[tuple[int, bool]] = []

    def job(number: int) -> None:
        done.append((100 // number, torch.is_inference_mode_enabled()))

    try:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            cpu_workers.run_all(partial(job, number) for number in range(1, 21))
        assert sorted(done) == sorted((100 // number, True) for number in range(1, 21))
        assert torch.get_num_threads() == threads
        with pytest.raises(ZeroDivisionError):
            cpu_workers.run_all([partial(job, 0)])
    finally:
        torch.set_num_threads(before)
