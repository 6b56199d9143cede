"""One secret of the server, from which each tenant's salt is made: KV of two tenants never has a common key."""

import os
import secrets
from pathlib import Path

from blake3 import blake3

SECRET_BYTES = 32


def load_secret(data_dir: Path) -> bytes:
    """The server's secret, made on first use (mode 0600). Raises ValueError when the file is damaged.

    Losing it loses no document, but all stored KV: its keys can't be made again.
    """
    path = data_dir / "secret"
    if not path.exists():
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = data_dir / f".secret-{os.getpid()}-{secrets.token_hex(4)}"
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)  # whoever comes first wins
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} has {len(secret)} bytes, expected {SECRET_BYTES}")
    return secret


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    return blake3(tenant.encode(), key=secret).digest()
