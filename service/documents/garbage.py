"""What no record names any more, handed out for removal."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Garbage:
    """A file id's upload, a document's folder (relative to the folder of files), or the KV of a holder."""

    kind: Literal["upload", "folder", "holder"]
    name: str
