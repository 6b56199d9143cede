"""Adaptive attention of a run of segments on a GPU: the policy of engine.sparse.attend without a wait for the device.

Choice, guard and correction are taken per segment, as there; a run only shares launches. What the report needs stays
on the device until the prefill ends. The guard has few rows a segment, so every cell gets its correction and none is
picked by the guard's verdict, which chance would make look good.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.chain import SEGMENT_TOKENS
from engine.sparse.patterns import pattern_codes, pattern_names
from engine.sparse.report import AttentionReport, causal_pairs
from engine.sparse.settings import SparseSettings
from kernels.block_lists import lists_from_mask
from kernels.block_lse import block_masses
from kernels.block_scores import block_scores
from kernels.block_selection import select_mask
from kernels.block_sparse_attention import block_sparse_attention

_AIM = 0.97  # of what may be missed
_LEAST = 0.05
_PRIOR_ROWS = 16  # what the segment's other groups count in a cell's estimate: few rows say little about one alone
_SURE = 4.0  # standard errors below target before a cell counts as such
_DENSE = 1 - 1e-6  # a recall from here on is a cell that went dense


@dataclass(frozen=True)
class RunTask:
    """Rows [start, start + rows) of one layer: whole segments, the last one may be short."""

    layer: int
    start: int  # position of the first row; a multiple of 4,096
    q: torch.Tensor  # [rows, heads, head_dim]
    k: torch.Tensor  # [kv_heads, start + rows, head_dim], as stored
    v: torch.Tensor
    out: torch.Tensor  # [rows, heads, head_dim], written
    choice_rows: torch.Tensor  # [segments, heads, samples] int32: offsets in a row block
    guard_rows: torch.Tensor  # [segments, heads, 2, count] int32: rows of the segment; the guard's and the witnesses'
    row_block: int  # rows that share a list

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def segments(self) -> int:
        return -(-self.rows // SEGMENT_TOKENS)


def draw_rows(
    settings: SparseSettings, heads: int, *, end: int, rows: int, seeds: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The sampled rows of one segment of `rows` rows that ends at `end`, in as many layers as there are seeds.

    Returns (choice [layers, heads, samples], guard and witness [layers, heads, 2, count]); no guard row is one that
    chooses. As engine.sparse.sampling draws them, for all layers at once.
    """
    layers, block, count = len(seeds), settings.row_block_at(end), settings.guard_rows_at(end)
    samples = settings.sampled_rows_at(end)
    random = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
    stride, head = block // samples, np.arange(heads)
    shift = np.array([generator.integers(stride) for generator in random])
    choice = np.arange(samples) * stride + ((shift[:, None] + head * stride // heads) % stride)[..., None]
    strata, width = np.arange(count) * rows // count, max(rows // count, 1)
    guard = strata + np.stack([generator.integers(width, size=(heads, 2, count)) for generator in random])
    chosen = np.zeros((layers, heads, block), dtype=bool)
    np.put_along_axis(chosen, choice, True, axis=2)
    for _ in range(samples):  # a very short segment may have no row that doesn't choose
        taken = np.take_along_axis(chosen, (guard % block).reshape(layers, heads, -1), axis=2).reshape(guard.shape)
        if not taken.any():
            break
        guard = np.where(taken, (guard + 1) % rows, guard)
    # In row order, so that neighbours share what they can't see. Witnesses are told from guards by their place.
    return choice.astype(np.int32), guard.astype(np.int32)


class RunReport:
    """Device-side figures of every run, read in one piece at the end."""

    def __init__(self) -> None:
        self._cells: list[tuple[int, int, int, torch.Tensor]] = []  # layer, start, rows, [segments, kv_heads, 3]
        self._patterns: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # layer, codes and weights [kv_heads]

    def add(self, task: RunTask, cells: torch.Tensor) -> None:
        """cells [segments, kv_heads, 3] float64: kept pairs, recall by the witnesses, whether below target."""
        self._cells.append((task.layer, task.start, task.rows, cells))

    def add_patterns(self, layer: int, codes: torch.Tensor, blocks: torch.Tensor) -> None:
        self._patterns.append((layer, codes, blocks))

    def read_into(self, report: AttentionReport) -> None:
        """Wait for the device, add everything to `report` and forget it."""
        if self._cells:
            values = torch.cat([cells for *_, cells in self._cells]).cpu().numpy()
            at = 0
            for layer, start, rows, cells in self._cells:
                for index in range(len(cells)):
                    first = start + index * SEGMENT_TOKENS
                    size = min(SEGMENT_TOKENS, start + rows - first)
                    self._read_segment(report, layer, first, size, values[at])
                    at += 1
        if self._patterns:
            codes = pattern_names(torch.cat([codes for _, codes, _ in self._patterns]))
            blocks = torch.cat([blocks for *_, blocks in self._patterns]).tolist()
            groups = len(codes) // len(self._patterns)
            for index, (code, weight) in enumerate(zip(codes, blocks, strict=True)):
                report.vote(self._patterns[index // groups][0], index % groups, code, weight)
        self._cells, self._patterns = [], []

    @staticmethod
    def _read_segment(report: AttentionReport, layer: int, start: int, rows: int, cells: NDArray[np.float64]) -> None:
        total = causal_pairs(start, rows)
        for kept in cells[:, 0]:
            report.add_pairs(start, rows, float(kept), total)
        sparse = cells[:, 0] < total * _DENSE
        report.add_recalls(start, rows, cells[sparse, 1].tolist())
        report.below_target |= bool((cells[:, 2] > 0).any())


def attend_run(task: RunTask, settings: SparseSettings, report: RunReport) -> None:
    """Fill `task.out` and add to `report`. Needs `settings.policy` adaptive and segments behind the crossover."""
    _Run(task, settings).attend(report)


class _Run:
    """Masks are bool [row_blocks, kv_heads, key_blocks]."""

    def __init__(self, task: RunTask, settings: SparseSettings) -> None:
        self._task, self._settings = task, settings
        self._device = task.q.device
        self._kv_heads, end = task.k.shape[:2]
        self._group = task.q.shape[1] // self._kv_heads
        self._per_segment = SEGMENT_TOKENS // task.row_block
        row_blocks = -(-task.rows // task.row_block)
        starts = torch.arange(row_blocks, device=self._device) * task.row_block
        ends = (starts + task.row_block).clamp(max=task.rows)
        self._row_counts = ends - starts
        self._causal = -(-(ends + task.start) // settings.key_block)  # key blocks that a row block sees
        self._row_blocks, self._key_blocks = row_blocks, -(-end // settings.key_block)

    def attend(self, report: RunReport) -> None:
        task, settings = self._task, self._settings
        masses = block_scores(
            task.q,
            task.k,
            task.choice_rows.repeat_interleave(self._per_segment, 0)[: self._row_blocks],
            row_block=task.row_block,
            key_block=settings.key_block,
            row_offset=task.start,
        )
        guard = self._guard_masses()
        mask, steered, error = self._settle(masses, guard[:, :, :, 0])
        block_sparse_attention(
            task.q,
            task.k,
            task.v,
            lists_from_mask(mask, row_block=task.row_block, key_block=settings.key_block),
            row_offset=task.start,
            out=task.out,
        )
        self._record(mask, steered, error, guard[:, :, :, 1], report)

    def _select(self, masses: torch.Tensor, target: float | torch.Tensor) -> torch.Tensor:
        settings = self._settings
        return select_mask(
            masses,
            target=target,
            row_block=self._task.row_block,
            key_block=settings.key_block,
            row_offset=self._task.start,
            sink_blocks=settings.sink_blocks,
            local_blocks=settings.local_blocks,
            smooth_blocks=self._per_segment,
        )

    def _guard_masses(self) -> torch.Tensor:
        """Softmax masses of the fresh rows, [kv_heads, segments, group, 2, count, key_blocks]."""
        task = self._task
        segments, _, draws, count = task.guard_rows.shape
        first = torch.arange(segments, device=self._device, dtype=torch.int32) * SEGMENT_TOKENS
        rows = task.guard_rows + first[:, None, None, None]
        rows = rows.view(segments, self._kv_heads, self._group, draws, count).transpose(0, 1).contiguous()
        masses = block_masses(
            task.q,
            task.k,
            rows.view(self._kv_heads, -1),
            per_head=draws * count,
            key_block=self._settings.key_block,
            row_offset=task.start,
            scale=task.q.shape[2] ** -0.5,
        )
        return masses.view(*rows.shape, -1)

    def _kept(self, mask: torch.Tensor, draw: int, masses: torch.Tensor) -> torch.Tensor:
        """Share of the softmax mass that `mask` keeps of each row of a draw: [segments, kv_heads, group * count]."""
        task = self._task
        segments, _, _, count = task.guard_rows.shape
        rows = task.guard_rows[:, :, draw].view(segments, self._kv_heads, self._group, count).transpose(0, 1)
        segment = torch.arange(segments, device=self._device)[:, None, None]
        block = rows.long() // self._task.row_block + segment * self._per_segment
        head = torch.arange(self._kv_heads, device=self._device)[:, None, None, None]
        kept = (masses * mask[block, head]).sum(-1)  # [kv_heads, segments, group, count]
        return kept.transpose(0, 1).flatten(2)

    @staticmethod
    def _pooled(kept: torch.Tensor) -> torch.Tensor:
        """Mean of each cell's rows, drawn towards its segment's: [segments, kv_heads]."""
        rows = kept.shape[2]
        return (kept.sum(2) + _PRIOR_ROWS * kept.mean((1, 2))[:, None]) / (rows + _PRIOR_ROWS)

    def _blocks_of(self, cells: torch.Tensor) -> torch.Tensor:
        """[segments, kv_heads] → [row_blocks, kv_heads]."""
        return cells.repeat_interleave(self._per_segment, 0)[: self._row_blocks].contiguous()

    def _settle(self, masses: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(mask, recall by the guard's rows, its standard error), the latter two [segments, kv_heads]."""
        settings, goal = self._settings, self._settings.target
        mask = self._select(masses, goal)
        kept = self._kept(mask, 0, fresh)
        told = torch.full(kept.shape[:2], goal, device=self._device)
        for _ in range(settings.corrections):
            # What is missed scales with what the choice was told to miss.
            miss = (1 - told) * _AIM * (1 - goal) / (1 - self._pooled(kept)).clamp(min=1e-6)
            told = (1 - miss).clamp(_LEAST, 1.0)
            mask = self._select(masses, self._blocks_of(told))
            kept = self._kept(mask, 0, fresh)
        recall, error = kept.mean(2), kept.std(2, correction=0) / kept.shape[2] ** 0.5
        if settings.dense_below_target:
            short = self._blocks_of(recall < goal)
            seen = torch.arange(self._key_blocks, device=self._device) < self._causal[:, None]
            mask = mask | (seen[:, None] & short[..., None])
            recall = recall.masked_fill(recall < goal, 1.0)
        return mask, recall, error

    def _record(
        self,
        mask: torch.Tensor,
        steered: torch.Tensor,
        steered_error: torch.Tensor,
        witness: torch.Tensor,
        report: RunReport,
    ) -> None:
        task, settings = self._task, self._settings
        kept = self._kept(mask, 1, witness)
        recall, error = kept.mean(2), kept.std(2, correction=0) / kept.shape[2] ** 0.5
        below = (steered + _SURE * steered_error < settings.target) | (recall + _SURE * error < settings.target)
        left_out = (self._causal[:, None] - mask.sum(2)) * self._row_counts[:, None] * settings.key_block
        padding = task.segments * self._per_segment - self._row_blocks
        left_out = torch.nn.functional.pad(left_out, (0, 0, 0, padding)).view(task.segments, self._per_segment, -1)
        start = torch.arange(task.segments, dtype=torch.float64, device=self._device) * SEGMENT_TOKENS
        rows = (task.rows - start).clamp(max=SEGMENT_TOKENS)
        total = rows * (task.start + start) + rows * (rows + 1) / 2
        cells = torch.stack((total[:, None] - left_out.sum(1).double(), recall.double(), below.double()), -1)
        report.add(task, cells)
        for index in range(task.segments):
            number = task.start // SEGMENT_TOKENS + index + 1
            # A sample of the segments shows the pattern; the third is the first one that the crossover leaves sparse.
            if number & (number - 1) == 0 or number == 3 or number % 64 == 0:
                part = slice(index * self._per_segment, min((index + 1) * self._per_segment, self._row_blocks))
                codes = pattern_codes(mask[part], self._causal[part], key_block=settings.key_block)
                report.add_patterns(task.layer, codes, mask[part].sum((0, 2)))
