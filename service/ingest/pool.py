"""Parser processes: each document is parsed in a process that may die, hang or swell without taking the ingest along.

A parser (`python -m service.ingest.parsers`) reads one request a line on stdin and answers with JSON lines on stdout;
the messages are described in service.ingest.parsers.protocol. Documents are handed out in order, read ahead, and their
messages are consumed in order; a PDF of many pages is cut into spans that run side by side.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from service.ingest.base import IngestError
from service.ingest.environment import child_environment

Message = dict[str, Any]
PAGES_PER_SPAN = 32  # fixed: what a span sees of its document must not depend on the machine
MAX_WAITING_MESSAGES = 256
DOCUMENT_TIMEOUT_S = 180.0  # of one document, or one span of a PDF; OCR not counted


@dataclass(order=True)
class _Part:
    """A span of a document. Ordered as the reader wants them: a parser that is free always takes the earliest, so the
    part that is waited for can't be stuck behind later ones whose queues are full."""

    place: tuple[int, int]  # of its document, of its first page
    request: Message = field(compare=False)
    task: "ParseTask" = field(compare=False)
    messages: "queue.Queue[Message]" = field(default_factory=lambda: queue.Queue(MAX_WAITING_MESSAGES), compare=False)


class ParseTask:
    """One document on its way through the pool. Iterate over it once to get its messages."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.abandoned = False

    def __iter__(self) -> Iterator[Message]:
        """Messages but for `end`. Raises IngestError with the parser's code, parser_crashed or parser_timeout."""
        index = 0
        while index < len(self.parts):
            part = self.parts[index]
            while True:
                message = part.messages.get()
                if "end" in message:
                    break
                if "error" in message:
                    self.abandon()
                    raise IngestError(message["error"]["code"], message["error"]["message"])
                yield message
            index += 1

    def abandon(self) -> None:
        """Nobody reads the rest."""
        self.abandoned = True
        for part in self.parts:
            with contextlib.suppress(queue.Empty):
                while True:
                    part.messages.get_nowait()


class ParserPool:
    """At most `workers` parser processes, started when the first document comes. They can read what is below
    `documents` and write below `scratch`, where the kernel can hold them to it."""

    def __init__(self, workers: int, *, documents: Path, scratch: Path) -> None:
        self._workers, self._documents, self.scratch = workers, documents, scratch
        self._jobs: list[_Part] = []  # a heap
        self._submitted = 0
        self._ready = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._processes: set[_Parser] = set()
        self._closed = False

    def submit(self, request: Message, *, spans: bool = False) -> ParseTask:
        """Queue a document. With `spans` its parser says how many pages there are; further spans are queued then."""
        task = ParseTask()
        if spans:
            request = {**request, "first_page": 1, "last_page": PAGES_PER_SPAN}
        with self._ready:
            self._submitted += 1
            task.parts.append(_Part((self._submitted, 1), request, task))
            heappush(self._jobs, task.parts[0])
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._serve, name=f"parser-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._ready.notify()
        return task

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._jobs.clear()
            self._ready.notify_all()
        for parser in list(self._processes):
            parser.kill()

    def _serve(self) -> None:
        parser: _Parser | None = None
        while True:
            with self._ready:
                while not self._jobs and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                part = heappop(self._jobs)
            if part.task.abandoned:
                continue
            if parser is None or not parser.alive():
                parser = _Parser(self._documents, self.scratch)
                self._processes.add(parser)
            if not self._run(parser, part):
                self._processes.discard(parser)
                parser.kill()
                parser = None

    def _run(self, parser: "_Parser", part: _Part) -> bool:
        """Pass one part's messages on. False if the parser can't be used again."""
        try:
            for message in parser.ask(part.request):
                if "pages" in message and part.request.get("first_page") == 1:
                    self._queue_spans(part, message["pages"])
                _put(part, message)
                if part.task.abandoned:
                    return False
                if "end" in message or "error" in message:
                    return True
        except _ParserGone as gone:
            _put(part, {"error": {"code": gone.code, "message": str(gone)}})
        return False

    def _queue_spans(self, first: _Part, num_pages: int) -> None:
        parts = [
            _Part(
                (first.place[0], at),
                {**first.request, "first_page": at, "last_page": at + PAGES_PER_SPAN - 1},
                first.task,
            )
            for at in range(1 + PAGES_PER_SPAN, num_pages + 1, PAGES_PER_SPAN)
        ]
        first.task.parts += parts
        with self._ready:
            for part in parts:
                heappush(self._jobs, part)
            self._ready.notify_all()


def _put(part: _Part, message: Message) -> None:
    while not part.task.abandoned:
        with contextlib.suppress(queue.Full):
            part.messages.put(message, timeout=0.2)
            return


class _ParserGone(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Parser:
    """One parser process and the pipe to it."""

    def __init__(self, documents: Path, scratch: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-m", "service.ingest.parsers", str(documents), str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=child_environment(scratch),
        )

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Message) -> Iterator[Message]:
        """Raises _ParserGone if the process ends or takes longer than DOCUMENT_TIMEOUT_S."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timed_out = threading.Event()

        def expire() -> None:
            timed_out.set()
            self._process.kill()

        def watch() -> threading.Timer:
            timer = threading.Timer(DOCUMENT_TIMEOUT_S, expire)
            timer.daemon = True
            timer.start()
            return timer

        timer = watch()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            while line := self._process.stdout.readline():
                message: Message = json.loads(line)
                if "end" in message or "error" in message:
                    yield message
                    return
                yield message
        except (BrokenPipeError, ValueError):
            pass
        finally:
            timer.cancel()
        self._process.wait()
        if timed_out.is_set():
            raise _ParserGone("parser_timeout", f"parsing took longer than {DOCUMENT_TIMEOUT_S:g} s")
        code = self._process.returncode
        raise _ParserGone(
            "parser_crashed", f"the parser ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        )

    def kill(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
