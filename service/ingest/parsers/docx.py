"""DOCX by its XML (ECMA-376): what Word prints, in its order, and what reviewers added, marked as theirs.

Tracked changes: the final view (insertions in, deletions out) with a warning; with `mark_deletions` deletions show as
[deleted: …]. Comments, notes and text boxes stand at their anchor; headers and footers once a document.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from service.ingest.parsers.docx_numbering import Numbering
from service.ingest.parsers.protocol import Message, OfficeZip, Request, text, warning

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
MC = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
WP = "{http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing}"
M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
REMOVED = frozenset({f"{W}del", f"{W}moveFrom"})
ADDED = frozenset({f"{W}ins", f"{W}moveTo"})
MAX_DEPTH = 200
SYMBOLS = {"f0fe": "☒", "f0a8": "☐", "f0fc": "✓", "f0b7": "•", "f0a7": "▪", "f0d8": "➢", "f06f": "☐", "f0e0": "→"}


@dataclass
class _Notes:
    """Texts that paragraphs refer to by id."""

    footnotes: dict[str, str] = field(default_factory=dict)
    endnotes: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)


def parse(request: Request) -> Iterator[Message]:
    parts = OfficeZip(request)
    main = _main_part(parts)
    folder = main.rpartition("/")[0] + "/"
    root = parts.part(main)
    numbering = Numbering(parts.xml(f"{folder}numbering.xml"), parts.xml(f"{folder}styles.xml"))
    writer = _Writer(numbering, mark_deletions=bool(request.options.get("mark_deletions")))
    headers, footers = _margins(parts, folder, writer)
    _read_notes(parts, folder, writer)
    yield from _chunks(headers)
    body = root.find(f"{W}body")
    yield from _chunks(writer.blocks(body if body is not None else root, 0))
    yield from _chunks(footers)
    for code in sorted(writer.seen):
        yield warning(code)
    for name in sorted(parts.names):
        if name.startswith((f"{folder}embeddings/", f"{folder}altChunk")):
            yield warning(f"embedded_file:{name.rpartition('/')[2]}")


def _main_part(parts: OfficeZip) -> str:
    """The part that the package's relationships call its document; usually word/document.xml."""
    relations = parts.xml("_rels/.rels")
    if relations is not None:
        for relation in relations:
            if str(relation.get("Type", "")).endswith("/officeDocument"):
                target = str(relation.get("Target", "")).lstrip("/")
                if target in parts.names:
                    return target
    return "word/document.xml"


def _chunks(lines: Iterator[str] | list[str]) -> Iterator[Message]:
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line + "\n")
        size += len(line) + 1
        if size > 16_000:
            yield from text("".join(held))
            held, size = [], 0
    if held:
        yield from text("".join(held))


def _margins(parts: OfficeZip, folder: str, writer: "_Writer") -> tuple[list[str], list[str]]:
    """Texts of all headers and of all footers, each different one once."""
    out: tuple[list[str], list[str]] = ([], [])
    for kind, lines in zip(("header", "footer"), out, strict=True):
        names = sorted(n for n in parts.names if n.startswith(f"{folder}{kind}") and n.endswith(".xml"))
        for name in names:
            root = parts.xml(name)
            content = "\n".join(writer.blocks(root, 0)).strip() if root is not None else ""
            line = f"[{kind}: {content}]"
            if content and line not in lines:
                lines.append(line)
    return out


def _read_notes(parts: OfficeZip, folder: str, writer: "_Writer") -> None:
    for kind, target in (("footnote", writer.notes.footnotes), ("endnote", writer.notes.endnotes)):
        root = parts.xml(f"{folder}{kind}s.xml")
        for note in root if root is not None else ():
            if note.tag == f"{W}{kind}" and note.get(f"{W}type") in (None, "normal"):
                target[note.get(f"{W}id", "")] = "\n".join(writer.blocks(note, 0)).strip()
    root = parts.xml(f"{folder}comments.xml")
    for comment in root if root is not None else ():
        content = "\n".join(writer.blocks(comment, 0)).strip()
        author = comment.get(f"{W}author", "")
        writer.notes.comments[comment.get(f"{W}id", "")] = (
            f"[comment by {author}: {content}]" if author else f"[comment: {content}]"
        )


class _Writer:
    """Turns body elements into lines."""

    def __init__(self, numbering: Numbering, *, mark_deletions: bool) -> None:
        self.numbering, self.mark_deletions = numbering, mark_deletions
        self.notes = _Notes()
        self.seen: set[str] = set()
        self._fields: list[bool] = []  # open complex fields; True: in the instruction part

    def blocks(self, parent: Any, depth: int) -> Iterator[str]:
        """Lines of the paragraphs and tables in `parent`."""
        if depth > MAX_DEPTH:
            return
        carried = ""
        for element in parent:
            tag = element.tag
            if tag == f"{W}p":
                lines, goes_on = self._paragraph(element, depth)
                if goes_on:  # its mark is deleted: the next paragraph continues it
                    carried += "\n".join(lines)
                    continue
                if carried:
                    lines[0:1] = [carried + (lines[0] if lines else "")]
                    carried = ""
                yield from lines
            elif tag == f"{W}tbl":
                yield from self._table(element, depth)
            elif tag in REMOVED:
                self.seen.add("tracked_changes")
            elif tag in (f"{W}sdt", f"{W}customXml", f"{W}sdtContent", f"{W}smartTag") or tag in ADDED:
                yield from self.blocks(element, depth + 1)
            elif tag == f"{MC}AlternateContent":
                chosen = _choice(element)
                if chosen is not None:
                    yield from self.blocks(chosen, depth + 1)
        if carried:
            yield carried

    def _paragraph(self, element: Any, depth: int) -> tuple[list[str], bool]:
        properties = element.find(f"{W}pPr")
        deleted_mark = self._mark_is_deleted(properties)
        inline: list[str] = []
        after: list[str] = []
        self._inline(element, inline, after, depth + 1)
        content = "".join(inline)
        if deleted_mark and not content.strip():
            return [], True  # the whole paragraph is gone, its number too
        number = self.numbering.of(properties) if content.strip() else ""
        content = content.strip("\n") if not number else f"{number} {content.strip()}"
        return [content.rstrip(), *after], deleted_mark

    def _mark_is_deleted(self, properties: Any | None) -> bool:
        mark = None if properties is None else properties.find(f"{W}rPr")
        if mark is None:
            return False
        if mark.find(f"{W}ins") is not None or mark.find(f"{W}moveTo") is not None:
            self.seen.add("tracked_changes")
        if mark.find(f"{W}del") is not None or mark.find(f"{W}moveFrom") is not None:
            self.seen.add("tracked_changes")
            return not self.mark_deletions
        return False

    def _inline(self, parent: Any, out: list[str], after: list[str], depth: int) -> None:
        if depth > MAX_DEPTH:
            return
        for element in parent:
            tag = element.tag
            if tag == f"{W}r":
                self._run(element, out, after, depth)
            elif tag in REMOVED:
                self._deletion(element, out, after, depth)
            elif tag in ADDED:
                self.seen.add("tracked_changes")
                self._inline(element, out, after, depth + 1)
            elif tag in (f"{W}pPr", f"{W}rPr", f"{W}sdtPr", f"{W}sdtEndPr"):
                continue
            elif tag == f"{MC}AlternateContent":
                chosen = _choice(element)
                if chosen is not None:
                    self._inline(chosen, out, after, depth + 1)
            elif tag == f"{M}t":
                out.append(element.text or "")
            elif isinstance(tag, str):
                self._inline(element, out, after, depth + 1)

    def _deletion(self, element: Any, out: list[str], after: list[str], depth: int) -> None:
        self.seen.add("tracked_changes")
        if not self.mark_deletions or element.tag == f"{W}moveFrom":
            return
        inner: list[str] = []
        self._inline(element, inner, after, depth + 1)
        if "".join(inner).strip():
            out.append(f"[deleted: {''.join(inner)}]")

    def _run(self, run: Any, out: list[str], after: list[str], depth: int) -> None:
        properties = run.find(f"{W}rPr")
        hidden = properties is not None and _is_on(properties.find(f"{W}vanish"))
        inner: list[str] = []
        for element in run:
            self._run_content(element, inner, after, depth)
        content = "".join(inner)
        if hidden and content.strip():
            self.seen.add("hidden_text")
            content = f"[hidden: {content}]"
        out.append(content)

    def _run_content(self, element: Any, out: list[str], after: list[str], depth: int) -> None:
        tag = element.tag
        if tag == f"{W}fldChar":
            self._field_mark(element.get(f"{W}fldCharType"))
        elif any(self._fields):
            return  # the instruction of a field, not its result
        elif tag in (f"{W}t", f"{W}delText"):
            out.append(element.text or "")
        elif tag in (f"{W}tab", f"{W}ptab"):
            out.append("\t")
        elif tag in (f"{W}br", f"{W}cr"):
            out.append("\n")
        elif tag == f"{W}noBreakHyphen":
            out.append("-")
        elif tag == f"{W}sym":
            code = str(element.get(f"{W}char", "")).lower()
            out.append(SYMBOLS.get(code, _symbol(code)))
        elif tag in (f"{W}footnoteReference", f"{W}endnoteReference"):
            self._note(element, out, after)
        elif tag == f"{W}commentReference":
            out.append(" " + self.notes.comments.get(element.get(f"{W}id", ""), ""))
        elif tag == f"{MC}AlternateContent":
            chosen = _choice(element)
            for inner in chosen if chosen is not None else ():
                self._run_content(inner, out, after, depth)
        elif tag in (f"{W}drawing", f"{W}pict", f"{W}object"):
            self._drawing(element, out, after, depth)

    def _field_mark(self, kind: str | None) -> None:
        if kind == "begin":
            self._fields.append(True)
        elif kind == "separate" and self._fields:
            self._fields[-1] = False
        elif kind == "end" and self._fields:
            self._fields.pop()

    def _note(self, element: Any, out: list[str], after: list[str]) -> None:
        is_footnote = element.tag == f"{W}footnoteReference"
        number = element.get(f"{W}id", "")
        content = (self.notes.footnotes if is_footnote else self.notes.endnotes).get(number)
        if content is not None:
            out.append(f"[^{number}]")
            after.append(f"[{'footnote' if is_footnote else 'endnote'} {number}: {content}]")

    def _drawing(self, element: Any, out: list[str], after: list[str], depth: int) -> None:
        for box in element.iter(f"{W}txbxContent"):
            if not any(parent.tag == f"{MC}Fallback" for parent in box.iterancestors()):
                saved, self._fields = self._fields, []
                after.extend(line for line in self.blocks(box, depth + 1) if line.strip())
                self._fields = saved
        for described in element.iter(f"{WP}docPr"):
            if described.get("descr"):
                out.append(f"[image: {described.get('descr')}]")

    def _table(self, table: Any, depth: int) -> Iterator[str]:
        """A row a line, cells apart by tabs; rows with longer cells have each cell on lines of its own."""
        if depth > MAX_DEPTH:
            return
        for row in _children(table, f"{W}tr"):
            properties = row.find(f"{W}trPr")
            if properties is not None and properties.find(f"{W}del") is not None:
                self.seen.add("tracked_changes")
                if not self.mark_deletions:
                    continue
            cells = [self._cell(cell, depth) for cell in _children(row, f"{W}tc")]
            if any("\n" in cell for cell in cells):
                yield from (line for cell in cells for line in cell.split("\n") if cell)
            else:
                yield "\t".join(cells).rstrip()
        yield ""

    def _cell(self, cell: Any, depth: int) -> str:
        properties = cell.find(f"{W}tcPr")
        merge = None if properties is None else properties.find(f"{W}vMerge")
        if merge is not None and merge.get(f"{W}val") != "restart":
            return ""  # goes on from the cell above, which holds the text
        return "\n".join(line for line in self.blocks(cell, depth + 1) if line.strip())


def _children(parent: Any, wanted: str) -> Iterator[Any]:
    """Children of a kind, also inside content controls and insertions."""
    for element in parent:
        if element.tag == wanted:
            yield element
        elif element.tag in (f"{W}sdt", f"{W}sdtContent", f"{W}customXml") or element.tag in ADDED:
            yield from _children(element, wanted)


def _choice(alternate: Any) -> Any | None:
    chosen = alternate.find(f"{MC}Choice")
    return chosen if chosen is not None else alternate.find(f"{MC}Fallback")


def _is_on(element: Any | None) -> bool:
    return element is not None and element.get(f"{W}val", "1") not in ("0", "false", "off")


def _symbol(code: str) -> str:
    try:
        value = int(code, 16)
    except ValueError:
        return ""
    return "" if 0xF000 <= value <= 0xF0FF or not 31 < value < 0xD800 else chr(value)
