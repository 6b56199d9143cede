"""What a file is, by its first bytes; its name only decides where bytes can't (a mail, a transcript)."""

import mmap
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Format = Literal[
    "empty",
    "text",
    "binary",
    "image",
    "pdf",
    "docx",
    "xlsx",
    "pptx",
    "odf",
    "epub",
    "rtf",
    "ole",
    "zip",
    "tar",
    "compressed",
    "git_bundle",
    "archive_unsupported",
]
Wide = Literal["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
# Letters, marks and punctuation of the scripts in use, from Latin to Hangul; nothing rare.
WRITTEN = re.compile(
    "[\\t\\n\\r\\f -~\u00a0-\u06ff\u0900-\u0e7f\u10a0-\u10ff\u1e00-\u22ff\u2500-\u25ff"
    "\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7a3\uff00-\uffef]"
)
ARCHIVES: frozenset[Format] = frozenset({"zip", "tar", "compressed", "git_bundle", "archive_unsupported"})
DOCUMENTS: frozenset[Format] = frozenset({"pdf", "docx", "xlsx", "pptx", "odf", "epub", "rtf", "ole", "image"})

MAGIC: tuple[tuple[bytes, Format], ...] = (
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"PK\x07\x08", "zip"),
    (b"\x1f\x8b", "compressed"),
    (b"BZh", "compressed"),
    (b"\xfd7zXZ\x00", "compressed"),
    (b"\x28\xb5\x2f\xfd", "compressed"),
    (b"# v2 git bundle\n", "git_bundle"),
    (b"# v3 git bundle\n", "git_bundle"),
    (b"7z\xbc\xaf\x27\x1c", "archive_unsupported"),
    (b"Rar!\x1a\x07", "archive_unsupported"),
    (b"MSCF\x00\x00\x00\x00", "archive_unsupported"),
    (b"xar!", "archive_unsupported"),
    (b"LZIP", "archive_unsupported"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "ole"),
    (b"{\\rtf", "rtf"),
    (b"II*\x00", "image"),
    (b"MM\x00*", "image"),
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF87a", "image"),
    (b"GIF89a", "image"),
    (b"BM", "image"),
)
PDF_SEARCH_BYTES = 1024  # viewers accept junk before the header up to here
# Control characters that text doesn't hold; tab, newline, form feed, return, escape and backspace it may.
CONTROL_CHARACTERS = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f\ufffe\uffff]")
CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")


def sniff(head: bytes, name: str) -> Format:
    """Format of a file that begins with `head` (its first 256 KiB, or all of it)."""
    if not head:
        return "empty"
    for magic, found in MAGIC:
        if head.startswith(magic) and not (magic == b"BM" and not _is_bmp(head)):
            return found
    if b"%PDF-" in head[:PDF_SEARCH_BYTES] and not _looks_like_source(head, name):
        return "pdf"
    if is_tar_header(head):
        return "tar"
    if name.lower().endswith(".zip") and b"PK\x03\x04" in head:  # junk before it; its directory is at its end
        return "zip"
    if head[:8].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{\\rtf"):
        return "rtf"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image"
    return "text" if looks_like_text(head) else "binary"


def _is_bmp(head: bytes) -> bool:
    return len(head) > 26 and head[6:10] == b"\0\0\0\0" and head[14:18] in (b"\x28\0\0\0", b"\x7c\0\0\0", b"\x6c\0\0\0")


def _looks_like_source(head: bytes, name: str) -> bool:
    """A program that mentions `%PDF-` is no PDF: those have objects, and start a line with it."""
    at = head.find(b"%PDF-")
    starts_line = at == 0 or head[at - 1 : at] in (b"\n", b"\r") or not looks_like_text(head[:at])
    version = re.match(rb"%PDF-\d\.\d", head[at : at + 8])
    return not (starts_line and version and b"obj" in head)


def is_tar_header(block: bytes) -> bool:
    """By the header's checksum, so that old tars without `ustar` count too."""
    if len(block) < 512 or not block[0]:
        return False
    try:
        told = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return told == sum(block[:148]) + 8 * 32 + sum(block[156:512])


def looks_like_text(data: bytes) -> bool:
    """No control characters that text doesn't hold, or UTF-16/32 by its mark or its pattern of NULs."""
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")):
        return True
    if wide_without_mark(data):
        return True
    controls = len(CONTROLS.findall(data))
    return controls == 0 or (controls <= max(1, len(data) // 2000) and _mostly_printable(data))


def _mostly_printable(data: bytes) -> bool:
    """A stray NUL or two in otherwise plain text: a log, an old mailbox."""
    sample = data[:65536]
    high = sum(b >= 0x80 for b in sample)
    if high == 0:
        return True
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(sample) - 3
    return True


def wide_without_mark(data: bytes) -> Wide | None:
    """UTF-16 or UTF-32 by where its NULs are, if what it says then is text."""
    sample = data[: min(len(data), 65536) & ~3] or data[:2]
    if len(sample) < 4 or 0 not in sample:
        return None
    return next((name for name in _wide_candidates(sample) if _reads_as(sample, name)), None)


def _wide_candidates(sample: bytes) -> Iterator[Wide]:
    nuls = [sample[at::4].count(0) for at in range(4)]
    quarter = len(sample) // 4
    if nuls[3] == quarter and nuls[2] >= 0.9 * quarter:
        yield "utf-32-le"
    if nuls[0] == quarter and nuls[1] >= 0.9 * quarter:
        yield "utf-32-be"
    even, odd = nuls[0] + nuls[2], nuls[1] + nuls[3]
    # Of mostly Latin text every other byte is a NUL; of other scripts only those of spaces and line ends.
    if odd > 0.8 * quarter and even <= 0.04 * quarter:
        yield "utf-16-le"
    elif even > 0.8 * quarter and odd <= 0.04 * quarter:
        yield "utf-16-be"
    elif not _is_text_with_nuls(sample):
        yield from ("utf-16-le", "utf-16-be") if odd >= even else ("utf-16-be", "utf-16-le")


def _is_text_with_nuls(sample: bytes) -> bool:
    rest = sample.replace(b"\0", b"")
    return CONTROLS.search(rest) is None and _mostly_printable(rest)


def _reads_as(sample: bytes, name: Wide) -> bool:
    try:
        text = sample.decode(name)
    except UnicodeDecodeError as error:
        if error.start < len(sample) - 4:
            return False
        text = sample[: error.start].decode(name)
    if not text or CONTROL_CHARACTERS.search(text):
        return False
    return len(WRITTEN.findall(text)) >= 0.97 * len(text)


OFFICE_PARTS: tuple[tuple[str, Format], ...] = (("word/", "docx"), ("xl/", "xlsx"), ("ppt/", "pptx"))
OFFICE_SUFFIXES: dict[str, Format] = {
    ".docx": "docx",
    ".docm": "docx",
    ".dotx": "docx",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
    ".pptx": "pptx",
    ".pptm": "pptx",
    ".ppsx": "pptx",
    ".odt": "odf",
    ".ods": "odf",
    ".odp": "odf",
    ".ott": "odf",
    ".epub": "epub",
}


def refine_zip(path: Path, name: str) -> Format:
    """An office document is a zip with known parts; a name that promises one makes it one (a broken one, maybe)."""
    promised = OFFICE_SUFFIXES.get(Path(name).suffix.lower())
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if "mimetype" in names:
                with archive.open("mimetype") as file:
                    declared = file.read(100)
                if declared.startswith(b"application/vnd.oasis.opendocument."):
                    return "odf"
                if declared.startswith(b"application/epub"):
                    return "epub"
            if "[Content_Types].xml" in names:
                for prefix, found in OFFICE_PARTS:
                    if any(n.startswith(prefix) for n in names):
                        return found
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError, EOFError):
        return promised or "zip"
    return promised or "zip"


# Of the dictionary of an attached file's stream, which always stands in plain text; of the directory of a zip.
INNER_FILE_MARKS: dict[Format, bytes] = {
    "pdf": b"/EmbeddedFile",
    "docx": b"/embeddings/",
    "xlsx": b"/embeddings/",
    "pptx": b"/embeddings/",
}


def may_hold_files(format: Format, file: Path) -> bool:
    """Whether a document may have files inside: a search of its raw bytes, so that few are opened twice."""
    mark = INNER_FILE_MARKS.get(format)
    if mark is None:
        return False
    with open(file, "rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(mark) >= 0
