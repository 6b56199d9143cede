"""Reading zip archives: nothing is written under its own name, headers are not believed, every byte is counted."""

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from service.ingest.base import IngestError
from service.ingest.encodings import decode_name
from service.ingest.names import split_path
from service.ingest.spool import Budget, Entry, Spool

UTF8_FLAG = 0x800
ENCRYPTED_FLAG = 0x1
CREATED_ON_UNIX = 3
UNICODE_PATH_EXTRA = 0x7075
DIRECTORY_RECORD_BYTES = 46  # the least that one entry takes in the central directory
MAX_LINK_BYTES = 4096
UNNAMED = "unnamed"  # a file whose name is empty or `.` is a file all the same


def read_zip(path: Path, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
    """(path parts, entry) of each member, the bytes in the spool. A later entry of the same name is yielded too.

    Raises IngestError archive_corrupt, archive_encrypted, archive_unsafe_path, archive_bomb, too_many_entries.
    """
    _check_directory_size(path, budget)
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, struct.error, NotImplementedError) as error:
        raise IngestError("archive_corrupt", f"the zip's directory can't be read: {error}") from error
    with archive:
        members = archive.infolist()
        files = [m for m in members if not _is_directory(m)]
        budget.add_entry(len(files))
        if files and all(m.flag_bits & ENCRYPTED_FLAG for m in files):
            raise IngestError(
                "archive_encrypted", f"all {len(files)} files of the zip are encrypted; a password is needed"
            )
        named = [(member, split_path(_name(member))) for member in members]
        for member, parts in named:
            if not _is_directory(member):
                yield parts or [UNNAMED], _read_member(archive, member, spool, budget)
            elif parts:
                yield parts, Entry(path="", reason="directory")


def _is_directory(member: zipfile.ZipInfo) -> bool:
    return member.filename.endswith("/")  # ZipInfo.is_dir fails on an empty name


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, spool: Spool, budget: Budget) -> Entry:
    entry = Entry(path=member.filename)
    mode = member.external_attr >> 16
    if member.flag_bits & ENCRYPTED_FLAG:
        entry.reason, entry.size = "entry_encrypted", member.file_size
        return entry
    try:
        if member.create_system == CREATED_ON_UNIX and stat.S_ISLNK(mode):
            with archive.open(member) as stream:
                target = stream.read(MAX_LINK_BYTES)
            entry.reason, entry.detail = "symlink", target.decode("utf-8", "surrogateescape")
            return entry
        if member.create_system == CREATED_ON_UNIX and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            entry.reason = "special_file"
            return entry
        with archive.open(member) as stream:
            spool.add(entry, stream, budget.add_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, struct.error) as error:
        return Entry(path=member.filename, reason="entry_corrupt", detail=str(error)[:200])
    except NotImplementedError as error:
        return Entry(path=member.filename, reason="entry_unsupported", detail=str(error)[:200])
    except RuntimeError as error:  # zipfile's way to say "encrypted" where the central directory doesn't
        return Entry(path=member.filename, reason="entry_encrypted", detail=str(error)[:200])
    return entry


def _name(member: zipfile.ZipInfo) -> str:
    """The member's name as its maker meant it: Unicode Path field, else the flag, else UTF-8 or a guess.

    zipfile decodes names without the UTF-8 flag as code page 437, which any bytes survive.
    """
    extra = _unicode_path(member)
    if extra is not None:
        name = extra
    elif member.flag_bits & UTF8_FLAG or member.orig_filename.isascii():
        name = member.orig_filename
    else:
        name = decode_name(member.orig_filename.encode("cp437"))
    name = name.split("\0", 1)[0]
    # Old Windows tools write backslashes, against the specification.
    return name.replace("\\", "/") if "/" not in name else name


def _unicode_path(member: zipfile.ZipInfo) -> str | None:
    data = member.extra
    while len(data) >= 4:
        kind, size = struct.unpack_from("<HH", data)
        body, data = data[4 : 4 + size], data[4 + size :]
        if kind == UNICODE_PATH_EXTRA and len(body) > 5 and body[0] == 1 and not member.flag_bits & UTF8_FLAG:
            raw = member.orig_filename.encode("cp437", "replace")
            if struct.unpack_from("<I", body, 1)[0] == zlib.crc32(raw):
                return body[5:].decode("utf-8", "replace")
    return None


def _check_directory_size(path: Path, budget: Budget) -> None:
    """Refuse a directory of millions of entries before zipfile makes an object of each."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - 66_000))
        tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise IngestError("archive_corrupt", "the zip has no end record: it is cut off or damaged")
    if len(tail) - at < 22:
        raise IngestError("archive_corrupt", "the zip's end record is cut off")
    directory_bytes = int.from_bytes(tail[at + 12 : at + 16], "little")
    if directory_bytes == 0xFFFFFFFF:
        zip64 = tail.rfind(b"PK\x06\x06", 0, at)
        directory_bytes = int.from_bytes(tail[zip64 + 40 : zip64 + 48], "little") if zip64 >= 0 else 0
    entries = int.from_bytes(tail[at + 10 : at + 12], "little")
    if entries != 0xFFFF:
        # A lying count is caught again, entry by entry.
        directory_bytes = max(entries * DIRECTORY_RECORD_BYTES, 0)
    if directory_bytes // DIRECTORY_RECORD_BYTES > 16 * budget.max_entries or (
        entries != 0xFFFF and entries > budget.max_entries
    ):
        raise IngestError("too_many_entries", f"the zip holds more than {budget.max_entries} files, the limit")
