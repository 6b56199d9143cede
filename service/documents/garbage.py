"""What a worker has to do about bytes: most often, remove what no record names any more."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Garbage:
    """A file id's upload, a document's folder (relative to the folder of files), or the KV of a holder.

    Of kind `policy` it is no garbage: a holder whose KV is to be kept longer or shorter than was said.
    """

    kind: Literal["upload", "folder", "holder", "policy"]
    name: str
