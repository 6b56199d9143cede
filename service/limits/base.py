"""How much a key may ask for, counted for all API processes together. Passes tests/contracts/limits_contract.py."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Level:
    """A token bucket after a take."""

    allowed: bool
    left: float
    retry_after_s: float  # until the same take would be allowed; 0 where it was
    full_after_s: float


def level(left: float, *, amount: float, per_minute: float, allowed: bool) -> Level:
    """`left` is behind the take, if it was allowed."""
    per_s = per_minute / 60
    return Level(allowed, left, 0.0 if allowed else (amount - left) / per_s, (per_minute - left) / per_s)


class LimitStore(Protocol):
    """Blocking and thread-safe."""

    def take(self, bucket: str, amount: float, *, per_minute: float) -> Level:
        """Take from a bucket that holds `per_minute` at most and fills within a minute; all or nothing.

        An amount above what the bucket can hold is never allowed: the caller refuses it for good.
        """
        ...

    def hold(self, name: str, slot: str, *, limit: int, ttl_s: float) -> bool:
        """Take or renew one of `limit` slots, for at most `ttl_s`: a holder that dies gives it back.

        False where none is free.
        """
        ...

    def free(self, name: str, slot: str) -> None: ...
