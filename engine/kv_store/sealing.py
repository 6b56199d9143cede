"""KV encrypted at rest: AES-256-GCM, a key of its own for every file.

A file's key is derived from one of the ring's and a random salt in its header; each layer is sealed with its number as
nonce and the header's fields (the segment's key, its tokens, its layers) as associated data, so a layer opens in its
own place only.
"""

import base64
import binascii
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from engine.errors import KVCorrupt, KVSealed

KEY_BYTES = 32
KEY_ID_BYTES = 8
SALT_BYTES = 16
TAG_BYTES = 16


@dataclass(frozen=True)
class Seal:
    """How one file is sealed; stands in its header."""

    key_id: bytes  # which of a ring's keys
    salt: bytes


class Keyring:
    """The first key seals what is written; all of them open what is read."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises ValueError, ModuleNotFoundError where `cryptography` is not installed."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"got keys of {[len(key) for key in keys]} bytes, expected at least one, of {KEY_BYTES}")
        self._cipher: Any = AESGCM
        self._keys = {key_id(key): key for key in keys}
        self._writing = key_id(keys[0])

    @classmethod
    def load(cls, path: Path) -> "Keyring":
        """A file of base64 keys, one a line; `#` begins a comment. Raises OSError, ValueError."""
        lines = (line.partition("#")[0].strip() for line in path.read_text("ascii").splitlines())
        try:
            keys = [base64.b64decode(line, validate=True) for line in lines if line]
        except binascii.Error as error:
            raise ValueError(f"{path} does not hold base64 keys, one a line: {error}") from error
        try:
            return cls(keys)
        except ModuleNotFoundError as error:
            raise ValueError("encrypted KV needs the extra `encryption`: pip install 'foreword[encryption]'") from error

    def new_seal(self) -> Seal:
        return Seal(self._writing, secrets.token_bytes(SALT_BYTES))

    def seal(self, seal: Seal, layer: int, data: bytes, associated: bytes) -> tuple[bytes, bytes]:
        """The sealed layer, as long as `data`, and its tag."""
        sealed = self._aead(seal).encrypt(_nonce(layer), data, associated)
        return sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]

    def unseal(self, seal: Seal, layer: int, sealed: bytes, tag: bytes, associated: bytes) -> bytes:
        """Raises KVSealed without its key, KVCorrupt where it does not open."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._aead(seal).decrypt(_nonce(layer), sealed + tag, associated)
            return opened
        except InvalidTag as error:
            raise KVCorrupt(f"layer {layer} does not open with its key") from error

    def _aead(self, seal: Seal) -> Any:
        key = self._keys.get(seal.key_id)
        if key is None:
            raise KVSealed(f"sealed with key {seal.key_id.hex()}, which is not on the ring")
        return self._cipher(blake3(b"foreword kv file" + seal.salt, key=key).digest())


def key_id(key: bytes) -> bytes:
    """Names a key without telling anything about it."""
    return blake3(key, derive_key_context="foreword kv key id 2026").digest(length=KEY_ID_BYTES)


def _nonce(layer: int) -> bytes:
    return layer.to_bytes(12, "little")
