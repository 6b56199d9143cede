"""The order of sections, and the hash of what is in them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from service.ingest.base import FORMAT_VERSION, IngestError, IngestOptions
from service.ingest.spool import Entry


def content_hash(kind: str, options: IngestOptions, entries: Sequence[Entry], *, programs: Sequence[str]) -> str:
    """blake3 over (path, bytes) of every file in any order, and over what else decides the stream: kind, options,
    format version, and the versions of the programs that had a say (OCR, LibreOffice)."""
    deciding = [kind, json.dumps(asdict(options), sort_keys=True), json.dumps(programs)]
    digest = blake3("\0".join([f"foreword ingest {FORMAT_VERSION}", *deciding]).encode())
    for entry in sorted(entries, key=lambda e: e.path):
        if entry.reason in ("symlink", "submodule_missing", "link_target_missing"):
            content = f"{entry.reason}:{entry.detail}"
        else:
            content = entry.digest or f"{entry.reason}"
        path = entry.path.encode("utf-8", "surrogateescape")
        digest.update(len(path).to_bytes(4, "little") + path + content.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def keep_base_order(entries: Sequence[Entry], base_manifest: Path) -> list[Entry]:
    """Unchanged files in the base's order, then changed and new ones in their own.

    A file counts as unchanged if its path and bytes are, and if the text it was a duplicate of is still before it.
    Raises IngestError manifest_invalid.
    """
    try:
        base: list[dict[str, Any]] = json.loads(base_manifest.read_text("utf-8"))["files"]
        rows = [(str(row["path"]), row.get("digest"), row.get("duplicate_of")) for row in base]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IngestError("manifest_invalid", f"the base's manifest can't be read: {error}") from error
    by_path = {entry.path: entry for entry in entries}
    kept: dict[str, Entry] = {}
    for path, digest, duplicate_of in rows:
        entry = by_path.get(path)
        unchanged = entry is not None and (entry.digest or None) == digest
        if entry is not None and unchanged and (duplicate_of is None or duplicate_of in kept):
            kept[path] = entry
    return [*kept.values(), *(entry for entry in entries if entry.path not in kept)]
