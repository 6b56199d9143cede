"""Layer-major prefill: every token goes through layer i before layer i + 1, in bounded steps.

Only one layer's K and V are held; each layer's KV leaves for the store segment by segment. Everything that decides a
bit of it happens on fixed tiles at absolute positions and is seeded by the segment's key, so a full segment's KV is
the same whether the document ends there or goes on, however the work is cut into steps, and after a resume.
"""

import logging
import time
from collections.abc import Iterator

import torch

from engine.chain import SEGMENT_TOKENS, Segment
from engine.errors import Cancelled, EngineError, KVMissing
from engine.interfaces import KVReader, KVStore, KVWriter, PrefillRequest, PrefillResult
from engine.kv_format import KVFormat
from engine.model import Model
from engine.parallel.group import RankGroup
from engine.prefill_rows import Keep, PrefillRows, prefill_rows
from engine.resume import ResumeFile, ResumeFolder
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings
from engine.work import PrefillWork

log = logging.getLogger(__name__)

# A step takes pieces until so much time is used; no piece takes longer than that by prediction, so a step stays
# within 250 ms.
STEP_S = 0.1
_READ_ATTEMPTS = 3
# A resume point may take this share of the prefill's time, at a write speed that any disk's page cache reaches.
_CHECKPOINT_SHARE = 0.1
_CHECKPOINT_BYTES_S = 1e9


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
        kv: KVFormat,
        ranks: RankGroup | None = None,
    ) -> None:
        """`ranks`: who computes the rows together, where there is enough to do and they are free.

        Raises StorageFull where the KV will not fit, OutOfMemory where the rows do not, RankLost.
        """
        self._model, self._store, self._chain, self._request = model, store, chain, request
        self._settings, self._resume_folder, self._checkpoint_s, self._work = settings, resume, checkpoint_s, work
        self._kv_format, self._ranks = kv, ranks
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
        return min(self._done_s / self._total_s, 0.999) if self._total_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds of work left, None until the speed is known."""
        if self._result is not None:
            return 0.0
        if self._done_here_s <= 0 or self._busy_s <= 0:
            return None
        return (self._total_s - self._done_s) * self._busy_s / self._done_here_s

    @property
    def result(self) -> PrefillResult:
        if self._result is None:
            raise EngineError("the prefill has not ended: step() must return False first")
        return self._result

    @property
    def last_logits(self) -> torch.Tensor | None:
        """[vocabulary] float32 of the last token; None where everything came from the store."""
        return self._last_logits

    @property
    def seconds_to_logits(self) -> float | None:
        """From the start of this attempt until the last token's logits were there: the engine's share of the TTFT."""
        return self._seconds_to_logits

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
        self._rows: PrefillRows | None = None  # None where everything is stored
        self._report = AttentionReport()
        self._busy_s = 0.0
        self._first_layer = 0
        self._published_layers = 0  # of an earlier attempt: computed again where needed, not written again
        self._layers_recomputed = 0
        self._last_logits: torch.Tensor | None = None
        self._seconds_to_logits: float | None = None
        try:
            self._first, self._reader = self._lease_stored()
            if self._first < len(self._chain):
                self._rows = self._open_rows()
                self._report = self._rows.report
                self._writer = self._store.open_writer(self._chain, first=self._first, owner=self._request.owner)
                self._find_resume_point(self._rows, self._writer)
        except BaseException:
            self._close(keep=True)
            raise
        layer_s = self._work.layer_s(self._first_row, self._chain[-1].end, self._settings, segment=SEGMENT_TOKENS)
        num_layers = self._model.spec.num_layers
        self._total_s, self._done_s = layer_s * num_layers, layer_s * self._first_layer  # predicted
        self._done_here_s = 0.0  # by this attempt
        self._steps = self._run()

    def _open_rows(self) -> PrefillRows:
        ranks = self._ranks
        if ranks is not None and ranks.takes(len(self._chain) - self._first):
            return ranks.open_rows(self._chain, self._first, self._settings, self._kv_format)
        return prefill_rows(self._model, self._chain, self._first, self._settings, self._work, self._kv_format)

    @property
    def _first_row(self) -> int:
        return self._chain[self._first].start if self._first < len(self._chain) else self._chain[-1].end

    def _lease_stored(self) -> tuple[int, KVReader | None]:
        """How many leading segments are stored, with the lease. They may be evicted between the two calls."""
        for _ in range(_READ_ATTEMPTS):
            first = self._store.match(self._chain)
            try:
                return first, self._store.open_reader(self._chain[:first]) if first else None
            except KVMissing:
                log.info("stored KV was evicted before it could be leased")
        return 0, None

    def _find_resume_point(self, rows: PrefillRows, writer: KVWriter) -> None:
        if self._resume_folder is None:
            return
        self._resume = self._resume_folder.open(
            self._request.owner, key=self._chain[-1].key, hidden_bytes=rows.hidden_bytes
        )
        layers_per_group = self._store.layout.layers_per_group
        self._published_layers = min(writer.groups_done() * layers_per_group, self._model.spec.num_layers)
        point = self._resume.load(up_to=self._published_layers) if self._resume is not None else None
        if self._resume is None or point is None:
            return
        rows.restore(point.hidden)
        rows.report = self._report = AttentionReport.from_json(point.notes)
        self._first_layer = point.layer
        self._layers_recomputed = max(self._resume.layers_computed - point.layer, 0)
        log.info("prefill resumes", extra={"owner": self._request.owner, "layer": point.layer})

    def _close(self, *, keep: bool) -> None:
        self._over = True
        if self._rows is not None:
            self._rows.close()
            self._rows = None
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
        rows, writer = self._rows, self._writer
        if rows is not None and writer is not None:
            if self._first_layer == 0:
                yield from rows.embed(self._request.tokens[self._first_row :])
            checkpointed = time.monotonic()
            for layer in range(self._first_layer, self._model.spec.num_layers):
                yield from self._layer(rows, writer, layer)
                if self._resume is not None:
                    self._resume.note_progress(layer + 1)
                    if self._checkpoint_due(rows, layer + 1, checkpointed):
                        rows.settle()
                        yield from self._resume.save(layer + 1, rows.snapshot(), self._report.to_json())
                        checkpointed = time.monotonic()
            self._last_logits = rows.last_logits()
            self._seconds_to_logits = time.monotonic() - self._started
            yield
            rows.settle()
            writer.flush()
            yield
            writer.commit()
        self._finish()

    def _layer(self, rows: PrefillRows, writer: KVWriter, layer: int) -> Iterator[None]:
        if self._reader is not None:
            rows.load(self._reader.read_layer(layer))
            yield
        keep: Keep | None = None
        if layer >= self._published_layers:

            def keep(segment: int, data: memoryview) -> None:
                writer.write_layer(layer, segment, data)

        for segment in rows.layer(layer, keep):
            if segment is not None:
                seconds = self._work.segment_s(segment.start, segment.num_tokens, self._settings)
                self._done_s += seconds
                self._done_here_s += seconds
            yield

    def _checkpoint_due(self, rows: PrefillRows, layer: int, last: float) -> bool:
        """At the boundary of a layer group, where the store can have published what lies before; not at the end."""
        at_boundary = layer % self._store.layout.layers_per_group == 0 and layer < self._model.spec.num_layers
        writing_s = rows.hidden_bytes / _CHECKPOINT_BYTES_S
        return at_boundary and time.monotonic() - last >= max(self._checkpoint_s, writing_s / _CHECKPOINT_SHARE)

    def _finish(self) -> None:
        request, report = self._request, self._report
        self._store.attach(self._chain, request.holder, ttl_s=request.kv_ttl_s, pinned=request.pinned)
        self._writer = None  # committed
        self._close(keep=False)
        self._result = PrefillResult(
            num_tokens=self._chain[-1].end,
            cached_tokens=self._first_row,
            layers_recomputed=self._layers_recomputed,
            resumed_from_layer=self._first_layer,
            density=report.density,
            recall=report.recall(self._settings.target),
            heads=report.heads(),
            seconds=time.monotonic() - self._started,
            segments=self._chain,
            segment_recalls=report.segment_recalls(),
            head_map=report.head_map(),
        )
