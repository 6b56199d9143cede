"""Writing a run of segments layer by layer, behind the caller's back."""

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.errors import KVError, StorageFull
from engine.interfaces import KVLayout
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.buffers import BufferPool
from engine.kv_store.copies import Copy
from engine.kv_store.counters import Counters
from engine.kv_store.sealing import Seal

log = logging.getLogger("foreword.kv_store")


@dataclass
class SegmentInWriting:
    """One of the writer's segments. `copy` is None where the segment is stored already: its bytes are ignored."""

    num_tokens: int
    copy: Copy | None
    groups: int  # published, counted from 0 without a gap
    next_layer: int = 0  # that the caller must hand over
    entries: list[bytes] = field(default_factory=list)  # in the header of the group being written
    seal: Seal | None = None  # of that group's file

    @property
    def written_bytes(self) -> int:
        return 0 if self.copy is None else sum(block.size_bytes for block in self.copy.blocks[: self.groups])

    @property
    def unwritten_bytes(self) -> int:
        return 0 if self.copy is None else sum(block.size_bytes for block in self.copy.blocks[self.groups :])


@dataclass(frozen=True)
class _Piece:
    """One layer of one segment on its way to the disk."""

    segment: SegmentInWriting
    layer: int
    data: memoryview  # the writer's own copy


class WriterEnd(Protocol):
    """What a writer tells the store."""

    def published(self, segments: Sequence[SegmentInWriting]) -> None:
        """A group is on disk for all of them."""
        ...

    def commit(self, segments: Sequence[SegmentInWriting]) -> None: ...

    def suspend(self, segments: Sequence[SegmentInWriting]) -> None:
        """Keep what is published as an orphan; give the rest of the reservation back."""
        ...

    def abort(self, segments: Sequence[SegmentInWriting]) -> None: ...


class LocalWriter:
    """A `KVWriter` to the disk tier; threads of its own do the disk work, each for every n-th segment.

    `buffer_bytes` bounds what waits for the disk; `write_layer` blocks while there is more. An error of the disk ends
    the writing: what was published is kept for a resume, the rest is removed and its room given back, and the error
    is raised from every further call but `suspend` and `abort`.
    """

    def __init__(
        self,
        layout: KVLayout,
        segments: Sequence[SegmentInWriting],
        blocks: BlockFolder,
        counters: Counters,
        end: WriterEnd,
        *,
        buffer_bytes: int,
        num_threads: int,
        buffers: BufferPool | None = None,
    ) -> None:
        """`buffers` give the memory that data waits in; without, the writer has its own."""
        self._layout, self._segments, self._blocks = layout, segments, blocks
        self._counters, self._end, self._buffer_bytes = counters, end, buffer_bytes
        for segment in segments:
            segment.next_layer = min(segment.groups * layout.layers_per_group, layout.num_layers)
        self._groups_done = min((segment.groups for segment in segments), default=layout.num_groups)
        self._buffers = buffers or BufferPool(buffer_bytes)
        self._condition = threading.Condition()
        self._lanes: list[deque[_Piece]] = [deque() for _ in range(max(1, min(num_threads, len(segments))))]
        self._waiting_bytes = 0  # in the lanes, and being written
        self._failure: Exception | None = None  # stops the threads
        self._error: Exception | None = None  # the same for callers, once the failure is cleaned up
        self._stopping = False  # the threads end when their lanes are empty
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"kv-writer-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def write_layer(self, layer: int, segment: int, data: memoryview) -> None:
        """Take over one layer of one segment, layer_bytes long.

        Layers of a segment come in order. Those in groups that are already published are ignored: the same key means
        the same bytes. Raises ValueError, and StorageFull or OSError of the writing threads.
        """
        target = self._segments[segment]
        expected = self._layout.layer_bytes(target.num_tokens)
        if data.nbytes != expected:
            raise ValueError(f"got {data.nbytes} bytes for segment {segment}, expected {expected}")
        self._check_open()
        if layer < target.next_layer and layer // self._layout.layers_per_group < target.groups:
            return
        if layer != target.next_layer:
            raise ValueError(f"got layer {layer} of segment {segment}, expected layer {target.next_layer}")
        piece = _Piece(target, layer, self._copied(data))
        with self._condition:
            self._wait_while(lambda: self._waiting_bytes > max(0, self._buffer_bytes - expected))
            self._lanes[segment % len(self._lanes)].append(piece)
            self._waiting_bytes += expected
            target.next_layer += 1
            self._condition.notify_all()

    def _copied(self, data: memoryview) -> memoryview:
        """In memory that is used again, by numpy, which lets other threads run meanwhile."""
        buffer = self._buffers.take(data.nbytes)
        np.copyto(buffer, np.frombuffer(data, np.uint8))
        return buffer.data

    def groups_done(self) -> int:
        """Layer groups, counted from 0, that are on disk for every segment."""
        return self._groups_done

    def flush(self) -> None:
        """Wait for the disk. Raises StorageFull, OSError."""
        with self._condition:
            self._wait_while(lambda: self._waiting_bytes > 0)

    def commit(self) -> None:
        """Make the segments matchable. Raises KVError if layers are missing, StorageFull, OSError."""
        self.flush()
        if self._groups_done < self._layout.num_groups:
            raise KVError(f"got {self._groups_done} of {self._layout.num_groups} layer groups, expected all at commit")
        self._stop()
        self._end.commit(self._segments)
        self._closed = True

    def suspend(self) -> None:
        """Finish what was handed over, keep the complete groups for the same owner. A failed write is no error here."""
        if not self._closed:
            self._stop()
            self._closed = True
            self._remove_unfinished()  # again behind a failure, whose cleaning up may have failed too
            self._end.suspend(self._segments)

    def abort(self) -> None:
        """Stop and remove everything; safe at any time, and without effect behind the writer's end."""
        if not self._closed:
            with self._condition:
                self._drop_waiting()
            self._stop()
            self._closed = True
            self._end.abort(self._segments)

    def _check_open(self) -> None:
        if self._stopping:
            raise ValueError("the writer is closed")
        if self._error is not None:
            raise self._error

    def _wait_while(self, blocked: Callable[[], bool]) -> None:
        """Holding the condition; a failure is waited for until it is cleaned up, then raised."""
        self._check_open()
        while blocked() or self._failure is not None:
            self._condition.wait()
            self._check_open()

    def _stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    # --- the writing threads ---

    def _run(self, lane: deque[_Piece]) -> None:
        while (piece := self._next_piece(lane)) is not None:
            try:
                self._write(piece)
            except Exception as error:  # whatever it is, the caller must hear of it
                log.error("kv_store: writing failed: %s", error)
                self._counters.add("write_errors")
                with self._condition:
                    self._failure = self._failure or error
                    self._drop_waiting()
            with self._condition:
                self._waiting_bytes -= len(piece.data)
                self._condition.notify_all()
        with self._condition:
            self._running -= 1
            last = self._running == 0
        if last and self._failure is not None:  # no other thread makes files any more
            self._clean_up(self._failure)

    def _next_piece(self, lane: deque[_Piece]) -> _Piece | None:
        with self._condition:
            while not lane and not self._stopping and self._failure is None:
                self._condition.wait()
            return lane.popleft() if lane else None

    def _write(self, piece: _Piece) -> None:
        segment, copy = piece.segment, piece.segment.copy
        assert copy is not None
        block = copy.block(piece.layer // self._layout.layers_per_group)
        if piece.layer == block.layers.start:
            segment.seal = self._blocks.new_seal()
        stored, entry = block.encode_layer(piece.layer, piece.data, self._blocks.keyring, segment.seal)
        self._blocks.write(copy, block.group, block.offset(piece.layer), stored)
        segment.entries.append(entry)
        if piece.layer != block.layers[-1]:
            return
        self._blocks.publish(copy, block.group, segment.entries, segment.seal)
        segment.entries.clear()
        self._counters.add("written_bytes", amount=block.size_bytes)
        with self._condition:
            segment.groups += 1
            done = min(segment.groups for segment in self._segments)
        if done > self._groups_done:
            self._blocks.sync()
            self._end.published(self._segments)
            with self._condition:
                self._groups_done = max(self._groups_done, done)

    def _clean_up(self, failure: Exception) -> None:
        try:
            self._remove_unfinished()
            self._end.suspend(self._segments)
        except Exception:  # the disk or the index is in trouble: the next sweep cleans up
            log.exception("kv_store: cannot clean up behind a failed write")
        if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
            unwritten = sum(segment.unwritten_bytes for segment in self._segments)
            failure = StorageFull(unwritten, self._blocks.free_bytes())
        with self._condition:
            self._error = failure
            self._condition.notify_all()

    def _drop_waiting(self) -> None:
        for lane in self._lanes:
            self._waiting_bytes -= sum(len(piece.data) for piece in lane)
            lane.clear()
        self._condition.notify_all()

    def _remove_unfinished(self) -> None:
        for segment in self._segments:
            if segment.copy is not None and segment.groups < self._layout.num_groups:
                self._blocks.remove_unpublished(segment.copy, segment.groups)
