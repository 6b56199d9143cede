"""The GPU's way through adaptive attention, on the CPU's kernels: decisions per segment, whatever shares a launch."""

from dataclasses import replace

import pytest
import torch

from engine.chain import SEGMENT_TOKENS
from engine.interfaces import KVLayout
from engine.kv_format import KVFormat
from engine.sparse.report import AttentionReport
from engine.sparse.run import RunReport, RunTask, attend_run, draw_rows
from engine.sparse.settings import SparseSettings, default_settings
from kernels.dense_attention import dense_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SETTINGS = replace(default_settings("cuda"), target=0.8, guard_rows=16)
SEGMENTS = [SEGMENT_TOKENS, SEGMENT_TOKENS, 300]


@pytest.fixture(scope="module")
def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys of which few matter to each row, behind one segment of past."""
    random = torch.Generator().manual_seed(3)
    tokens, past = sum(SEGMENTS), SEGMENT_TOKENS
    topics = torch.randn(16, HEAD_DIM, generator=random) * 1.5
    k = topics[torch.randint(16, (KV_HEADS, past + tokens), generator=random)]
    k = (
        k.view(KV_HEADS, past + tokens, HEAD_DIM)
        + torch.randn(KV_HEADS, past + tokens, HEAD_DIM, generator=random) * 0.3
    )
    k[:] = k[:, torch.arange(past + tokens) // 128 * 128]  # whole blocks of one topic
    q = topics[torch.randint(16, (-(-tokens // 256), HEADS), generator=random)].repeat_interleave(256, 0)[:tokens]
    return q, k, torch.randn(KV_HEADS, past + tokens, HEAD_DIM, generator=random)


def attended(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], settings: SparseSettings, *, together: bool
) -> tuple[torch.Tensor, AttentionReport]:
    q, k, v = heads
    out, report, run_report = torch.full_like(q, torch.nan), AttentionReport(), RunReport()
    drawn = [
        draw_rows(settings, HEADS, end=9000, rows=rows, seeds=[100 + index]) for index, rows in enumerate(SEGMENTS)
    ]
    starts = [sum(SEGMENTS[:index]) for index in range(len(SEGMENTS))]
    runs = [range(len(SEGMENTS))] if together else [range(index, index + 1) for index in range(len(SEGMENTS))]
    for run in runs:
        first, last = starts[run[0]], starts[run[-1]] + SEGMENTS[run[-1]]
        choice, guard = (torch.from_numpy(part).float().int() for part in map_rows(drawn, run))
        start, end = SEGMENT_TOKENS + first, SEGMENT_TOKENS + last
        task = RunTask(
            1, start, q[first:last], k[:, :end], v[:, :end], out[first:last], choice, guard, settings.row_block
        )
        attend_run(task, settings, run_report)
    run_report.read_into(report)
    return out, report


def map_rows(drawn, run):  # type: ignore[no-untyped-def]
    import numpy as np

    return (np.concatenate([drawn[index][part] for index in run]) for part in range(2))


def test_a_run_decides_as_its_segments_alone(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    out, report = attended(heads, SETTINGS, together=True)
    alone, alone_report = attended(heads, SETTINGS, together=False)
    assert torch.allclose(out, alone, atol=1e-5)
    assert report.density == alone_report.density < 0.9
    assert report.recalls == pytest.approx(alone_report.recalls, abs=1e-5)
    assert report.head_map() == alone_report.head_map()
    assert report.head_map()[0] == "-" * KV_HEADS
    assert len(report.head_map()[1]) == KV_HEADS
    assert set(report.head_map()[1]) <= set("avb")
    assert {start: part.rows for start, part in report.segments.items()} == {"4096": 4096, "8192": 4096, "12288": 300}


def test_the_witnesses_recall_is_the_true_one(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Over all rows, from the log-sum-exps of what was kept."""
    q, k, v = heads
    settings = replace(SETTINGS, guard_rows=64)
    _, report = attended(heads, settings, together=True)
    dense, _ = dense_attention(q, k, v, row_offset=SEGMENT_TOKENS)
    out, _ = attended(heads, replace(settings, target=1.0), together=True)
    assert torch.allclose(out, dense, atol=1e-4)
    assert sum(report.recalls) / len(report.recalls) > 0.78


def test_strict_goes_dense_where_the_target_is_missed(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """No correction, so the first choice stands; a target that it can't reach by the guard's rows."""
    settings = replace(SETTINGS, target=0.999, corrections=0, dense_below_target=True)
    _, report = attended(heads, settings, together=True)
    _, lax = attended(heads, replace(settings, dense_below_target=False), together=True)
    assert report.density > lax.density
    assert not report.below_target


def test_guard_rows_never_choose() -> None:
    choice, guard = draw_rows(SETTINGS, HEADS, end=9000, rows=SEGMENT_TOKENS, seeds=[1, 2, 3])
    assert choice.shape == (3, HEADS, SETTINGS.sampled_rows)
    assert guard.shape == (3, HEADS, 2, SETTINGS.guard_rows)
    assert not (guard[..., None] % SETTINGS.row_block == choice[:, :, None, None, :]).any()
    assert guard.min() >= 0
    assert guard.max() < SEGMENT_TOKENS


@pytest.mark.parametrize("rows", [1, 2, 31])
def test_guard_rows_of_a_short_segment(rows: int) -> None:
    _, guard = draw_rows(SETTINGS, HEADS, end=8192 + rows, rows=rows, seeds=list(range(20)))
    assert guard.min() >= 0
    assert guard.max() < rows


def test_fewer_rows_are_sampled_the_longer_the_past() -> None:
    settings = default_settings("cuda")
    ends = (4096, 131_072, 131_073, 262_144, 262_145, 1 << 20, (1 << 20) + 1, 1 << 22)
    assert [settings.sampled_rows_at(end) for end in ends] == [16, 4, 2, 2, 1, 1, 1, 1]
    assert [settings.row_block_at(end) for end in ends] == [128, 128, 128, 128, 256, 256, 512, 512]
    assert [settings.guard_rows_at(end) for end in ends] == [32, 8, 4, 4, 4, 4, 4, 4]
    assert SparseSettings().sampled_rows_at(1 << 20) == SparseSettings().sampled_rows


@pytest.mark.parametrize("tokens", [1, 127, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised_kv_goes_there_and_back(dtype: torch.dtype, tokens: int) -> None:
    rows = torch.randn(2, KV_HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(tokens))
    exact = rows.clone()
    kept = KVFormat(dtype)
    packed = kept.pack(rows.flatten(0, 1), rows)
    assert not torch.equal(rows, exact)
    assert torch.allclose(rows, exact, atol=0.3 if dtype == torch.float8_e4m3fn else 0.03)
    layout = KVLayout(1, 2 * KV_HEADS * HEAD_DIM, 1, 2 * KV_HEADS * 4)
    assert packed.numel() == layout.layer_bytes(tokens)
    back = torch.empty_like(rows)
    kept.unpack(packed, back)
    assert torch.equal(back, rows)
