"""Sections in order → the stream and the rows of its manifest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from service.ingest.base import IngestError, IngestOptions
from service.ingest.names import display_name
from service.ingest.secrets import find_secrets, mask
from service.ingest.sections import Reader, unreadable
from service.ingest.spool import Entry
from service.ingest.stream import TokenStream
from service.ingest.text import note_odd_characters, pieces

Message = dict[str, Any]
# A section up to this size is held until it is complete: a fault then leaves nothing of it in the stream, and its text
# can be compared with earlier ones.
HELD_CHARS = 4 * 1024 * 1024
MAX_SECRETS_TOLD = 50
TREE_FILES = 2000
TREE_CHARS = 64_000


@dataclass
class Row:
    """A manifest row in the making; marks become tokens when the stream is closed."""

    entry: Entry
    format: str
    start: int = 0
    end: int = 0
    section_start: int = 0
    pages: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    original: "Row | None" = None
    num_chars: int = 0


class Assembler:
    """Writes sections one after another."""

    def __init__(self, stream: TokenStream, reader: Reader, options: IngestOptions) -> None:
        self._stream, self._reader, self._options = stream, reader, options
        self.rows: list[Row] = []
        self._by_bytes: dict[tuple[str, str], Row] = {}
        self._by_text: dict[str, Row] = {}

    def add(self, entry: Entry) -> None:
        row = Row(entry, entry.format)
        self.rows.append(row)
        if entry.reason is not None:
            return
        key = (entry.digest, entry.format + entry.path.rpartition(".")[2].lower() * (entry.format == "text"))
        original = self._by_bytes.get(key)
        if original is not None and entry.size and not entry.rendered:
            if original.entry.reason is not None:
                entry.reason, entry.detail = original.entry.reason, original.entry.detail
                entry.warnings += original.entry.warnings
                return
            if self._is_worth_a_note(original):
                self._write_duplicate(row, original)
                return
        self._by_bytes.setdefault(key, row)
        try:
            self._write(row)
        except IngestError as error:
            if error.code == "document_too_long":
                raise
            unreadable(error, entry)

    def _write(self, row: Row) -> None:
        held: list[Message] = []
        chars = 0
        writer: _SectionWriter | None = None
        try:
            for message in self._reader.messages(row.entry):
                if writer is not None:
                    writer.take(message)
                    continue
                held.append(message)
                chars += len(message.get("text", ""))
                if chars > HELD_CHARS:
                    writer = self._begin(row, held)
                    held = []
        except IngestError as error:
            if writer is None or error.code == "document_too_long":
                raise
            row.entry.warn("document_cut_off", cause=error.code)
            writer.take({"text": f"\n[the rest of this file can't be read: {error.code}]\n"})
        if row.entry.reason is not None and writer is None:
            return
        if writer is None:
            row.num_chars = chars
            silent = not any(m.get("text", "").strip() for m in held)
            parsed = row.entry.format not in ("text", "empty") or any("format" in m for m in held)
            if silent and parsed:
                self._explain_silence(row, held)
                return
            digest = blake3("".join(_held_text(held)).encode("utf-8", "replace")).hexdigest()
            original = self._by_text.get(digest)
            if original is not None and self._is_worth_a_note(original):
                self._note_warnings(row, held)
                self._write_duplicate(row, original)
                return
            self._by_text[digest] = row
            writer = self._begin(row, held)
        writer.finish()

    def _begin(self, row: Row, held: Sequence[Message]) -> "_SectionWriter":
        row.section_start = self._stream.mark()
        self._stream.write(header(row.entry.path))
        writer = _SectionWriter(self._stream, row, self._options)
        for message in held:
            writer.take(message)
        return writer

    def _explain_silence(self, row: Row, held: Sequence[Message]) -> None:
        """No text in a document: never an empty success."""
        self._note_warnings(row, held)
        scanned = any(w["code"].startswith("page_needs_ocr") for w in row.entry.warnings)
        row.entry.reason = "needs_ocr" if scanned or row.entry.format == "image" else "no_text"
        row.entry.detail = "its pages are images without a text layer" if scanned else "it holds no text"

    def _note_warnings(self, row: Row, held: Sequence[Message]) -> None:
        for message in held:
            if "warning" in message:
                row.entry.warn(**message["warning"])

    def _is_worth_a_note(self, original: Row) -> bool:
        if original.entry.format not in ("text", "empty"):
            return original.entry.reason is None
        return original.entry.reason is None and original.num_chars > len(original.entry.path) + 40

    def _write_duplicate(self, row: Row, original: Row) -> None:
        row.original = original
        row.section_start = self._stream.mark()
        self._stream.write(header(row.entry.path))
        self._stream.write(f"(same content as {original.entry.path})\n\n")

    # --- the end -----------------------------------------------------------------------------------------------

    def write_tree(self) -> tuple[int, int]:
        """The list of files, last so that a change of it costs nothing before it. Returns its marks."""
        start = self._stream.mark()
        for piece in pieces(tree([row.entry for row in self.rows])):
            self._stream.write(piece)
        return start, self._stream.mark()

    def manifest_rows(self) -> list[dict[str, Any]]:
        """Only after the stream is closed."""
        return [self._manifest_row(row) for row in self.rows]

    def _manifest_row(self, row: Row) -> dict[str, Any]:
        entry, at = row.entry, self._stream.token_at
        source = row.original or row
        out: dict[str, Any] = {
            "path": entry.path,
            "kind": row.format,
            "bytes": entry.size,
            "digest": entry.digest or None,
            "status": "skipped" if entry.reason is not None else "included",
        }
        if entry.reason is not None:
            out["reason"] = entry.reason
            if entry.detail:
                out["detail"] = display_name(entry.detail)
        else:
            out |= {
                "token_start": at(source.start),
                "token_end": at(source.end),
                "section_start": at(row.section_start),
            }
            if source.pages:
                out["pages"] = [
                    {"page": p["page"], "label": p["label"], "token_start": at(p["start"]), "token_end": at(p["end"])}
                    for p in source.pages
                ]
            if row.original is not None:
                out["duplicate_of"] = row.original.entry.path
        out |= row.fields
        out["warnings"] = entry.warnings
        return out


class _SectionWriter:
    """Takes one section's messages into the stream."""

    def __init__(self, stream: TokenStream, row: Row, options: IngestOptions) -> None:
        self._stream, self._row, self._options = stream, row, options
        self._line = 1
        self._last = ""
        self._secrets = 0
        row.start = stream.mark()

    def take(self, message: Message) -> None:
        row = self._row
        if "text" in message:
            self._write(message["text"])
        elif "page" in message:
            self._end_page()
            if message.get("mark"):
                label = message.get("label")
                named = f", labelled {label}" if label and label != str(message["page"]) else ""
                self._stream.write(f"[{message['mark']} {message['page']}{named}]\n")
            mark = self._stream.mark()
            row.pages.append({"page": message["page"], "label": message.get("label"), "start": mark, "end": mark})
        elif "warning" in message:
            row.entry.warn(**message["warning"])
        elif "format" in message:
            row.format = message["format"]
        elif "running_lines" in message:
            row.fields["running_lines"] = message["running_lines"]
        elif "encoding" in message:
            row.fields |= {"encoding": message["encoding"], "newlines": message["newlines"]}

    def finish(self) -> None:
        self._end_page()
        self._row.end = self._stream.mark()
        self._stream.write("\n\n" if self._last and self._last != "\n" else "\n")

    def _end_page(self) -> None:
        if self._row.pages:
            self._row.pages[-1]["end"] = self._stream.mark()
            if self._last not in ("", "\n"):
                self._stream.write("\n")
                self._last = "\n"

    def _write(self, text: str) -> None:
        entry = self._row.entry
        if entry.format != "text" or entry.rendered:
            text = _exact(text, entry)
        spans = list(find_secrets(text))
        if spans:
            self._tell_secrets(text, spans)
            if self._options.mask_secrets:
                text = mask(text, spans)
        self._line += text.count("\n")
        if text:
            self._last = text[-1]
        for piece in pieces(text):
            self._stream.write(piece)

    def _tell_secrets(self, text: str, spans: list[tuple[str, int, int]]) -> None:
        kind, start, _ = spans[0]
        self._row.entry.warn("secret_suspected", kind=kind, line=self._line + text.count("\n", 0, start))
        told = self._row.fields.setdefault("secrets", [])
        for kind, start, _ in spans[: MAX_SECRETS_TOLD - len(told)]:
            told.append({"kind": kind, "line": self._line + text.count("\n", 0, start)})


def _exact(text: str, entry: Entry) -> str:
    """What a parser said, as text that UTF-8 can hold and a reader can see."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
        entry.warn("nul_replaced")
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
        note_odd_characters(text, entry)
    return text


def _held_text(held: Sequence[Message]) -> Iterator[str]:
    for message in held:
        if "page" in message:
            yield f"\f{message['page']}\n"
        yield message.get("text", "")


def header(path: str) -> str:
    return f"=== {path} ===\n"


def tree(entries: Sequence[Entry]) -> str:
    """Paths by directory; what was left out is marked with its reason. Capped in files and characters."""
    by_folder: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda e: e.sort_key)[:TREE_FILES]:
        folder, _, name = entry.path.rpartition("/")
        by_folder.setdefault(folder, []).append(f"{name}{_remark(entry)}")
    lines = [f"=== {len(entries)} files ==="]
    chars = 0
    shown = 0
    for folder, names in by_folder.items():
        group = ([f"{folder}/"] if folder else []) + [f"  {name}" if folder else name for name in names]
        chars += sum(map(len, group))
        if chars > TREE_CHARS:
            break
        lines += group
        shown += len(names)
    if shown < len(entries):
        lines.append(f"… and {len(entries) - shown} more")
    return "\n".join(lines) + "\n"


def _remark(entry: Entry) -> str:
    if entry.reason is None or entry.reason == "expanded":
        return ""
    if entry.reason == "symlink":
        return f" -> {display_name(entry.detail or '')}"
    if entry.reason == "submodule_missing":
        commit = f" at {entry.detail}" if entry.detail else ""
        return f" [submodule{commit}, not part of this upload]"
    return f" [left out: {entry.reason}]"
