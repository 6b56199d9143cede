"""What rank 0 tells the other ranks to do, through a pipe each; and what they answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.chain import Segment, TokenIds
from engine.kv_format import KVFormat
from engine.sparse.settings import SparseSettings


@dataclass(frozen=True)
class Ready:
    """The first thing a rank says. Equal fingerprints: the same weights, computed with in the same way."""

    fingerprint: str


@dataclass(frozen=True)
class Failed:
    """The last thing a rank says."""

    reason: str


@dataclass(frozen=True)
class Open:
    """A prefill of `chain`, new from segment `first` on. Answered by Opened or NoMemory."""

    chain: Sequence[Segment]
    first: int
    settings: SparseSettings
    kv: KVFormat


@dataclass(frozen=True)
class Opened:
    pass


@dataclass(frozen=True)
class NoMemory:
    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Embed:
    tokens: TokenIds  # of all new segments


@dataclass(frozen=True)
class Load:
    """Stored KV of the layer that comes next."""


@dataclass(frozen=True)
class Layer:
    index: int


@dataclass(frozen=True)
class Collect:
    """Hidden states to rank 0."""


@dataclass(frozen=True)
class Spread:
    """Hidden states from rank 0."""


@dataclass(frozen=True)
class Report:
    """Answered by Reported: what the rank's attention kept since the last time."""


@dataclass(frozen=True)
class Reported:
    report: dict[str, Any]


@dataclass(frozen=True)
class Close:
    """The end of the prefill, or of what is left of it."""


Command = Open | Embed | Load | Layer | Collect | Spread | Report | Close
Answer = Ready | Failed | Opened | NoMemory | Reported
