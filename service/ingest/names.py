"""Names of files inside archives and folders: made safe to walk, to print and to put into a header."""

import re
import unicodedata

from service.ingest.base import IngestError

DRIVE = re.compile(r"^[A-Za-z]:")
# Characters that could forge a header, move the cursor or reorder the line they stand in.
UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

MAX_NAME_BYTES = 4096 * 4


def display_name(name: str) -> str:
    r"""`name` with control, bidi and surrogate characters written as \n, \xNN or \uNNNN; everything else unchanged.

    Bytes that were no UTF-8 reach us as lone surrogates (PEP 383) and come out as \xNN.
    """
    if name.isascii() and name.isprintable():
        return name
    return "".join(_escape(c) for c in name)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    if char in BIDI_CONTROLS or unicodedata.category(char) in UNSAFE_CATEGORIES:
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return char


def split_path(name: str) -> list[str]:
    """The parts of an archive member's name, `.` and empty ones dropped.

    Raises IngestError archive_unsafe_path for absolute, drive and UNC names and for any `..`, whichever of the two
    separators it is written with.
    """
    if len(name) > MAX_NAME_BYTES:
        raise IngestError("archive_unsafe_path", f"a name in the archive is {len(name)} characters long")
    if name.startswith(("/", "\\")) or DRIVE.match(name):
        raise IngestError("archive_unsafe_path", f"the archive holds an absolute path: {display_name(name)[:200]!r}")
    if ".." in re.split(r"[/\\]", name):
        raise IngestError(
            "archive_unsafe_path", f"the archive holds a path that leads out of it: {display_name(name)[:200]!r}"
        )
    return [part for part in name.split("/") if part not in ("", ".")]


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `Exhibit 2` before `Exhibit 10`; ties are for the caller to break by the raw name."""
    parts = re.split(r"(\d+)", name.casefold())
    return tuple((1, int(p), p) if p.isascii() and p.isdigit() and len(p) < 19 else (0, 0, p) for p in parts if p)


JUNK_NAMES = frozenset({".ds_store", "thumbs.db", "ehthumbs.db", "desktop.ini", ".localized", "icon\r", ".directory"})
JUNK_FOLDERS = frozenset({"__macosx", ".spotlight-v100", ".trashes", ".fseventsd", "$recycle.bin", ".appledouble"})
VCS_FOLDERS = frozenset({".git", ".hg", ".svn", ".bzr", "cvs"})


def is_junk(parts: list[str]) -> bool:
    """Litter of operating systems and editors: never a document, never worth a warning."""
    last = parts[-1]
    if last.lower() in JUNK_NAMES or last.startswith(("._", "~$", ".~lock.")):
        return True
    return any(part.lower() in JUNK_FOLDERS for part in parts)


def is_vcs(parts: list[str]) -> bool:
    return any(part.lower() in VCS_FOLDERS for part in parts[:-1]) or (parts[-1] == ".git")
