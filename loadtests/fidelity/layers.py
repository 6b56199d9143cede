"""A prefill taken apart: every layer's real queries, keys and values, handed out before their attention is computed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any

import torch

from engine import forward
from engine.chain import Segment, TokenIds
from engine.model import Model
from engine.sparse import attend as segments_module
from engine.sparse import run
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask, segment_seed

GUARD = "guard"
_RUN_SEGMENTS = 16  # as the engine's runs on a GPU
_SELECTIONS = ("select_blocks", "select_mask")
_WATCHED = {"block_scores": "scores", "block_masses": GUARD, "block_sparse_attention": "attention"}


@dataclass(frozen=True)
class LayerQKV:
    """One layer over a whole prefix of `tokens`; whoever gets it fills `out`."""

    layer: int
    q: torch.Tensor  # [tokens, heads, head_dim], rotated
    k: torch.Tensor  # [kv_heads, tokens, head_dim]
    v: torch.Tensor
    out: torch.Tensor  # [tokens, heads, head_dim]
    chain: Sequence[Segment]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    def tasks(self, out: torch.Tensor) -> Iterator[SegmentTask]:
        """The engine's own pieces, segment by segment, writing into `out`."""
        for segment in self.chain:
            rows = slice(segment.start, segment.end)
            yield SegmentTask(
                layer=self.layer,
                start=segment.start,
                q=self.q[rows],
                k=self.k[:, : segment.end],
                v=self.v[:, : segment.end],
                out=out[rows],
                seed=segment_seed(segment, self.layer),
            )


def walk(
    model: Model,
    tokens: TokenIds,
    chain: Sequence[Segment],
    *,
    num_layers: int | None = None,
    watch: "Watch | None" = None,
) -> Iterator[LayerQKV]:
    """Layer after layer; when the next one is asked for, the last one's `out` goes on as the hidden states.

    `watch` gets the seconds of everything but attention. Call it under `torch.inference_mode()`.
    """
    spec, device = model.spec, model.device
    hidden = forward.embed(model, torch.from_numpy(tokens.astype("int64")).to(device))
    count = len(tokens)
    q = torch.empty(count, spec.heads, spec.head_dim, dtype=model.dtype, device=device)
    kv = torch.empty(2, spec.kv_heads, count, spec.head_dim, dtype=model.dtype, device=device)
    watch = watch or Watch(device)
    for index, layer in enumerate(model.layers[:num_layers]):
        with watch.timing("linears"):
            for segment in chain:
                rows = slice(segment.start, segment.end)
                at = forward.rotation(model, segment.start, segment.num_tokens)
                tile_q, k, v = forward.queries_keys_values(model, layer, hidden[rows], at)
                q[rows], kv[0, :, rows], kv[1, :, rows] = tile_q, k.transpose(0, 1), v.transpose(0, 1)
        qkv = LayerQKV(index, q, kv[0], kv[1], torch.empty_like(q), chain)
        yield qkv
        with watch.timing("linears"):
            for segment in chain:
                rows = slice(segment.start, segment.end)
                hidden[rows] = forward.finish_layer(model, layer, hidden[rows], qkv.out[rows])


@dataclass
class Watch:
    """What the policy's kernels did: seconds by part, and the kept keys' log-sum-exp of each call.

    Timing waits for the device before and behind each part; without it parts may overlap and `seconds` means nothing.
    """

    device: torch.device
    timed: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (position of the first row, [rows, heads])
    selections: int = 0
    _inner: float = 0.0  # seconds that belong to parts inside the one being timed

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Seconds on the device, less those of the parts timed inside."""
        outer, self._inner = self._inner, 0.0
        started = self._now()
        yield
        took = self._now() - started
        self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner
        self._inner = outer + took

    def _now(self) -> float:
        if self.timed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def attend_as_the_engine(tasks: Sequence[SegmentTask], settings: SparseSettings, report: AttentionReport) -> None:
    """Fill the tasks' `out` on the path that a prefill takes on this device; they are neighbours of one layer."""
    for together, group in groupby(tasks, lambda task: _run_kind(task, settings)):
        if together:
            attend_runs(list(group), settings, report)
            continue
        for task in group:
            for _ in segments_module.attend(task, settings, report):
                pass


def _run_kind(task: SegmentTask, settings: SparseSettings) -> tuple[int, int] | None:
    """None for a segment on its own, else the row block and the number of sampled rows: a run shares them."""
    end = task.start + task.rows
    if task.q.device.type != "cuda" or settings.policy != "adaptive" or end <= settings.crossover_tokens:
        return None
    return settings.row_block_at(end), settings.sampled_rows_at(end)


def attend_runs(tasks: Sequence[SegmentTask], settings: SparseSettings, report: AttentionReport) -> None:
    """Neighbouring segments of one kind as the engine's prefill attends on a GPU, many to a launch."""
    heads, device = tasks[0].q.shape[1], tasks[0].q.device
    for first in range(0, len(tasks), _RUN_SEGMENTS):
        part = tasks[first : first + _RUN_SEGMENTS]
        ends = [task.start + task.rows for task in part]
        drawn = [
            _drawn(settings, heads, end, task.rows, task.seed, device) for task, end in zip(part, ends, strict=True)
        ]
        rows = sum(task.rows for task in part)
        gathered = run.RunReport()
        run.attend_run(
            run.RunTask(
                layer=part[0].layer,
                start=part[0].start,
                q=_joined(part[0].q, rows),
                k=part[-1].k,
                v=part[-1].v,
                out=_joined(part[0].out, rows),
                choice_rows=torch.cat([choice for choice, _ in drawn]),
                guard_rows=torch.cat([guard for _, guard in drawn]),
                row_block=settings.row_block_at(ends[0]),
            ),
            settings,
            gathered,
        )
        gathered.read_into(report)


@lru_cache(maxsize=4096)
def _drawn(
    settings: SparseSettings, heads: int, end: int, rows: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment's sampled rows. Kept, because the engine draws them for all layers at once, ahead of their use."""
    choice, guard = run.draw_rows(settings, heads, end=end, rows=rows, seeds=[seed])
    return torch.from_numpy(choice).to(device), torch.from_numpy(guard).to(device)


def _joined(first: torch.Tensor, rows: int) -> torch.Tensor:
    """Neighbouring segments' rows as one: they are views of one tensor [tokens, heads, head_dim]."""
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@contextmanager
def watched(device: torch.device, *, timed: bool = True) -> Iterator[Watch]:
    """Every kernel call of the policies' modules is seen while this is open. One at a time."""
    watch = Watch(device, timed)
    before: list[tuple[ModuleType, str, Any]] = []
    for module in (segments_module, run):
        for name in (*_WATCHED, *_SELECTIONS):
            if hasattr(module, name):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, _timed(watch, name, getattr(module, name)))
    try:
        yield watch
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def _timed(watch: Watch, name: str, original: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        part = _WATCHED.get(name)
        if name == "block_scores":
            watch.selections = 0
        if part is None:
            # The first choice would be made without a guard too; further ones correct it.
            part = "selection" if watch.selections == 0 else GUARD
            watch.selections += 1
        with watch.timing(part):
            result = original(*arguments, **named)
        if name == "block_sparse_attention":
            watch.kept.append((named["row_offset"], result[1]))
        return result

    return call
