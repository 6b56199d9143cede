"""What goes into an ingest and what comes out: sources, limits, options, summary, the one error.

IngestError carries one of these codes (docs/ingest.md says when each is raised):

archive_bomb, archive_corrupt, archive_encrypted, archive_unsafe_path, bundle_missing_prerequisite, disk_full,
document_corrupt, document_too_long, empty_input, ingest_failed, ingest_memory, ingest_timeout, manifest_invalid,
needs_ocr, no_text, not_found, password_required, too_large, too_many_entries, unsupported_archive, unsupported_format,
unsupported_tokenizer
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["auto", "repo", "bundle", "doc"]
KINDS: tuple[Kind, ...] = ("auto", "repo", "bundle", "doc")

MIB = 1024**2

# Raised whenever the same bytes would give another stream: part of every content hash.
FORMAT_VERSION = 1


class IngestError(Exception):
    """The input as a whole can't be read: `code` is machine-readable, the message says what was got and expected."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    def __reduce__(self) -> tuple[type["IngestError"], tuple[str, str]]:
        return IngestError, (self.code, self.message)


@dataclass(frozen=True)
class Source:
    """One uploaded file, or a directory on disk. `filename` is the name the user knows it by."""

    path: Path
    filename: str


@dataclass(frozen=True)
class IngestLimits:
    """Ceilings of one ingest. Those of bytes hold for everything in it together, all nesting levels included."""

    memory_bytes: int = 2048 * MIB  # address space of the ingesting process; each parser gets at most 1 GiB
    timeout_s: float = 600.0  # wall clock
    max_tokens: int = 0  # 0: no limit
    max_entries: int = 65_535  # files in archives and folders
    max_unpacked_bytes: int = 4096 * MIB
    max_nesting: int = 8  # archives and mails inside one another
    max_document_bytes: int = 512 * MIB  # one file that a parser is given
    max_xml_bytes: int = 48 * MIB  # one XML part of an office file, unpacked
    workers: int = 0  # parser processes and tokeniser threads; 0: one a core, at most 8


@dataclass(frozen=True)
class IngestOptions:
    """Switches over the default policy; each changes the stream, so each is part of the content hash."""

    include_generated: bool = False  # generated, minified, lock files, source maps
    include_vendored: bool = False  # node_modules, vendor, third-party trees
    include_ignored: bool = False  # what .gitignore rules leave out
    include_data: bool = False  # whole data files, not only their head
    mask_secrets: bool = False  # replace suspected secrets by a mark
    mark_deletions: bool = False  # show tracked deletions of DOCX as [deleted: …]
    ocr: Literal["auto", "off"] = "auto"  # auto: scanned pages go through tesseract where it is installed
    office: Literal["auto", "off"] = "auto"  # auto: Word 97 files go through LibreOffice where it is installed
    header_once: bool = True  # running headers and footers of PDF pages stand once


@dataclass(frozen=True)
class IngestSummary:
    """What an ingest made. `warnings` counts codes over all files and the document itself."""

    kind: str
    content_hash: str
    stream_hash: str
    num_tokens: int
    files_included: int
    files_skipped: int
    input_bytes: int
    seconds: float
    warnings: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
