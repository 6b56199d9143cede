"""One segment's attention under a policy: choose blocks, measure the recall, widen what falls short, attend.

Everything here is decided from this segment and its past; a generator's `yield` is where the scheduler may step in.
"""

from collections.abc import Generator, Iterator

import torch

from engine.sparse import fixed, sampling
from engine.sparse.dense import attend_dense
from engine.sparse.patterns import classify
from engine.sparse.report import AttentionReport, causal_pairs
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask
from kernels.block_lists import BlockLists, lists_from_mask
from kernels.block_lse import block_masses
from kernels.block_scores import block_scores
from kernels.block_selection import select_mask
from kernels.block_sparse_attention import block_sparse_attention

# The guard aims at missing this share of what may be missed, and is content between it and a little less.
_AIM = 0.97
_CLOSE = 0.1
_LEAST = 0.05
# Standard errors below target before a cell counts as such: a record has thousands of cells, each an estimate.
_SURE = 4.0


def attend(task: SegmentTask, settings: SparseSettings, report: AttentionReport) -> Iterator[None]:
    """Fill `task.out`. Segments that end before the crossover are dense whatever the policy."""
    if settings.policy == "dense" or task.start + task.rows <= settings.crossover_tokens:
        yield from attend_dense(task)
        report.add_dense(task.layer, task.kv_heads, task.start, task.rows)
    else:
        yield from _SparseSegment(task, settings, report).run()


class _SparseSegment:
    """Block masks are bool [row_blocks, list_heads, key_blocks]; a list head is a KV head, or a query head where a
    head config says so."""

    def __init__(self, task: SegmentTask, settings: SparseSettings, report: AttentionReport) -> None:
        self._task, self._settings, self._report = task, settings, report
        device, random = task.q.device, sampling.generator(task.seed)
        heads = task.q.shape[1]
        self._list_heads = heads if settings.head_config is not None else task.kv_heads
        chosen = sampling.choice_rows(settings, heads, random, end=task.start + task.rows)
        guard = sampling.guard_rows(settings, task.rows, chosen, random)
        witness = sampling.guard_rows(settings, task.rows, chosen, random)
        self._chosen, self._guard, self._witness = (rows.to(device) for rows in (chosen, guard, witness))
        row_blocks = -(-task.rows // settings.row_block)
        starts = torch.arange(row_blocks, device=device) * settings.row_block
        ends = (starts + settings.row_block).clamp(max=task.rows)
        self._causal = -(-(ends + task.start) // settings.key_block)  # key blocks that a row block sees
        self._rows = ends - starts  # of each row block; the last may be short
        self._key_blocks = -(-(task.start + task.rows) // settings.key_block)

    def run(self) -> Iterator[None]:
        task, settings = self._task, self._settings
        masses = yield from self._score()
        guard, witness = self._row_masses(self._guard, self._witness)
        yield
        mask, steered = self._settle(masses, guard)
        yield
        if int(mask.sum()) > settings.dense_share * int(self._causal.sum()) * self._list_heads:
            yield from attend_dense(task)
            blocks = int(self._causal.sum())
            self._report.add_dense(task.layer, task.kv_heads, task.start, task.rows, blocks=blocks)
            return
        yield from self._attend(mask)
        self._record(mask, steered, witness)

    def _score(self) -> Generator[None, None, torch.Tensor]:
        """Masses of the sampled rows, [row_blocks, list_heads, 2, key_blocks]."""
        task, settings = self._task, self._settings
        k = task.k.repeat_interleave(self._list_heads // task.kv_heads, 0) if self._per_head else task.k
        parts = []
        for first, last in task.pieces(settings.row_block, share=self._chosen.shape[1] / settings.row_block):
            part = block_scores(
                task.q[first:last],
                k,
                self._chosen,
                row_block=settings.row_block,
                key_block=settings.key_block,
                row_offset=task.start + first,
            )
            parts.append(torch.nn.functional.pad(part, (0, self._key_blocks - part.shape[-1])))
            yield
        return torch.cat(parts)

    @property
    def _per_head(self) -> bool:
        return self._list_heads != self._task.kv_heads

    def _choose(self, masses: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """The block mask; `target` [kv_heads] where the guard has raised it."""
        settings, task = self._settings, self._task
        if settings.policy != "adaptive":
            patterns = fixed.head_patterns(settings, task.layer, self._list_heads)
            return fixed.fixed_mask(settings, patterns, masses.sum(2), self._causal)
        return select_mask(
            masses,
            target=settings.target if target is None else target.expand(masses.shape[0], -1).contiguous(),
            row_block=settings.row_block,
            key_block=settings.key_block,
            row_offset=task.start,
            sink_blocks=settings.sink_blocks,
            local_blocks=settings.local_blocks,
        )

    def _row_masses(self, *draws: torch.Tensor) -> list[torch.Tensor]:
        """Softmax masses over the key blocks of each draw [heads, count] of rows: [heads, count, key_blocks]."""
        task, rows = self._task, torch.cat(draws, 1)
        masses = block_masses(
            task.q,
            task.k,
            rows.view(task.kv_heads, -1),
            per_head=rows.shape[1],
            key_block=self._settings.key_block,
            row_offset=task.start,
            scale=task.q.shape[2] ** -0.5,
        )
        return list(torch.split(masses.view(*rows.shape, -1), [draw.shape[1] for draw in draws], 1))

    def _kept(self, mask: torch.Tensor, rows: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        """Share of the softmax mass kept, exp(LSE kept − LSE all), of each row: [kv_heads, group * count]."""
        heads = rows.shape[0]
        list_head = torch.arange(heads, device=rows.device)[:, None] // (heads // self._list_heads)
        kept = mask[rows.long() // self._settings.row_block, list_head]
        return (masses * kept).sum(-1).view(self._task.kv_heads, -1)

    def _settle(self, masses: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block mask and each group's recall [kv_heads] over the guard's rows, which steer its budget.

        What the choice is told to keep is corrected by what the guard finds kept, `corrections` times at most: a group
        below target is widened, one clearly above it is narrowed. Each group keeps its smallest choice that reached the
        target, or the one that came closest.
        """
        settings = self._settings
        mask = self._choose(masses)
        recall = self._kept(mask, self._guard, fresh).mean(1)
        if settings.policy != "adaptive":
            return mask, recall
        told, got, goal = torch.full_like(recall, settings.target), recall, settings.target
        for _ in range(settings.corrections):
            if bool(((recall >= goal) & (recall <= goal + _CLOSE * (1 - goal))).all()):
                break
            # What is missed scales with what the choice was told to miss; aim a little above the target.
            miss = (1 - told) * _AIM * (1 - goal) / (1 - got).clamp(min=1e-6)
            told = (1 - miss).clamp(_LEAST, 1.0)
            other = self._choose(masses, told)
            got = self._kept(other, self._guard, fresh).mean(1)
            smaller = other.sum((0, 2)) < mask.sum((0, 2))
            better = torch.where(recall >= goal, (got >= goal) & smaller, got > recall)
            mask = torch.where(better[:, None], other, mask)
            recall = torch.where(better, got, recall)
        short = recall < goal
        if settings.dense_below_target and bool(short.any()):
            seen = torch.arange(self._key_blocks, device=mask.device) < self._causal[:, None]
            mask = mask | (seen[:, None] & short[:, None])
            recall = recall.masked_fill(short, 1.0)
        return mask, recall

    def _attend(self, mask: torch.Tensor) -> Iterator[None]:
        task, block = self._task, self._settings.row_block
        density = int(mask.sum()) / (int(self._causal.sum()) * self._list_heads)
        for first, last in task.pieces(block, share=density):
            block_sparse_attention(
                task.q[first:last],
                task.k,
                task.v,
                self._lists(mask[first // block : -(-last // block)]),
                row_offset=task.start + first,
                out=task.out[first:last],
            )
            yield

    def _record(self, mask: torch.Tensor, steered: torch.Tensor, masses: torch.Tensor) -> None:
        """What is reported comes from the witness rows, which neither ordered the blocks nor steered their number.

        A cell is below target where the guard's rows still say so, or the witnesses do beyond the estimate's error.
        """
        task, settings, report = self._task, self._settings, self._report
        kept = self._kept(mask, self._witness, masses)
        recall, error = kept.mean(1), kept.std(1, correction=0) / kept.shape[1] ** 0.5
        per_group = self._list_heads // task.kv_heads
        # Every block counts whole but for the diagonal's, of which a causal half is computed.
        total = causal_pairs(task.start, task.rows)
        left_out = ((self._causal[:, None] - mask.sum(2)) * self._rows[:, None]).sum(0)  # of each list head
        kept_pairs = total - left_out.view(task.kv_heads, per_group).double().mean(1) * settings.key_block
        union = mask.view(len(mask), task.kv_heads, per_group, -1).any(2)
        patterns = classify(union, self._causal, key_block=settings.key_block)
        blocks = union.sum((0, 2)).tolist()
        for group in range(task.kv_heads):
            report.add_pairs(task.start, task.rows, float(kept_pairs[group]), total)
            report.vote(task.layer, group, patterns[group], blocks[group])
        report.add_recalls(task.start, task.rows, recall.tolist())
        report.below_target |= bool(((steered < settings.target) | (recall + _SURE * error < settings.target)).any())

    def _lists(self, mask: torch.Tensor) -> BlockLists:
        return lists_from_mask(mask, row_block=self._settings.row_block, key_block=self._settings.key_block)
