"""HTML as a reader sees it: blocks on lines, tables by rows, scripts, styles and comments gone, words never split."""

import re
from collections.abc import Iterator
from typing import Any

from lxml import etree, html

from service.ingest.encodings import decode
from service.ingest.parsers.protocol import Message, ParseError, Request, text, warning

DROPPED = frozenset(
    [
        "script",
        "style",
        "head",
        "template",
        "noscript",
        "svg",
        "math",
        "object",
        "embed",
        "applet",
        "iframe",
        "canvas",
        "audio",
        "video",
    ]
)
BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "center",
        "dd",
        "details",
        "dialog",
        "dir",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hgroup",
        "hr",
        "html",
        "legend",
        "li",
        "main",
        "menu",
        "nav",
        "ol",
        "option",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "tfoot",
        "thead",
        "tr",
        "ul",
        "caption",
    ]
)
SPACED = frozenset(
    ["p", "h1", "h2", "h3", "h4", "h5", "h6", "table", "ul", "ol", "blockquote", "pre", "section", "article"]
)
SPACE = re.compile(r"[ \t\r\n\f]+")
HIDING = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?:px|pt|em)?\s*(?:;|$)", re.IGNORECASE
)
# Tags that go where there are too many levels of them: nothing may be lost with the levels.
NESTING = re.compile(
    r"</?(?:div|span|font|b|i|u|em|strong|blockquote|center|ul|ol|li|table|tbody|tr|td|p|a|section)\b[^<>]{0,2000}>",
    re.I,
)
DECLARATION = re.compile(r"\A\s*<\?xml[^>]{0,300}\?>")


def parse(request: Request) -> Iterator[Message]:
    content, encoding, replaced = decode(request.file.read_bytes())
    if replaced:
        yield warning("decode_replaced", count=replaced, encoding=encoding)
    out, hidden = to_text(content)
    if hidden:
        yield warning("hidden_text")
    yield from text(out)


def to_text(content: str) -> tuple[str, bool]:
    """(the text, whether some of it isn't shown). Raises ParseError for what libxml2 can make nothing of."""
    content = DECLARATION.sub("", content.replace("\0", ""))
    if not content.strip():
        return "", False
    try:
        root, too_deep = _tree(content)
        if too_deep:
            root, _ = _tree(NESTING.sub("\n", content))
    except (etree.ParserError, etree.XMLSyntaxError, ValueError) as error:
        raise ParseError("document_corrupt", f"the HTML can't be read: {error}") from error
    page = _Page()
    title = root.find(".//head/title")
    if title is not None and (title.text or "").strip():
        page.write(title.text)
        page.blank_line()
    page.walk(root)
    return page.finish(), page.hidden


def _tree(content: str) -> tuple[Any, bool]:
    """(root, whether libxml2 stopped at its 2,048 levels and dropped the rest)."""
    parser = html.HTMLParser(huge_tree=True, no_network=True, remove_comments=True)
    root = html.document_fromstring(content, parser=parser)
    return root, any("depth" in str(fault.message) for fault in parser.error_log)


class _Page:
    """Collects text while walking the tree, without recursion: nesting is the author's to choose."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.line: list[str] = []
        self.hidden = False
        self._pre = 0
        self._lists: list[int | None] = []  # open lists: the next number, None for bullets

    def walk(self, root: Any) -> None:
        skip: Any = None
        for event, element in etree.iterwalk(root, events=("start", "end")):
            tag = element.tag if isinstance(element.tag, str) else ""
            if skip is not None:
                if event == "end" and element is skip:
                    skip = None
                    self._tail(element, root)
                continue
            if event == "start":
                if tag in DROPPED or not tag:
                    skip = element
                    continue
                if HIDING.search(element.get("style") or "") or element.get("hidden") is not None:
                    self.hidden = True
                self._open(tag, element)
                if element.text and tag != "title":
                    self.write(element.text)
            else:
                self._close(tag)
                self._tail(element, root)

    def _tail(self, element: Any, root: Any) -> None:
        if element.tail and element is not root:
            self.write(element.tail)

    def _open(self, tag: str, element: Any) -> None:
        if tag in BLOCKS:
            self.break_line()
        if tag in SPACED:
            self.blank_line()
        if tag == "pre":
            self._pre += 1
        elif tag in ("ul", "ol"):
            self._lists.append(_int(element.get("start"), 1) if tag == "ol" else None)
        elif tag == "li":
            self._bullet()
        elif tag in ("td", "th"):
            if self.line and self.line[-1] != "\t" and "".join(self.line).strip():
                self.line.append("\t")
        elif tag == "br":
            self.break_line(keep_empty=True)
        elif tag == "img" and (element.get("alt") or "").strip():
            self.write(f"[image: {element.get('alt').strip()}]")
        elif tag == "input" and element.get("type", "text") in ("text", "checkbox", "radio") and element.get("value"):
            self.write(f" {element.get('value')} ")

    def _close(self, tag: str) -> None:
        if tag in BLOCKS:
            self.break_line()
        if tag == "pre":
            self._pre -= 1
        elif tag in ("ul", "ol") and self._lists:
            self._lists.pop()
        if tag in SPACED:
            self.blank_line()

    def _bullet(self) -> None:
        if self._lists and self._lists[-1] is not None:
            self.line.append(f"{self._lists[-1]}. ")
            self._lists[-1] += 1
        else:
            self.line.append("- ")

    def write(self, value: str) -> None:
        value = value.replace("\xad", "").replace("\xa0", " ")
        if self._pre:
            first, *rest = value.replace("\r\n", "\n").split("\n")
            self.line.append(first)
            for line in rest:
                self.break_line(keep_empty=True)
                self.line.append(line)
            return
        value = SPACE.sub(" ", value)
        if value.startswith(" ") and (not self.line or self.line[-1].endswith((" ", "\t"))):
            value = value[1:]
        if value:
            self.line.append(value)

    def break_line(self, *, keep_empty: bool = False) -> None:
        line = "".join(self.line).rstrip()
        self.line = []
        if (line.strip() and line.strip() not in ("-",)) or keep_empty:
            self.lines.append(line if self._pre else line.strip(" "))

    def blank_line(self) -> None:
        self.break_line()
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def finish(self) -> str:
        self.break_line()
        return "\n".join(self.lines).strip("\n") + "\n" if any(self.lines) else ""


def _int(value: str | None, default: int) -> int:
    return int(value) if value and value.lstrip("-").isdigit() and len(value) < 10 else default
