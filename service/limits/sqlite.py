"""Limits in the embedded database. Implements service.limits.base.LimitStore."""

import time
from collections.abc import Callable

from service.database import Database
from service.limits.base import Level, level


class SqliteLimits:
    """The database stays the caller's to close."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def take(self, bucket: str, amount: float, *, per_minute: float) -> Level:
        now = self._clock()
        with self._database.write(durable=False) as connection:
            row = connection.execute("SELECT level, at FROM buckets WHERE name = ?", (bucket,)).fetchone()
            left = per_minute
            if row is not None:
                # A clock that was set back gives nothing and takes nothing.
                left = min(per_minute, row["level"] + max(0.0, now - row["at"]) * per_minute / 60)
            allowed = left >= amount
            left -= amount if allowed else 0.0
            connection.execute("INSERT OR REPLACE INTO buckets (name, level, at) VALUES (?, ?, ?)", (bucket, left, now))
        return level(left, amount=amount, per_minute=per_minute, allowed=allowed)

    def hold(self, name: str, slot: str, *, limit: int, ttl_s: float) -> bool:
        now = self._clock()
        with self._database.write(durable=False) as connection:
            connection.execute("DELETE FROM slots WHERE name = ? AND until <= ?", (name, now))
            (others,) = connection.execute(
                "SELECT count(*) FROM slots WHERE name = ? AND slot != ?", (name, slot)
            ).fetchone()
            if others >= limit:
                return False
            connection.execute(
                "INSERT OR REPLACE INTO slots (name, slot, until) VALUES (?, ?, ?)", (name, slot, now + ttl_s)
            )
        return True

    def free(self, name: str, slot: str) -> None:
        with self._database.write(durable=False) as connection:
            connection.execute("DELETE FROM slots WHERE name = ? AND slot = ?", (name, slot))
