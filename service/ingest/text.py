"""Plain text and source code: bytes → pieces of exact text, line by line, in bounded memory.

Source stays as it is to the byte, with these exceptions, each told in the manifest: the byte order mark goes, CRLF and
lone CR become LF (so that line numbers agree with editors), NUL becomes U+FFFD, and long base64 runs (data URIs)
become a mark with their length and digest.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from service.ingest import encodings
from service.ingest.names import BIDI_CONTROLS
from service.ingest.sniff import CONTROLS
from service.ingest.spool import Entry, Spool

PIECE_CHARS = 16_000  # what is tokenised at once; a piece ends at a line's end unless one line is longer
LONGEST_LINE_CHARS = 1 << 20  # a longer line is read in parts of this size
BASE64_RUN = 1024  # characters; certificates and hashes are shorter, or broken into lines
DATA_URI = re.compile(r"(data:[\w.+-]{1,60}/[\w.+-]{1,80}(?:;[\w=.+-]{1,60}){0,4};base64,)([A-Za-z0-9+/=_-]{256,})")
LONG_BASE64 = re.compile(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{{{BASE64_RUN},}}={{0,2}}")
TAGS = re.compile("[\U000e0000-\U000e007f]")
BIDI = re.compile("[" + "".join(sorted(BIDI_CONTROLS - {"\u200e", "\u200f", "\u061c"})) + "]")


@dataclass(frozen=True)
class Survey:
    """What one pass over a text's bytes tells, before any of it is decoded."""

    encoding: str
    exact: bool  # strict UTF-8: nothing will be replaced
    size: int
    newlines: str  # lf, crlf, cr, mixed, none
    lines: int
    longest_line: int  # bytes, capped by the file
    controls: int  # control characters that text doesn't hold
    nuls: int

    @property
    def wide(self) -> bool:
        return self.encoding.startswith(("utf-16", "utf-32"))


def survey(blocks: Iterable[bytes]) -> Survey:
    utf8 = codecs.getincrementaldecoder("utf-8")("strict")
    is_utf8, sample = True, b""
    size = crlf = lf = cr = controls = nuls = longest = open_line = 0
    last = b""
    for block in blocks:
        if len(sample) < encodings.SAMPLE_BYTES:
            sample += block
        if is_utf8:
            try:
                utf8.decode(block)
            except UnicodeDecodeError:
                is_utf8 = False
        size += len(block)
        joined = last + block[:1]
        crlf += block.count(b"\r\n") + (joined == b"\r\n")
        lf, cr = lf + block.count(b"\n"), cr + block.count(b"\r")
        nuls += block.count(b"\0")
        controls += len(CONTROLS.findall(block))
        longest, open_line = _longest_line(block, longest, open_line)
        last = block[-1:]
    if is_utf8:
        try:
            utf8.decode(b"", final=True)
        except UnicodeDecodeError:
            is_utf8 = False
    encoding = encodings.detect(sample, is_utf8=is_utf8)
    wide = encoding.startswith(("utf-16", "utf-32"))
    kinds = {"crlf": crlf > 0, "lf": lf > crlf, "cr": cr > crlf}
    present = [name for name, there in kinds.items() if there]
    newlines = "none" if not present else present[0] if len(present) == 1 else "mixed"
    return Survey(
        encoding=encoding,
        exact=is_utf8 and encoding.startswith("utf-8"),
        size=size,
        newlines="unknown" if wide else newlines,
        lines=max(lf, cr if lf == 0 else 0) + 1,
        longest_line=max(longest, open_line),
        controls=0 if wide else controls,
        nuls=0 if wide else nuls,
    )


def _longest_line(block: bytes, longest: int, open_line: int) -> tuple[int, int]:
    if len(block) + open_line <= longest:  # can't beat it, only its last line goes on
        tail = block.rfind(b"\n")
        return longest, len(block) - tail - 1 if tail >= 0 else open_line + len(block)
    lines = block.split(b"\n")
    if len(lines) == 1:
        return longest, open_line + len(block)
    longest = max(longest, open_line + len(lines[0]), max(map(len, lines[1:-1]), default=0))
    return longest, len(lines[-1])


def is_binary(found: Survey) -> bool:
    """Text may hold a stray NUL or control character, not more."""
    return found.controls > max(2, found.size // 2000)


def read_text(spool: Spool, entry: Entry, found: Survey, *, keep_base64: bool = False) -> Iterator[str]:
    """The text in pieces; adds to the entry's warnings. See the module's docstring for what is altered."""
    replaced = 0
    encoding = found.encoding
    carry = ""
    lone_cr = found.newlines == "cr"
    for chunk in encodings.incremental(spool.blocks(entry), encoding):
        text = carry + chunk
        carry = ""
        if text.endswith("\r"):  # its LF may come with the next block
            text, carry = text[:-1], "\r"
        cut = text.rfind("\r" if lone_cr else "\n") + 1
        if 0 < cut < len(text):
            carry = text[cut:] + carry
            text = text[:cut]
        elif cut == 0 and len(text) < LONGEST_LINE_CHARS:
            carry = text + carry
            continue
        cleaned, bad = _clean(text, entry, found, keep_base64=keep_base64)
        replaced += bad
        yield from pieces(cleaned)
    cleaned, bad = _clean(carry, entry, found, keep_base64=keep_base64)
    replaced += bad
    yield from pieces(cleaned)
    if replaced:
        entry.warn("decode_replaced", count=replaced, encoding=encoding)


def _clean(text: str, entry: Entry, found: Survey, *, keep_base64: bool) -> tuple[str, int]:
    bad, nuls = 0, text.count("\0")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        if found.newlines in ("cr", "unknown"):
            text = text.replace("\r", "\n")
    if nuls:
        text = text.replace("\0", "\ufffd")
        entry.warn("nul_replaced", count=found.nuls or nuls)
    if not text.isascii():
        bad = 0 if found.exact else max(0, text.count("\ufffd") - nuls)
        note_odd_characters(text, entry)
    if not keep_base64 and found.longest_line > 256:
        text = _shorten_base64(text, entry)
    return text, bad


def note_odd_characters(text: str, entry: Entry) -> None:
    """Reordering and tag characters stay (source is exact), but they are told."""
    if BIDI.search(text):
        entry.warn("bidi_control")
    if TAGS.search(text):
        entry.warn("tag_characters")


def _shorten_base64(text: str, entry: Entry) -> str:
    def mark(run: str) -> str:
        return f"[{len(run)} base64 characters left out, blake3 {blake3(run.encode()).hexdigest()[:16]}]"

    if "base64," in text:
        text, count = DATA_URI.subn(lambda m: m.group(1) + mark(m.group(2)), text)
        if count:
            entry.warn("base64_left_out")
    if LONG_BASE64.search(text):

        def replace(found: re.Match[str]) -> str:
            run = found.group()
            mixed = any(c.isupper() for c in run) and any(c.islower() for c in run) and len(set(run)) >= 4
            return mark(run) if mixed else run

        shorter = LONG_BASE64.sub(replace, text)
        if shorter != text:
            entry.warn("base64_left_out")
        text = shorter
    return text


def pieces(text: str) -> Iterator[str]:
    """Cut at line ends into pieces of at most PIECE_CHARS; a longer line is cut at a space, or anywhere.

    Depends on the text alone, so that the same text always gives the same tokens.
    """
    at, end = 0, len(text)
    while end - at > PIECE_CHARS:
        cut = text.rfind("\n", at, at + PIECE_CHARS) + 1
        if cut <= at:
            cut = text.rfind(" ", at + PIECE_CHARS // 2, at + PIECE_CHARS)
        if cut <= at:
            cut = at + PIECE_CHARS
        yield text[at:cut]
        at = cut
    if at < end:
        yield text[at:]
