"""Names in a .git/index file: tracked files win over ignore rules. Read without running git inside foreign folders."""

import struct

LINK_MODE = 0o160000


def tracked_paths(data: bytes) -> dict[str, tuple[int, str]]:
    """path → (mode, object id) of index versions 2 to 4; empty if it isn't one (SHA-256 indexes included)."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError):
        return {}


def _read(data: bytes) -> dict[str, tuple[int, str]]:
    signature, version, count = struct.unpack_from(">4sII", data)
    if signature != b"DIRC" or version not in (2, 3, 4) or count > len(data) // 40:
        return {}
    paths: dict[str, tuple[int, str]] = {}
    at, previous = 12, b""
    for _ in range(count):
        start = at
        (mode,) = struct.unpack_from(">I", data, at + 24)
        object_id = data[at + 40 : at + 60].hex()
        (flags,) = struct.unpack_from(">H", data, at + 60)
        at += 64 if version >= 3 and flags & 0x4000 else 62
        if version == 4:
            strip, at = _offset_varint(data, at)
            end = data.index(b"\0", at)
            name = previous[: len(previous) - strip] + data[at:end]
            at = end + 1
        else:
            end = data.index(b"\0", at)
            name = data[at:end]
            at = start + ((end - start) // 8 + 1) * 8
        previous = name
        paths[name.decode("utf-8", "surrogateescape")] = (mode, object_id)
    return paths


def _offset_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    value = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at + 1
