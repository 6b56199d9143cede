"""API keys: who is calling, and how much they may ask for (service.limits holds them to it)."""

import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from service.errors import Unauthorized

LOCAL_TENANT = "local"


class AuthError(Exception):
    """The keys file can't be used, or the address to listen on needs one."""

    code = "auth_error"


class Limits(BaseModel):
    """None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)  # of questions, and what their answers may have
    concurrent_answers: int | None = Field(default=None, ge=1)
    stored_bytes: int | None = Field(default=None, ge=1)  # of all uploads that the key's tenant keeps

    @property
    def count_requests(self) -> bool:
        return self.requests_per_minute is not None or self.concurrent_requests is not None

    @property
    def count_answers(self) -> bool:
        return self.tokens_per_minute is not None or self.concurrent_answers is not None


class Key(BaseModel):
    """One entry of the keys file. The key itself is nowhere on disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    tenant: str = Field(min_length=1, max_length=128)
    limits: Limits = Limits()
    admin: bool = False  # may see and steer the work of all tenants
    expires_at: float | None = Field(default=None, gt=0)  # unix seconds; None: never


@dataclass(frozen=True)
class Principal:
    tenant: str
    limits: Limits = field(default_factory=Limits)
    key_id: str = ""  # what requests are counted by
    admin: bool = False


class KeyRing:
    """The keys of one server; without any, everybody is the local tenant."""

    def __init__(self, keys: Sequence[Key] = (), *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
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

    @property
    def tenants(self) -> Sequence[str]:
        """In the order of the file; of a server without keys, the local one."""
        return [key.tenant for _, key in self._keys] or [LOCAL_TENANT]

    def authenticate(self, authorization: str | None) -> Principal:
        """Raises Unauthorized. Compares with every key, so the time taken tells nothing."""
        if not self._keys:
            return Principal(LOCAL_TENANT, admin=True)
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
        if found.expires_at is not None and found.expires_at <= self._clock():
            raise Unauthorized("This API key has expired: ask whoever runs this server for another one.")
        return Principal(found.tenant, found.limits, found.sha256, found.admin)


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
