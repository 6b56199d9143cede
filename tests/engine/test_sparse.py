"""The sparse policies do less work, say honestly what they kept, and widen where the guard asks for it."""

import json
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from engine.errors import ModelError
from engine.interfaces import SegmentRecall
from engine.sparse import sampling
from engine.sparse.attend import _SparseSegment, attend
from engine.sparse.head_config import load_head_config
from engine.sparse.patterns import classify
from engine.sparse.report import AttentionReport, causal_pairs
from engine.sparse.settings import SparseSettings, for_fidelity
from engine.sparse.task import SegmentTask
from kernels.dense_attention import dense_attention

START, ROWS, HEADS, KV_HEADS = 4096, 1024, 6, 2
SPARSE = SparseSettings(crossover_tokens=0)
T = TypeVar("T")


def task(*, scattered: float = 0.0, needle: int | None = None) -> SegmentTask:
    """Keys of which a row likes its neighbourhood, the sink and, by `scattered`, anything; perhaps one needle."""
    random = torch.Generator().manual_seed(5)
    end = START + ROWS
    positions = torch.arange(end, dtype=torch.float32)
    # Two channels turn slowly with the position: rows like keys whose angle is near their own.
    angle = positions * 0.001
    k = torch.randn(KV_HEADS, end, 64, generator=random) * scattered
    k[..., 0], k[..., 1] = 10 * angle.cos(), 10 * angle.sin()
    k[:, :, 2] = 0
    k[:, 0, 2] = 30
    q = torch.randn(ROWS, HEADS, 64, generator=random)
    q[..., 0], q[..., 1] = 12 * angle[START:, None].cos(), 12 * angle[START:, None].sin()
    q[..., 2] = 4
    if needle is not None:
        k[:, needle, 3] = 60
        q[..., 3] = 4
    v = torch.randn(KV_HEADS, end, 64, generator=random)
    return SegmentTask(layer=0, start=START, q=q, k=k, v=v, out=torch.full((ROWS, HEADS, 64), torch.nan), seed=7)


def run(work: SegmentTask, settings: SparseSettings) -> AttentionReport:
    report = AttentionReport()
    for _ in attend(work, settings, report):
        pass
    assert not work.out.isnan().any()
    return report


def dense_error(work: SegmentTask) -> float:
    expected, _ = dense_attention(work.q, work.k, work.v, row_offset=work.start)
    return float((work.out - expected).norm() / expected.norm())


@pytest.mark.parametrize("policy", ["a_shape", "vertical_slash", "block_sparse", "adaptive"])
def test_structured_heads_are_kept_with_little_work(policy: str) -> None:
    settings = replace(
        SPARSE,
        policy=policy,
        a_shape_local=1536,
        vertical_tokens=64,
        slash_tokens=1536,
        top_blocks=24,  # type: ignore[arg-type]
    )
    work = task()
    report = run(work, settings)
    assert report.density < 0.5
    assert report.recall(0.95).mean > 0.93  # type: ignore[union-attr]
    assert dense_error(work) < 0.2


def test_adaptive_reaches_its_target_by_its_own_count() -> None:
    for target in (0.90, 0.95, 0.99):
        work = task(scattered=0.6)
        report = run(work, replace(SPARSE, target=target))
        recall = report.recall(target)
        assert recall is not None
        assert not recall.below_target
        true = true_recall(work, target)
        assert abs(true - recall.mean) < 0.02


def true_recall(work: SegmentTask, target: float) -> float:
    """exp(LSE kept − LSE all) over all rows, the lists found again with the same seed."""
    segment = _SparseSegment(work, replace(SPARSE, target=target), AttentionReport())
    mask, _ = segment._settle(last(segment._score()), segment._row_masses(segment._guard)[0])
    every_row = torch.arange(ROWS, dtype=torch.int32).expand(HEADS, -1).contiguous()
    return float(segment._kept(mask, every_row, segment._row_masses(every_row)[0]).mean())


def last(steps: Generator[None, None, T] | Iterator[None]) -> T:
    """Run a generator to its end and give what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def test_diffuse_heads_widen_and_strict_goes_dense() -> None:
    # One sampled row tells little about rows that all look elsewhere: the first choice falls short.
    work = task(scattered=6.0)
    once = replace(SPARSE, sampled_rows=1, corrections=0, dense_share=1.0)
    short = run(work, once)
    assert short.below_target
    widened = run(task(scattered=6.0), replace(once, corrections=4))
    assert widened.density > short.density
    assert min(widened.recalls) > min(short.recalls)
    work = task(scattered=6.0)
    strict = run(work, replace(once, dense_below_target=True, target=0.99))
    assert not strict.below_target
    assert dense_error(work) < 1e-5
    assert strict.density == pytest.approx(1.0)


def test_segments_whose_choice_is_nearly_everything_go_dense_and_vote_so() -> None:
    work = task(scattered=6.0)
    report = run(work, replace(SPARSE, dense_share=0.0))
    assert dense_error(work) < 1e-5
    assert (report.density, report.recall(0.95)) == (1.0, None)
    report.vote(0, 0, "a_shape", 1)  # one little segment doesn't outvote it
    assert report.heads() == {"dense": KV_HEADS}


def test_a_needle_is_found_by_the_sampled_rows() -> None:
    work = task(needle=1234)
    run(work, SPARSE)
    assert dense_error(work) < 0.1


def test_short_documents_and_the_dense_policy_are_exact() -> None:
    for settings in (SparseSettings(crossover_tokens=START + ROWS), SparseSettings(policy="dense")):
        work = task(scattered=1.0)
        report = run(work, settings)
        assert report.density == 1
        assert report.recall(0.95) is None
        assert dense_error(work) < 1e-5


def test_the_future_is_never_seen() -> None:
    before, after = task(scattered=1.0), task(scattered=1.0)
    after.k[:, START + 512 :] = 9.0
    after.v[:, START + 512 :] = 9.0
    for policy in ("a_shape", "block_sparse"):  # decided row block by row block
        for work in (before, after):
            run(work, replace(SPARSE, policy=policy, a_shape_local=512, top_blocks=16))  # type: ignore[arg-type]
        assert torch.equal(before.out[:512], after.out[:512])
        assert not torch.equal(before.out[512:], after.out[512:])
    run(after, replace(SPARSE, policy="vertical_slash", slash_tokens=512, vertical_tokens=64))
    # Budgets belong to the segment, so only its own later rows may differ.
    first = sampling.choice_rows(SPARSE, HEADS, sampling.generator(7))
    assert int(first.max()) < SPARSE.row_block
    expected, _ = dense_attention(after.q[:512], after.k, after.v, row_offset=START)
    assert float((after.out[:512] - expected).norm() / expected.norm()) < 0.3


def test_guard_rows_took_no_part_in_the_choice() -> None:
    random = sampling.generator(3)
    chosen = sampling.choice_rows(SPARSE, 9, random)
    guard = sampling.guard_rows(SPARSE, 4096, chosen, random)
    assert guard.shape == (9, SPARSE.guard_rows)
    assert not (guard[..., None] % SPARSE.row_block == chosen[:, None]).any()
    assert len({tuple(row) for row in chosen.tolist()}) > 1
    again = sampling.choice_rows(SPARSE, 9, sampling.generator(3))
    assert torch.equal(chosen, again)


def test_fidelities_differ_in_their_canonical_settings() -> None:
    base = SparseSettings()
    names = {fidelity: for_fidelity(base, fidelity) for fidelity in ("default", "strict", "fast", "exact")}  # type: ignore[arg-type]
    assert len({settings.canonical() for settings in names.values()}) == 4
    assert (names["strict"].target, names["strict"].dense_below_target) == (0.99, True)
    assert names["fast"].target == 0.90
    assert names["exact"].policy == "dense"
    assert replace(base, crossover_tokens=4096).canonical() != base.canonical()


def causal_mask(row_blocks: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    causal = first + 2 * (torch.arange(row_blocks) + 1)
    return torch.arange(int(causal[-1])) < causal[:, None], causal


def test_patterns_are_told_apart() -> None:
    seen, causal = causal_mask(32, 400)
    blocks = torch.arange(seen.shape[1])
    local = blocks >= causal[:, None] - 12
    a_shape = (local | (blocks < 1)) & seen
    lines = a_shape | (torch.isin(blocks, torch.tensor([17, 90, 200])) & seen)
    slash = a_shape | ((causal[:, None] - 1 - blocks == 150) & seen)
    random = torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    far = (lines | slash | (torch.isin(blocks, torch.arange(30, 60)) & seen)) & seen
    masks = torch.stack((a_shape, far, (random | a_shape) & seen, seen), 1)
    assert classify(masks, causal, key_block=64) == ["a_shape", "vertical_slash", "block_sparse", "dense"]


def test_reports_add_up_and_survive_json() -> None:
    report = AttentionReport()
    report.add_dense(0, 2, 0, 4096)
    report.add_pairs(4096, 4000, 25.0, 100.0)
    report.add_recalls(4096, 4000, [0.9, 1.0])
    report.vote(1, 0, "a_shape", 10)
    report.vote(1, 0, "block_sparse", 11)
    again = AttentionReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    assert again.heads() == {"dense": 2, "block_sparse": 1}
    assert again.head_map() == ["dd", "b-"]
    assert AttentionReport().head_map() == []
    assert causal_pairs(2, 3) == 3 + 4 + 5
    assert again.density == pytest.approx((2 * causal_pairs(0, 4096) + 25) / (2 * causal_pairs(0, 4096) + 100))
    first, second = again.segment_recalls()
    assert first == SegmentRecall(0, 4096, density=1.0, mean=None, worst=None)
    assert (second.start, second.end, second.density, second.worst) == (4096, 8096, 0.25, 0.9)
    assert second.mean == pytest.approx(0.95)


def test_the_density_of_a_short_last_segment_counts_its_own_rows() -> None:
    whole = task()
    rows = 260  # one row block and four rows
    short = SegmentTask(0, START, whole.q[:rows], whole.k[:, : START + rows], whole.v[:, : START + rows], whole.out, 7)
    report = AttentionReport()
    for _ in attend(short, replace(SPARSE, policy="a_shape", a_shape_local=512), report):
        pass
    end = START + torch.arange(rows)
    first_kept = torch.where(torch.arange(rows) < 256, START + 256 - 512, START + 320 - 512)
    kept = 128 + (end + 1 - first_kept)
    assert report.density == pytest.approx(float(kept.sum()) / causal_pairs(START, rows), rel=1e-6)


def head_config(path: Path, layers: int = 1, heads: int = HEADS) -> Path:
    kinds = [["vertical_and_slash", 128, 1024, 0.9], ["stream_llm", 64, 1024, 0.9], ["block_sparse", 16, 0, 0.9]]
    path.write_text(json.dumps([{str(head): kinds[head % 3] for head in range(heads)} for _ in range(layers)]))
    return path


def test_minference_head_configs_load_and_run_head_by_head(tmp_path: Path) -> None:
    config = load_head_config(head_config(tmp_path / "config.json"))
    assert [pattern.pattern for pattern in config.layers[0][:3]] == ["vertical_slash", "a_shape", "block_sparse"]
    work = task()
    report = run(work, replace(SPARSE, policy="vertical_slash", head_config=config))
    assert report.density < 0.5
    assert dense_error(work) < 0.2
    with pytest.raises(ValueError, match="got policy adaptive"):
        replace(SPARSE, head_config=config)
    with pytest.raises(ModelError, match="1 layers of 6 heads, the model 30 layers of 9 heads"):
        config.check(num_layers=30, heads=9)


@pytest.mark.parametrize(
    "text", ["{", "[]", "[{}]", '[{"0": ["tri_shape", 1, 2, 3]}]', '[{"1": ["stream_llm", 1, 2]}]']
)
def test_damaged_head_configs_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="head config"):
        load_head_config(tmp_path / "config.json")
