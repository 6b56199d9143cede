"""Holds every key to its limits: requests and tokens a minute, requests and answers at once."""

import math
import secrets
import threading
from collections.abc import Mapping

from service.auth import Principal
from service.errors import RateLimited
from service.limits.base import Level, LimitStore

SLOT_S = 60.0  # so long a slot outlives a process that died with it
RENEW_S = 20.0
BUSY_S = 1.0  # what a caller is told to wait when all slots are taken


class Gate:
    """Keys without a limit cost nothing here. Blocking; thread-safe."""

    def __init__(self, store: LimitStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], int] = {}  # (name, slot) → limit, of this process's running requests

    def enter(self, principal: Principal) -> tuple[Mapping[str, str], str]:
        """Count one request in: x-ratelimit-* headers, and its slot, which `free` gives back. Raises RateLimited."""
        limits, slot = principal.limits, secrets.token_hex(8)
        self.hold(principal, "requests", slot)
        headers: Mapping[str, str] = {}
        if limits.requests_per_minute is not None:
            try:
                headers = self._take(principal, "requests", 1, limits.requests_per_minute)
            except RateLimited:
                self.free(principal, "requests", slot)
                raise
        return headers, slot

    def take_tokens(self, principal: Principal, amount: int) -> Mapping[str, str]:
        """x-ratelimit-* headers. Raises RateLimited."""
        limit = principal.limits.tokens_per_minute
        return {} if limit is None else self._take(principal, "tokens", amount, limit)

    def hold(self, principal: Principal, what: str, slot: str, *, renewed: bool = True) -> None:
        """Take or renew one of the key's slots for `what` (requests, answers). Raises RateLimited.

        Until `free`, if this process renews it; else for SLOT_S.
        """
        limit = _most(principal, what)
        if limit is None:
            return
        name = f"{principal.key_id}:{what}"
        if not self._store.hold(name, slot, limit=limit, ttl_s=SLOT_S):
            raise RateLimited(f"{limit} {what} of this key are running, more may not", retry_after_s=BUSY_S)
        if renewed:
            with self._lock:
                self._held[name, slot] = limit

    def free(self, principal: Principal, what: str, slot: str) -> None:
        if _most(principal, what) is not None:
            name = f"{principal.key_id}:{what}"
            with self._lock:
                self._held.pop((name, slot), None)
            self._store.free(name, slot)

    def renew(self) -> None:
        """Due every RENEW_S: what this process holds goes on being held."""
        with self._lock:
            held = list(self._held.items())
        for (name, slot), limit in held:
            self._store.hold(name, slot, limit=limit, ttl_s=SLOT_S)
            with self._lock:
                gone = (name, slot) not in self._held
            if gone:  # freed meanwhile: it must not come back to life
                self._store.free(name, slot)

    def _take(self, principal: Principal, what: str, amount: int, per_minute: int) -> Mapping[str, str]:
        level = self._store.take(f"{principal.key_id}:{what}", min(amount, per_minute), per_minute=per_minute)
        headers = {
            f"x-ratelimit-limit-{what}": str(per_minute),
            f"x-ratelimit-remaining-{what}": str(int(level.left)),
            f"x-ratelimit-reset-{what}": f"{math.ceil(level.full_after_s)}s",
        }
        if not level.allowed:
            raise _too_many(what, amount, per_minute, level, headers)
        return headers


def _too_many(what: str, amount: int, per_minute: int, level: Level, headers: Mapping[str, str]) -> RateLimited:
    wanted = f", {amount} are asked for" if amount > 1 else ""
    return RateLimited(
        f"more than {per_minute} {what} a minute with this key{wanted}",
        retry_after_s=level.retry_after_s,
        headers=headers,
    )


def _most(principal: Principal, what: str) -> int | None:
    limits = principal.limits
    return limits.concurrent_requests if what == "requests" else limits.concurrent_answers
