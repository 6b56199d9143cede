"""From an entry to the messages of its section: which reader it gets, and what policy leaves out."""

import contextlib
import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.ingest import flavours, policy
from service.ingest.base import IngestError, IngestLimits, IngestOptions
from service.ingest.encodings import decode
from service.ingest.ocr import Ocr
from service.ingest.office import Office
from service.ingest.pool import ParserPool, ParseTask
from service.ingest.sniff import ARCHIVES, DOCUMENTS
from service.ingest.spool import Entry, Spool
from service.ingest.text import is_binary, read_text, survey

Message = dict[str, Any]
HEAD_BYTES = 8192
MAX_POINTER_BYTES = 1024
WORD_STREAM = "WordDocument".encode("utf-16-le")
WHOLE_TEXT_BYTES = 8 * 1024 * 1024  # longer texts are never held whole: no pages, no transcript, just lines


class RunningLines:
    """Headers and footers of pages: the same line at the same edge of the page before, or the one before that, has
    been read already. Page and Bates numbers differ from page to page, so they stay."""

    MIN_LETTERS = 4

    def __init__(self) -> None:
        self._pages: list[set[tuple[str, str]]] = [set(), set(), set()]
        self.dropped: dict[str, int] = {}

    def next_page(self) -> None:
        self._pages = [set(), *self._pages[:2]]

    def stands_already(self, edge: str, line: str) -> bool:
        key = (edge, line.strip())
        self._pages[0].add(key)
        if sum(c.isalpha() for c in line) < self.MIN_LETTERS or not (key in self._pages[1] or key in self._pages[2]):
            return False
        self.dropped[key[1]] = self.dropped.get(key[1], 0) + 1
        return True


class Reader:
    """Reads entries, documents through the pool and ahead of their turn."""

    def __init__(
        self,
        kind: str,
        spool: Spool,
        pool: ParserPool,
        limits: IngestLimits,
        options: IngestOptions,
        ocr: Ocr | None,
        office: Office | None,
    ) -> None:
        self.kind, self.spool, self.pool = kind, spool, pool
        self.limits, self.options, self.ocr, self.office = limits, options, ocr, office
        self._tasks: dict[str, ParseTask] = {}
        self._ocr_pool = ThreadPoolExecutor(max(1, limits.workers), thread_name_prefix="ocr")
        self._conversions: dict[str, Future[Path | None]] = {}
        self._office_pool = ThreadPoolExecutor(1, thread_name_prefix="office")
        self._used_ocr = self._used_office = False

    def programs(self) -> list[str]:
        """Versions of the installed programs that had a say in the text."""
        used = [
            self.ocr.version if self.ocr and self._used_ocr else "",
            self.office.version if self.office and self._used_office else "",
        ]
        return [version for version in used if version]

    # --- what is left out --------------------------------------------------------------------------------------

    def judge(self, entry: Entry) -> None:
        """Set the entry's reason if it is left out for its name, format or first bytes."""
        if entry.reason is not None or entry.rendered:
            return
        if self.kind == "repo":
            entry.reason = policy.by_path(entry.path.split("/"), self.options)
            if entry.reason is None and entry.format == "text":
                entry.reason = policy.by_head(self.spool.read(entry, HEAD_BYTES), self.options)
            elif entry.reason is None and entry.format in ARCHIVES:
                entry.reason = "archive"
        elif entry.format == "text" and entry.size < MAX_POINTER_BYTES:
            entry.reason = policy.is_pointer(self.spool.read(entry, MAX_POINTER_BYTES))
        if entry.reason == "lfs_pointer":
            entry.warn("lfs_pointer")
        if entry.reason is None:
            if entry.format == "binary" or (entry.format == "image" and self.kind == "repo"):
                entry.reason = "binary"
            elif entry.format == "empty" and self.kind != "repo":
                entry.reason = "empty_input"
            elif entry.format in DOCUMENTS and entry.size > self.limits.max_document_bytes:
                entry.reason, entry.detail = (
                    "document_too_large",
                    f"{entry.size} bytes, limit {self.limits.max_document_bytes}",
                )

    # --- documents, ahead of their turn ------------------------------------------------------------------------

    def read_ahead(self, entry: Entry) -> None:
        """Hand a document to the parsers; its messages wait until `messages` is called."""
        if entry.reason is not None or entry.rendered or entry.format not in DOCUMENTS or self.is_ahead(entry):
            return
        assert entry.file is not None
        if self.office is not None and entry.format == "ole" and _is_word(entry.file):
            self._conversions[entry.path] = self._office_pool.submit(self._convert, self.office, entry.file)
        else:
            self._tasks[entry.path] = self._submit(entry, entry.format, entry.file)

    def is_ahead(self, entry: Entry) -> bool:
        return entry.path in self._tasks or entry.path in self._conversions

    def _convert(self, office: Office, file: Path) -> Path | None:
        converted = file.with_name(f"{file.name}-docx")
        return converted if office.to_docx(file, converted) else None

    def _submit(self, entry: Entry, format: str, file: Path) -> ParseTask:
        request = {
            "file": str(file),
            "name": entry.path.rpartition("/")[2],
            "format": format,
            "scratch": str(self.pool.scratch),
            "options": {"mark_deletions": self.options.mark_deletions, "header_once": self.options.header_once},
            "max_xml_bytes": self.limits.max_xml_bytes,
            "ocr": self.ocr is not None,
        }
        return self.pool.submit(request, spans=format == "pdf")

    # --- content -----------------------------------------------------------------------------------------------

    def messages(self, entry: Entry) -> Iterator[Message]:
        """The section's messages; ends early with entry.reason set where the text turns out not to be one.

        Raises IngestError with the reason a document can't be read.
        """
        if entry.format == "empty":
            return
        if entry.rendered:
            yield from self._plain(entry)
        elif entry.format in DOCUMENTS:
            self.read_ahead(entry)
            if entry.path in self._conversions:
                yield from self._converted(entry, self._conversions.pop(entry.path).result())
            else:
                yield from self._document(entry, self._tasks.pop(entry.path))
        else:
            yield from self._text(entry)

    def _converted(self, entry: Entry, file: Path | None) -> Iterator[Message]:
        """A Word 97 file as LibreOffice sees it; as our own reader does, if that fails or finds nothing."""
        if file is not None:
            with contextlib.suppress(IngestError):
                messages = list(self._document(entry, self._submit(entry, "docx", file)))
                if any(message.get("text", "").strip() for message in messages):
                    self._used_office = True
                    yield {"warning": {"code": "doc_by_libreoffice"}}
                    yield from messages
                    return
        assert entry.file is not None
        yield from self._document(entry, self._submit(entry, "ole", entry.file))

    def _document(self, entry: Entry, task: ParseTask) -> Iterator[Message]:
        waiting: list[Message] = []
        running = RunningLines()
        for message in task:
            if "page" in message:
                running.next_page()
            elif "edge" in message and running.stands_already(message["edge"], message["text"]):
                continue
            if "ocr" in message:
                assert self.ocr is not None
                self._used_ocr = True
                page = message["ocr"]
                future: Future[str] = self._ocr_pool.submit(self.ocr.read, Path(page["image"]))
                waiting.append({"text": future, "number": page["page"]})
            elif waiting:
                waiting.append(message)
            else:
                yield message
            while waiting and (len(waiting) > 64 or not _is_open(waiting[0])):
                yield from _resolved(waiting.pop(0))
        for message in waiting:
            yield from _resolved(message)
        if running.dropped:
            yield {"running_lines": [{"text": line, "times": times} for line, times in sorted(running.dropped.items())]}

    def _plain(self, entry: Entry) -> Iterator[Message]:
        found = survey(self.spool.blocks(entry))
        for piece in read_text(self.spool, entry, found, keep_base64=True):
            yield {"text": piece}

    def _text(self, entry: Entry) -> Iterator[Message]:
        found = survey(self.spool.blocks(entry))
        if is_binary(found):
            entry.reason = "binary"
            return
        yield {"encoding": found.encoding, "newlines": found.newlines}
        if self.kind == "repo":
            yield from self._source(entry, found.lines, found.longest_line, found)
            return
        head, _, _ = decode(self.spool.read(entry, HEAD_BYTES), found.encoding)
        flavour = flavours.flavour(entry.path, head)
        if flavour == "html":
            file = self.spool.new_file()
            with open(file, "wb") as out:
                for block in self.spool.blocks(entry):
                    out.write(block)
            yield {"format": "html"}
            yield from self._document(entry, self._submit(entry, "html", file))
            return
        if entry.size > WHOLE_TEXT_BYTES:
            yield from self._plain(entry)
            return
        text = "".join(read_text(self.spool, entry, found))
        if flavour == "transcript":
            yield from flavours.transcript(text)
        elif flavour == "notebook":
            yield from flavours.notebook(text)
        else:
            yield from flavours.paged(text)

    def _source(self, entry: Entry, lines: int, longest_line: int, found: Any) -> Iterator[Message]:
        entry.reason = policy.by_shape(entry.path, entry.size, lines, longest_line, self.options)
        if entry.reason is not None:
            return
        if policy.is_long_data(entry.path, entry.size, self.options):
            yield from self._data_head(entry, lines, found)
        elif entry.path.endswith(".ipynb") and entry.size <= WHOLE_TEXT_BYTES:
            yield from flavours.notebook("".join(read_text(self.spool, entry, found, keep_base64=True)))
        else:
            for piece in read_text(self.spool, entry, found):
                yield {"text": piece}

    def _data_head(self, entry: Entry, lines: int, found: Any) -> Iterator[Message]:
        """The first lines of a long data file, and how much more there is."""
        head = ""
        for piece in read_text(self.spool, entry, found):
            head += piece
            if len(head) >= policy.DATA_HEAD_BYTES:
                break
        cut = head.rfind("\n", 0, policy.DATA_HEAD_BYTES) + 1
        head = head[: cut or policy.DATA_HEAD_BYTES]
        left = lines - head.count("\n")
        yield {"text": head}
        yield {"text": f"[data file: {left} further lines left out, {entry.size} bytes in all]\n"}
        entry.warn("data_cut", lines_left_out=left, bytes=entry.size)

    def close(self) -> None:
        self._ocr_pool.shutdown(wait=False, cancel_futures=True)
        self._office_pool.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


def _is_word(file: Path) -> bool:
    """Whether a compound file names a WordDocument stream: no more than a search, the parser knows for sure."""
    with open(file, "rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(WORD_STREAM) >= 0


def _is_open(message: Message) -> bool:
    value = message.get("text")
    return isinstance(value, Future) and not value.done()


def _resolved(message: Message) -> Iterator[Message]:
    value = message.get("text")
    if not isinstance(value, Future):
        yield message
        return
    text = value.result().strip()
    if text:
        yield {"warning": {"code": f"page_ocr:{message['number']}"}}
        yield {"text": text + "\n"}
    else:
        yield {"warning": {"code": f"page_needs_ocr:{message['number']}"}}


def unreadable(error: IngestError, entry: Entry) -> None:
    entry.reason, entry.detail = error.code, error.message[:300]
    if error.code == "password_required":
        entry.warn("password_required")
