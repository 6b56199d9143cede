"""Layer-major prefill: every token goes through layer i before layer i + 1, in bounded steps.

Only one layer's K and V are held; each layer's KV leaves for the store segment by segment. Everything that decides a
bit of it happens on fixed tiles at absolute positions and is seeded by the segment's key, so a full segment's KV is
the same whether the document ends there or goes on, however the work is cut into steps, and after a resume.
"""

import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from engine import forward
from engine.chain import SEGMENT_TOKENS, Segment
from engine.errors import Cancelled, EngineError, KVMissing
from engine.interfaces import KVReader, KVStore, KVWriter, PrefillRequest, PrefillResult
from engine.model import Model
from engine.prefill_state import ROW_GRANULE, PrefillState
from engine.resume import ResumeFile, ResumeFolder
from engine.sparse.attend import attend
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings
from engine.sparse.task import SegmentTask
from engine.stored_kv import load_segments, segment_bytes
from engine.work import PrefillWork

log = logging.getLogger(__name__)

# A step takes pieces until so much time is used; no piece takes longer than that by prediction, so a step stays
# within 250 ms.
STEP_S = 0.1
_READ_ATTEMPTS = 3


class LayerMajorPrefill:
    """`Prefill` of engine.interfaces. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        chain: list[Segment],
        request: PrefillRequest,
        settings: SparseSettings,
        *,
        resume: ResumeFolder | None,
        checkpoint_s: float,
        work: PrefillWork,
    ) -> None:
        """Raises StorageFull where the KV will not fit."""
        self._model, self._store, self._chain, self._request = model, store, chain, request
        self._settings, self._resume_folder, self._checkpoint_s, self._work = settings, resume, checkpoint_s, work
        self._started = time.monotonic()
        self._attempts = 0
        self._result: PrefillResult | None = None
        self._over = False
        self._open()

    def step(self) -> bool:
        """Do about 0.1 s of work (at most 0.25 s); True while there is more.

        Raises Cancelled after `cancel` or `suspend`, StorageFull or OSError where the KV can't be written.
        """
        if self._result is not None:
            return False
        if self._over:
            raise Cancelled("this prefill was cancelled or suspended")
        started = time.monotonic()
        with torch.inference_mode():
            while self._advance():
                if time.monotonic() - started >= STEP_S:
                    break
            else:
                return False
        self._busy_s += time.monotonic() - started
        return True

    def _advance(self) -> bool:
        try:
            next(self._steps)
            return True
        except StopIteration:
            return False
        except KVMissing:
            # A segment that was matched is gone or corrupt: it no longer matches, so it is computed this time.
            self._attempts += 1
            if self._attempts >= _READ_ATTEMPTS:
                self.cancel()
                raise
            log.warning("stored KV went missing during a prefill; starting again without it")
            self._close(keep=False)
            self._open()
            return True
        except BaseException:
            self.suspend()
            raise

    @property
    def progress(self) -> float:
        if self._result is not None:
            return 1.0
        return min(self._state.done_s / self._state.total_s, 0.999) if self._state.total_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds of work left, None until the speed is known."""
        state = self._state
        if self._result is not None:
            return 0.0
        if state.done_here_s <= 0 or self._busy_s <= 0:
            return None
        return (state.total_s - state.done_s) * self._busy_s / state.done_here_s

    @property
    def result(self) -> PrefillResult:
        if self._result is None:
            raise EngineError("the prefill has not ended: step() must return False first")
        return self._result

    @property
    def last_logits(self) -> torch.Tensor | None:
        """[vocabulary] float32 of the last token; None where everything came from the store."""
        return self._state.last_logits

    def suspend(self) -> None:
        if not self._over:
            self._close(keep=True)

    def cancel(self) -> None:
        if not self._over:
            self._close(keep=False)

    # --- opening and closing -----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lease what is stored, reserve room for the rest, find the resume point."""
        self._over = False
        self._reader: KVReader | None = None
        self._writer: KVWriter | None = None
        self._resume: ResumeFile | None = None
        self._busy_s = 0.0
        try:
            first, self._reader = self._lease_stored()
            self._state = PrefillState(self._model, self._chain, first)
            if first < len(self._chain):
                self._writer = self._store.open_writer(self._chain, first=first, owner=self._request.owner)
                self._find_resume_point(self._writer)
        except BaseException:
            self._close(keep=True)
            raise
        state, num_layers = self._state, self._model.spec.num_layers
        layer_s = self._work.layer_s(state.first_row, state.end, self._settings, segment=SEGMENT_TOKENS)
        state.total_s, state.done_s = layer_s * num_layers, layer_s * state.first_layer
        self._steps = self._run()

    def _lease_stored(self) -> tuple[int, KVReader | None]:
        """How many leading segments are stored, with the lease. They may be evicted between the two calls."""
        for _ in range(_READ_ATTEMPTS):
            first = self._store.match(self._chain)
            try:
                return first, self._store.open_reader(self._chain[:first]) if first else None
            except KVMissing:
                log.info("stored KV was evicted before it could be leased")
        return 0, None

    def _find_resume_point(self, writer: KVWriter) -> None:
        state = self._state
        if self._resume_folder is None:
            return
        self._resume = self._resume_folder.open(
            self._request.owner, key=self._chain[-1].key, hidden_bytes=state.hidden_bytes.nbytes
        )
        layers_per_group = self._store.layout.layers_per_group
        state.published_layers = min(writer.groups_done() * layers_per_group, self._model.spec.num_layers)
        point = self._resume.load(up_to=state.published_layers) if self._resume is not None else None
        if self._resume is None or point is None:
            return
        state.hidden_bytes[:] = point.hidden
        state.first_layer = point.layer
        state.report = AttentionReport.from_json(point.notes)
        state.layers_recomputed = max(self._resume.layers_computed - point.layer, 0)
        log.info("prefill resumes", extra={"owner": self._request.owner, "layer": point.layer})

    def _close(self, *, keep: bool) -> None:
        self._over = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._writer is not None:
            if keep:
                self._writer.suspend()
            else:
                self._writer.abort()
            self._writer = None
        if self._resume is not None:
            if keep:
                self._resume.close()
            else:
                self._resume.remove()
            self._resume = None

    # --- the work ------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[None]:
        """The whole prefill; each `yield` ends a bounded piece."""
        state = self._state
        if self._writer is not None:
            if state.first_layer == 0:
                yield from self._embed()
            checkpointed = time.monotonic()
            for layer in range(state.first_layer, self._model.spec.num_layers):
                yield from self._layer(layer)
                if self._resume is not None:
                    self._resume.note_progress(layer + 1)
                    if self._checkpoint_due(layer + 1, checkpointed):
                        yield from self._resume.save(layer + 1, state.hidden_bytes, state.report.to_json())
                        checkpointed = time.monotonic()
            last = state.end - 1 - state.first_row
            state.last_logits = forward.logits(self._model, state.hidden[last : last + 1])[0]
            yield
            self._writer.flush()
            yield
            self._writer.commit()
        self._finish()

    def _embed(self) -> Iterator[None]:
        state = self._state
        tokens = np.zeros(len(state.hidden), dtype=np.int64)
        tokens[: state.end - state.first_row] = self._request.tokens[state.first_row :]
        ids = torch.from_numpy(tokens)
        for first in range(0, len(ids), SEGMENT_TOKENS):
            rows = slice(first, first + SEGMENT_TOKENS)
            state.hidden[rows] = forward.embed(self._model, ids[rows])
            yield

    def _layer(self, layer: int) -> Iterator[None]:
        state = self._state
        if self._reader is not None:
            stored = self._chain[: state.first_segment]
            load_segments(state.kv, stored, self._reader.read_layer(layer))
            yield
        for index in range(state.first_segment, len(self._chain)):
            segment = self._chain[index]
            yield from self._segment(layer, segment)
            if layer >= state.published_layers and self._writer is not None:
                self._writer.write_layer(layer, index - state.first_segment, segment_bytes(state.kv, segment))
            seconds = self._work.segment_s(segment.start, segment.num_tokens, self._settings)
            state.done_s += seconds
            state.done_here_s += seconds
            yield

    def _segment(self, layer: int, segment: Segment) -> Iterator[None]:
        """One segment through one layer: K and V, attention, then the rest in place of the hidden states."""
        model, state = self._model, self._state
        weights = model.layers[layer]
        tiles = self._tiles(segment)
        queries = []
        for tile in tiles:
            hidden = state.hidden[tile.start - state.first_row : tile.stop - state.first_row]
            at = state.rotation(tile)
            tile_q, k, v = forward.queries_keys_values(model, weights, hidden, at)
            queries.append(tile_q)
            real = min(tile.stop, segment.end)
            state.kv[0, :, tile.start : real] = k[: real - tile.start].transpose(0, 1)
            state.kv[1, :, tile.start : real] = v[: real - tile.start].transpose(0, 1)
            yield
        q = queries[0] if len(queries) == 1 else torch.cat(queries)
        out = torch.empty(q.shape, dtype=q.dtype)
        out[segment.num_tokens :] = 0
        task = SegmentTask(
            layer=layer,
            start=segment.start,
            q=q[: segment.num_tokens],
            k=state.kv[0, :, : segment.end],
            v=state.kv[1, :, : segment.end],
            out=out[: segment.num_tokens],
            seed=int(segment.key[:14], 16) ^ layer,
        )
        yield from attend(task, self._settings, state.report)
        for tile in tiles:
            rows = slice(tile.start - state.first_row, tile.stop - state.first_row)
            attended = out[tile.start - segment.start : tile.stop - segment.start]
            state.hidden[rows] = forward.finish_layer(model, weights, state.hidden[rows], attended)
            yield

    def _tiles(self, segment: Segment) -> list[range]:
        """Row tiles at fixed positions; the document's last one is padded to the granule, beyond its end."""
        end, rows = -(-segment.end // ROW_GRANULE) * ROW_GRANULE, self._work.tile_rows
        return [range(start, min(start + rows, end)) for start in range(segment.start, end, rows)]

    def _checkpoint_due(self, layer: int, last: float) -> bool:
        """At the boundary of a layer group, where the store can have published what lies before; not at the end."""
        at_boundary = layer % self._store.layout.layers_per_group == 0 and layer < self._model.spec.num_layers
        return at_boundary and time.monotonic() - last >= self._checkpoint_s

    def _finish(self) -> None:
        state, request = self._state, self._request
        self._store.attach(self._chain, request.holder, ttl_s=request.kv_ttl_s, pinned=request.pinned)
        self._writer = None  # committed
        self._close(keep=False)
        self._result = PrefillResult(
            num_tokens=state.end,
            cached_tokens=state.first_row,
            layers_recomputed=state.layers_recomputed,
            resumed_from_layer=state.first_layer,
            density=state.report.density,
            recall=state.report.recall(self._settings.target),
            heads=state.report.heads(),
            seconds=time.monotonic() - self._started,
            segments=self._chain,
            segment_recalls=state.report.segment_recalls(),
        )
