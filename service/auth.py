"""API keys: who is calling, and how much they may ask for."""

import hashlib
import hmac
import ipaddress
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from service.errors import RateLimited, Unauthorized

LOCAL_TENANT = "local"


class AuthError(Exception):
    """The keys file can't be used, or the address to listen on needs one."""

    code = "auth_error"


class Limits(BaseModel):
    """None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)


class Key(BaseModel):
    """One entry of the keys file. The key itself is nowhere on disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    tenant: str = Field(min_length=1, max_length=128)
    limits: Limits = Limits()


@dataclass(frozen=True)
class Principal:
    tenant: str
    limits: Limits = field(default_factory=Limits)
    key_id: str = ""  # what requests are counted by


class KeyRing:
    """The keys of one server; without any, everybody is the local tenant."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    @classmethod
    def load(cls, path: Path | None) -> "KeyRing":
        """Raises AuthError when the file can't be read as a list of keys."""
        if path is None:
            return cls()
        try:
            keys = TypeAdapter(list[Key]).validate_python(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            raise AuthError(f'{path}: a JSON list of {{"sha256", "tenant", "limits"}} is expected: {error}') from error
        if not keys:
            raise AuthError(f"{path} holds no keys: nobody could call this server")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def authenticate(self, authorization: str | None) -> Principal:
        """Raises Unauthorized. Compares with every key, so the time taken tells nothing."""
        if not self._keys:
            return Principal(LOCAL_TENANT)
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("No API key was given: send it as 'Authorization: Bearer KEY'.")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        found: Key | None = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return Principal(found.tenant, found.limits, found.sha256)


def check_binding(host: str, keys: KeyRing, *, insecure: bool) -> None:
    """Without keys only this machine may call. Raises AuthError."""
    if keys or insecure:
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise AuthError(
            f"listening on {host} without API keys would let anybody in: set FOREWORD_API_KEYS_FILE, "
            "listen on 127.0.0.1, or pass --insecure"
        )


class RateLimiter:
    """A token bucket and a count of running requests for each key, held by one API process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, when that was
        self._running: dict[str, int] = {}

    def enter(self, principal: Principal) -> Mapping[str, str]:
        """Count one request in; `leave` must follow. Returns x-ratelimit-* headers. Raises RateLimited."""
        limits, key = principal.limits, principal.key_id
        running = self._running.get(key, 0)
        if limits.concurrent_requests is not None and running >= limits.concurrent_requests:
            raise RateLimited(
                f"{running} requests of this key are running, {limits.concurrent_requests} may", retry_after_s=1.0
            )
        headers = self._take(limits.requests_per_minute, key) if limits.requests_per_minute else {}
        self._running[key] = running + 1
        return headers

    def leave(self, principal: Principal) -> None:
        running = self._running.pop(principal.key_id) - 1
        if running:
            self._running[principal.key_id] = running

    def _take(self, per_minute: int, key: str) -> Mapping[str, str]:
        now = self._clock()
        tokens, since = self._buckets.get(key, (float(per_minute), now))
        tokens = min(float(per_minute), tokens + (now - since) * per_minute / 60)
        allowed = tokens >= 1
        tokens -= allowed
        self._buckets[key] = (tokens, now)
        headers = {
            "x-ratelimit-limit-requests": str(per_minute),
            "x-ratelimit-remaining-requests": str(int(tokens)),
            "x-ratelimit-reset-requests": f"{math.ceil((per_minute - tokens) * 60 / per_minute)}s",
        }
        if not allowed:
            raise RateLimited(
                f"more than {per_minute} requests a minute with this key",
                retry_after_s=(1 - tokens) * 60 / per_minute,
                headers=headers,
            )
        return headers
