"""Prefill's rows on a GPU: segments in runs, nothing waited for but the run before the last.

Linears and dense attention work on one segment at a time, always of the same shape, so that a segment's bits do not
depend on its neighbours; choice and sparse attention share launches over a run, which changes no bit.
"""

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine import forward
from engine.chain import SEGMENT_TOKENS, Segment, TokenIds
from engine.cuda.memory import new_event
from engine.cuda.outflow import Outflow
from engine.errors import OutOfMemory
from engine.kv_format import KVFormat
from engine.model import Model
from engine.prefill_rows import ROW_GRANULE, Keep, Stripe, own_tokens, places
from engine.sparse.attend import attend
from engine.sparse.report import AttentionReport
from engine.sparse.run import RunReport, RunTask, attend_run, draw_rows
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask, segment_seed

log = logging.getLogger(__name__)

_RUN_SEGMENTS = 16
_RUNS_AHEAD = 2
# Of every key block: masses of two folds, two masks, their running count and positions; log-sum-exps and masses.
_BYTES_A_LIST, _BYTES_A_GUARD_ROW = 32, 16


class CudaRows:
    """`PrefillRows` on one GPU.

    Work buffers are made once, of the size that the run length asks for; where the device has too little memory the
    runs get shorter, which changes no bit either.
    """

    def __init__(
        self,
        model: Model,
        chain: Sequence[Segment],
        first_segment: int,
        settings: SparseSettings,
        kv: KVFormat,
        own: Sequence[Segment] | None = None,
        *,
        run_segments: int = _RUN_SEGMENTS,
    ) -> None:
        """`own`: the new segments whose rows are computed here, in order; all of them where not given.

        Raises OutOfMemory where hidden states and K and V of a layer don't fit the device.
        """
        spec = model.spec
        self._model, self._chain, self._settings, self._kv_format = model, chain, settings, kv
        self._device = model.device
        self._first_segment, self._end = first_segment, chain[-1].end
        self._own = chain[first_segment:] if own is None else own
        self._places, padded = places(self._own)
        self._run_segments = run_segments
        self.report = AttentionReport()
        self._run_report = RunReport()
        self._sampling: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_flight: deque[torch.cuda.Event] = deque()
        self._outflow: Outflow | None = None
        try:
            self._hidden = torch.empty(padded, spec.hidden, dtype=model.dtype, device=self._device)
            self._kv = torch.empty(2, spec.kv_heads, self._end, spec.head_dim, dtype=model.dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            needed = padded * spec.hidden * model.dtype.itemsize + self._end * spec.kv_bytes_per_token(
                model.dtype.itemsize
            )
            self.close()
            raise OutOfMemory(needed, torch.cuda.mem_get_info(self._device)[0]) from error

    @property
    def hidden_bytes(self) -> int:
        return self._hidden.nbytes

    def embed(self, tokens: TokenIds) -> Iterator[None]:
        ids = torch.from_numpy(own_tokens(tokens, self._own, self._chain[self._first_segment])).to(self._device)
        for first in range(0, len(ids), SEGMENT_TOKENS):
            rows = slice(first, first + SEGMENT_TOKENS)
            self._hidden[rows] = forward.embed(self._model, ids[rows])
        yield

    def load(self, buffers: Sequence[memoryview]) -> None:
        for segment, buffer in zip(self._chain, buffers, strict=False):
            # Read only, which torch has no notion of; so it is copied.
            self.place(segment, torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8).copy()).to(self._device))

    def layer(self, layer: int, keep: Keep | None) -> Iterator[Segment | None]:
        for run in self._runs(self._own):
            self._wait_for_room()
            self._run(layer, run, keep)
            self._note_in_flight()
            yield from run

    def project(self, layer: int, segments: Sequence[Segment]) -> Generator[None, None, Stripe]:
        stripe = Stripe(layer)
        for run in self._runs(segments):
            fused = self._fused(run)
            stripe.parts.append((run, fused))
            stripe.packed.extend(packed for _, packed in self._project_run(layer, run, fused))
        yield
        return stripe

    def attend(self, stripe: Stripe) -> Iterator[None]:
        self._wait_for_room()
        for run, fused in stripe.parts:
            self._run(stripe.layer, run, None, fused)
        self._note_in_flight()
        yield

    def place(self, segment: Segment, packed: torch.Tensor) -> None:
        self._kv_format.unpack(packed, self._kv[:, :, segment.start : segment.end])

    def hidden_of(self, segment: Segment) -> torch.Tensor:
        first, size = self._places[segment.index]
        return self._hidden[first : first + size]

    def settle(self) -> None:
        if self._outflow is not None:
            self._outflow.settle()
        self._run_report.read_into(self.report)

    def snapshot(self) -> NDArray[np.uint8]:
        return self._hidden.cpu().view(torch.uint8).numpy().reshape(-1)

    def restore(self, hidden: NDArray[np.uint8]) -> None:
        self._hidden.view(torch.uint8).view(-1).copy_(torch.from_numpy(hidden))

    def last_logits(self) -> torch.Tensor:
        last = self._chain[-1]
        return forward.logits(self._model, self.hidden_of(last)[last.num_tokens - 1 : last.num_tokens])[0].cpu()

    def close(self) -> None:
        if self._outflow is not None:
            self._outflow.close()
            self._outflow = None
        self._hidden = self._kv = torch.empty(0)
        self._sampling.clear()
        self._in_flight.clear()

    # --- one run -------------------------------------------------------------------------------------------------

    def _runs(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Neighbouring segments in runs that share their way of attention and their number of sampled rows."""
        run: list[Segment] = []
        for segment in segments:
            if run and (len(run) >= self._run_segments or self._kind(run[0]) != self._kind(segment)):
                yield run
                run = []
            run.append(segment)
        if run:
            yield run

    def _kind(self, segment: Segment) -> tuple[int, int]:
        """Rows of a row block and how many of them are sampled; (0, 0) where the segment doesn't go by `attend_run`."""
        settings = self._settings
        if settings.policy != "adaptive" or segment.end <= settings.crossover_tokens:
            return 0, 0
        return settings.row_block_at(segment.end), settings.sampled_rows_at(segment.end)

    def _wait_for_room(self) -> None:
        while len(self._in_flight) >= _RUNS_AHEAD:
            self._in_flight.popleft().synchronize()

    def _note_in_flight(self) -> None:
        event = new_event()
        event.record()
        self._in_flight.append(event)

    def _run(self, layer: int, run: list[Segment], keep: Keep | None, projected: torch.Tensor | None = None) -> None:
        """`projected`: what `_project_run` made of the run, if it has been there."""
        buffers = self._buffers(run, projected)
        start, end = run[0].start, run[-1].end
        if buffers is None:
            self._run_segments = len(run) // 2
            log.warning("too little device memory: runs of %d segments from here on", self._run_segments)
            for first in range(0, len(run), self._run_segments):
                part = run[first : first + self._run_segments]
                at = part[0].start - start
                rows = None if projected is None else projected[at : at + self._padded(part)]
                self._run(layer, part, keep, rows)
            return
        fused, out = buffers
        if projected is None:
            for segment, packed in self._project_run(layer, run, fused):
                if keep is not None:
                    self.send(segment, packed, keep)
        self._attend(layer, run, fused[: end - start, : self._model.spec.heads], out[: end - start])
        for segment in run:
            hidden, first = self.hidden_of(segment), segment.start - start
            weights = self._model.layers[layer]
            forward.finish_layer(self._model, weights, hidden, out[first : first + len(hidden)], out=hidden)

    def _project_run(
        self, layer: int, run: list[Segment], fused: torch.Tensor
    ) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Queries, keys and values into `fused`, K and V into their places; yields each segment's as they are kept."""
        start = run[0].start
        at = forward.rotation(self._model, start, len(fused))
        for segment in run:
            first = segment.start - start
            own = fused[first : first + len(self.hidden_of(segment))]
            rows = slice(first, first + len(own))
            self._project(layer, segment, own, forward.Rotation(at.cos[rows], at.sin[rows]))
            yield segment, self._keep_values(layer, segment, own)

    @staticmethod
    def _padded(run: list[Segment]) -> int:
        return -(-(run[-1].end - run[0].start) // ROW_GRANULE) * ROW_GRANULE

    def _fused(self, run: list[Segment]) -> torch.Tensor:
        """Room for a run's queries, keys and values, [padded rows, heads + 2 * kv_heads, head_dim]."""
        spec = self._model.spec
        width = spec.heads + 2 * spec.kv_heads
        return torch.empty(self._padded(run), width, spec.head_dim, dtype=self._model.dtype, device=self._device)

    def _buffers(self, run: list[Segment], projected: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Fused projections and attention's result for a run, with the rest of its needs tried out beside them.

        None where the device has too little memory and the run can be cut. Raises OutOfMemory where it can't.
        """
        spec, dtype = self._model.spec, self._model.dtype
        padded, transient = self._padded(run), self._transient_bytes(run)
        try:
            fused = self._fused(run) if projected is None else projected
            out = torch.empty(padded, spec.heads, spec.head_dim, dtype=dtype, device=self._device)
            torch.empty(transient, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            self._in_flight.clear()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            if len(run) > 1:
                return None
            needed = transient + padded * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim * dtype.itemsize
            raise OutOfMemory(needed, torch.cuda.mem_get_info(self._device)[0]) from error
        out[run[-1].end - run[0].start :] = 0
        return fused, out

    def _transient_bytes(self, run: list[Segment]) -> int:
        """About what a run needs beside its buffers at one time: the larger of the linears' and the choice's."""
        spec, settings = self._model.spec, self._settings
        linears = SEGMENT_TOKENS * (3 * spec.intermediate + 4 * spec.hidden) * self._model.dtype.itemsize
        row_block, _ = self._kind(run[0])
        if not row_block:
            return linears
        key_blocks = -(-run[-1].end // settings.key_block)
        lists = len(run) * SEGMENT_TOKENS // row_block * spec.kv_heads
        guard_rows = len(run) * spec.heads * 2 * settings.guard_rows_at(run[-1].end)
        return max(linears, key_blocks * (lists * _BYTES_A_LIST + guard_rows * _BYTES_A_GUARD_ROW))

    def _project(self, layer: int, segment: Segment, own: torch.Tensor, at: forward.Rotation) -> None:
        """The segment's queries, keys and values into `own` [rows, heads + 2 * kv_heads, head_dim]."""
        model, spec = self._model, self._model.spec
        q, k, _ = forward.queries_keys_values(model, model.layers[layer], self.hidden_of(segment), at, out=own)
        if q.data_ptr() != own.data_ptr():  # q and k were normed into tensors of their own
            own[:, : spec.heads] = q
            own[:, spec.heads : spec.heads + spec.kv_heads] = k

    def _keep_values(self, layer: int, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        """K and V into their places, as the values that are kept; returns them as they are kept."""
        new = own[: segment.num_tokens, self._model.spec.heads :].transpose(0, 1)
        return self._kv_format.pack(new, self._kv[:, :, segment.start : segment.end])

    def _attend(self, layer: int, run: list[Segment], q: torch.Tensor, out: torch.Tensor) -> None:
        row_block, _ = self._kind(run[0])
        if row_block:
            choice, guard = self._sampled_rows(run, layer)
            start, end = run[0].start, run[-1].end
            keys, values = self._kv[0, :, :end], self._kv[1, :, :end]
            run_task = RunTask(layer, start, q, keys, values, out, choice, guard, row_block)
            attend_run(run_task, self._settings, self._run_report)
            return
        for segment in run:
            rows = slice(segment.start - run[0].start, segment.end - run[0].start)
            task = SegmentTask(
                layer=layer,
                start=segment.start,
                q=q[rows],
                k=self._kv[0, :, : segment.end],
                v=self._kv[1, :, : segment.end],
                out=out[rows],
                seed=segment_seed(segment, layer),
            )
            for _ in attend(task, self._settings, self.report):
                pass

    def send(self, segment: Segment, packed: torch.Tensor, keep: Keep) -> None:
        if self._outflow is None:
            largest = max(part.num_tokens for part in self._chain[self._first_segment :])
            layout = self._kv_format.layout(self._model.spec)
            self._outflow = Outflow(self._device, layout.layer_bytes(largest))
        place = segment.index - self._first_segment
        self._outflow.send(packed, partial(keep, place), lane=place)

    def _sampled_rows(self, run: list[Segment], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(choice [segments, heads, samples], guard [segments, heads, 2, count]) of a run in one layer."""
        parts = []
        for segment in run:
            if segment.index not in self._sampling:
                self._sampling[segment.index] = self._draw(segment)
            parts.append(self._sampling[segment.index])
        return torch.stack([choice[layer] for choice, _ in parts]), torch.stack([guard[layer] for _, guard in parts])

    def _draw(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        spec, settings = self._model.spec, self._settings
        seeds = [segment_seed(segment, layer) for layer in range(spec.num_layers)]
        choice, guard = draw_rows(settings, spec.heads, end=segment.end, rows=segment.num_tokens, seeds=seeds)
        return torch.from_numpy(choice).to(self._device), torch.from_numpy(guard).to(self._device)
