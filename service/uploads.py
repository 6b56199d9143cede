"""Uploaded bytes on their way to disk: never held in memory, durable before they are promised, swept after a crash.

`uploads/.incoming/<id>` is a half upload; it is renamed to `uploads/<id>` when every byte is on disk. Both carry a
locked file until the record that names them is committed: whoever finds it unlocked knows that its writer died.
"""

import contextlib
import fcntl
import io
import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from anyio import to_thread
from blake3 import blake3

from service.documents.base import Documents, Json, UnknownRecord
from service.errors import EmptyInput, QuotaExceeded, StorageExhausted, TooLarge
from service.multipart import MAX_FIELD_BYTES, MAX_FIELDS, PartReader, boundary_of
from service.queue.base import QueueUnavailable

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
CHECK_BYTES = 16 << 20  # so much may be written between two looks at the room left
UNLOCKED_S = 60.0
_LOCK = "owner"


class Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass
class Upload:
    """One request's files and fields. `commit` makes them last; leaving its block without that removes them."""

    id: str
    folder: Path
    tenant: str = ""
    quota_bytes: int | None = None  # of all that its tenant keeps
    most_bytes: int | None = None  # of this one, where that is less than any upload may have
    replaces_bytes: int = 0  # counted already, under another name
    fields: dict[str, str] = field(default_factory=dict)
    sources: list[Json] = field(default_factory=list)  # [{"filename", "path"}], paths relative to the data folder
    size_bytes: int = 0
    next_check_bytes: int = 0
    _lock: BinaryIO | None = None


class UploadStore:
    """The folder of uploads: caps, the disk floor, and sweeping."""

    def __init__(
        self,
        data_dir: Path,
        documents: Documents,
        *,
        max_upload_bytes: int,
        cap_bytes: int,
        disk_floor_bytes: int,
    ) -> None:
        """`max_upload_bytes` is for one request, `cap_bytes` for all uploads kept, as `documents` counts them."""
        self._documents = documents
        self._data_dir = data_dir
        self._root = data_dir / "uploads"
        self._incoming = self._root / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        self.parts = self._root / ".parts"  # service.parts
        self._max_upload_bytes = max_upload_bytes
        self._cap_bytes = cap_bytes
        self._disk_floor_bytes = disk_floor_bytes
        self._open_uploads: dict[str, Upload] = {}  # on disk, but not yet counted by a record

    @contextlib.asynccontextmanager
    async def open(
        self,
        upload_id: str,
        tenant: str,
        *,
        quota_bytes: int | None = None,
        most_bytes: int | None = None,
        replaces_bytes: int = 0,
    ) -> AsyncIterator[Upload]:
        """A place for one upload; removed at the end of the block unless `commit` was called.

        Raises FileExistsError while there is one of this id.
        """
        upload = await to_thread.run_sync(self._open, upload_id, tenant)
        upload.quota_bytes, upload.most_bytes, upload.replaces_bytes = quota_bytes, most_bytes, replaces_bytes
        try:
            yield upload
        finally:
            self._close(upload)

    async def receive(self, upload: Upload, content_type: str, length: int | None, body: AsyncIterator[bytes]) -> None:
        """Stream a multipart body into `upload`.

        Raises UnsupportedMediaType, InvalidRequest (not a multipart body), TooLarge, StorageExhausted.
        """
        boundary = boundary_of(content_type)
        if length is not None:
            # Boundaries and fields come on top of the files: this early answer may only be generous.
            slack = min(length, MAX_FIELDS * MAX_FIELD_BYTES)
            await to_thread.run_sync(self._check, upload, length - slack)
        parts = PartReader(
            boundary,
            new_file=lambda filename: self._new_source(upload, filename),
            on_bytes=lambda count: self._count(upload, count),
        )
        try:
            async for chunk in body:
                await to_thread.run_sync(parts.feed, chunk)
            parts.finish()
        finally:
            parts.close()
        upload.fields.update(parts.fields)

    async def receive_bytes(self, upload: Upload, filename: str, data: bytes) -> None:
        """Bytes that came inside a JSON body. Raises TooLarge, StorageExhausted."""
        await to_thread.run_sync(self._check, upload, len(data))
        path = self._new_source(upload, filename)
        await to_thread.run_sync(path.write_bytes, data)
        upload.size_bytes += len(data)

    async def receive_files(self, upload: Upload, filename: str, paths: Sequence[Path], hasher: Hasher | None) -> None:
        """Files of this store, put together as one. Raises TooLarge, StorageExhausted, QuotaExceeded."""
        target = self._new_source(upload, filename)

        def copy() -> None:
            with target.open("wb") as sink:
                for path in paths:
                    with path.open("rb") as source:
                        while chunk := source.read(CHUNK_BYTES):
                            sink.write(chunk)
                            self._count(upload, len(chunk))
                            if hasher is not None:
                                hasher.update(chunk)

        await to_thread.run_sync(copy)

    async def commit(self, upload: Upload, record: Callable[[], None]) -> None:
        """Bytes to disk, then under their final name, then `record` (which must be durable when it returns).

        Raises EmptyInput when no byte came.
        """
        if upload.size_bytes == 0:
            raise EmptyInput("the upload is empty: at least one byte is expected", param="file")
        await to_thread.run_sync(self._check_quota, upload, 0)
        await to_thread.run_sync(self._commit, upload, record)

    def check_room(self, size_bytes: int, *, replaces_bytes: int = 0) -> None:
        """Raises TooLarge or StorageExhausted when so many bytes more can't be kept."""
        if size_bytes > self._max_upload_bytes:
            raise TooLarge(f"{size_bytes} bytes are more than the {self._max_upload_bytes} that one upload may have")
        used = self.used_bytes() - replaces_bytes
        if used + size_bytes > self._cap_bytes:
            raise StorageExhausted(
                f"{size_bytes} bytes beside the {used} held are more than the {self._cap_bytes} for uploads: "
                "delete files that are no longer needed"
            )
        free = shutil.disk_usage(self._root).free
        if free - size_bytes < self._disk_floor_bytes:
            raise StorageExhausted(
                f"{free} bytes are free, of which {self._disk_floor_bytes} are never used: no room for {size_bytes}"
            )

    def used_bytes(self) -> int:
        """Bytes of all uploads, those on their way to this process and parts of larger ones included."""
        under_way = sum(upload.size_bytes for upload in list(self._open_uploads.values()))
        return self._documents.uploaded_bytes() + under_way + sum(_sizes(self.parts, "*/*/*"))

    def parts_of(self, tenant: str) -> Path:
        """The folder of a tenant's uploads in parts."""
        return self.parts / blake3(tenant.encode()).hexdigest()[:24]

    def check_quota(self, tenant: str, quota_bytes: int | None, size_bytes: int, *, replaces_bytes: int = 0) -> None:
        """Raises QuotaExceeded when so many bytes more are more than this tenant may keep."""
        if quota_bytes is None:
            return
        under_way = [upload.size_bytes for upload in list(self._open_uploads.values()) if upload.tenant == tenant]
        used = self._documents.uploaded_bytes(tenant) + sum(under_way) + sum(_sizes(self.parts_of(tenant), "*/*"))
        used -= replaces_bytes
        if used + size_bytes > quota_bytes:
            raise QuotaExceeded(
                f"{used + size_bytes} bytes would be kept with this, more than the {quota_bytes} that this key allows: "
                "delete files that are no longer needed"
            )

    def paths(self, sources: Sequence[Json]) -> list[tuple[str, Path]]:
        """(filename, absolute path) of a file record's sources."""
        return [(source["filename"], self._data_dir / source["path"]) for source in sources]

    def remove(self, file_id: str) -> None:
        """Forget a file's bytes; nothing happens where they are gone already."""
        shutil.rmtree(self._root / file_id, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what dead processes left: half uploads, and whole ones that no record names. Returns how many."""
        removed = 0
        for folder in [*self._incoming.iterdir(), *self._kept()]:
            lock = folder / _LOCK
            if not lock.is_file():
                # Complete, or so young that its lock is still to come.
                if folder.parent == self._incoming and time.time() - folder.stat().st_mtime > UNLOCKED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with lock.open("rb+") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # its writer lives
                if folder.parent == self._root and _is_recorded(self._documents, handle.read().decode(), folder.name):
                    lock.unlink(missing_ok=True)
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        if removed:
            log.warning("removed %d uploads that were never completed", removed)
        return removed

    def _kept(self) -> list[Path]:
        return [folder for folder in self._root.iterdir() if folder not in (self._incoming, self.parts)]

    def _open(self, upload_id: str, tenant: str) -> Upload:
        folder = self._incoming / upload_id
        folder.mkdir()
        lock = (folder / _LOCK).open("wb+")
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(tenant.encode())
        lock.flush()
        upload = Upload(upload_id, folder, tenant, _lock=lock)
        self._open_uploads[upload_id] = upload
        return upload

    def _close(self, upload: Upload) -> None:
        self._open_uploads.pop(upload.id, None)
        if upload._lock is not None:
            upload._lock.close()
            shutil.rmtree(upload.folder, ignore_errors=True)

    def _commit(self, upload: Upload, record: Callable[[], None]) -> None:
        for path in upload.folder.iterdir():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        fsync_folder(upload.folder)
        final = self._root / upload.id
        if final.exists():  # of an earlier request with this id that was never recorded
            shutil.rmtree(final)
        upload.folder.rename(final)
        upload.folder = final
        fsync_folder(self._root)
        try:
            record()
        except QueueUnavailable:  # whether it was recorded nobody knows: `sweep` will find out
            if upload._lock is not None:
                upload._lock.close()
                upload._lock = None
            raise
        (final / _LOCK).unlink()
        if upload._lock is not None:
            upload._lock.close()
            upload._lock = None

    def _new_source(self, upload: Upload, filename: str) -> Path:
        name = str(len(upload.sources))
        path = (self._root / upload.id / name).relative_to(self._data_dir)
        upload.sources.append({"filename": clean_name(filename), "path": str(path)})
        return upload.folder / name

    def _count(self, upload: Upload, count: int) -> None:
        upload.size_bytes += count
        most_bytes = self._max_upload_bytes if upload.most_bytes is None else upload.most_bytes
        if upload.size_bytes > most_bytes:
            raise TooLarge(f"the upload is larger than the {most_bytes} bytes that one may have")
        if upload.size_bytes >= upload.next_check_bytes:
            upload.next_check_bytes = upload.size_bytes + CHECK_BYTES
            self._check(upload, 0)

    def _check(self, upload: Upload, more_bytes: int) -> None:
        self.check_room(more_bytes, replaces_bytes=upload.replaces_bytes)
        self._check_quota(upload, more_bytes)

    def _check_quota(self, upload: Upload, more_bytes: int) -> None:
        replaces_bytes = upload.replaces_bytes
        self.check_quota(upload.tenant, upload.quota_bytes, more_bytes, replaces_bytes=replaces_bytes)


def clean_name(name: str) -> str:
    """A name to show and to tell the type by: relative, forward slashes, no control characters, no way upwards."""
    printable = "".join(character for character in name.replace("\\", "/") if character.isprintable())
    parts = [part for part in re.sub(r"^[A-Za-z]:", "", printable).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[-255:] or "upload"


def zip_stream(files: Sequence[tuple[str, Path]]) -> Iterator[bytes]:
    """The files as a zip archive, piece by piece."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, path in files:
            with path.open("rb") as source, archive.open(name, "w", force_zip64=True) as target:
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    yield sink.take()
    yield sink.take()


def _sizes(folder: Path, pattern: str) -> Iterator[int]:
    """Of the files that match; what goes away meanwhile counts nothing."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_size


class _Sink(io.RawIOBase):
    """A file that only takes: zipfile falls back to streaming when it can't seek."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        self._pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_recorded(documents: Documents, tenant: str, file_id: str) -> bool:
    try:
        documents.file(tenant, file_id)
    except UnknownRecord:
        return False
    return True
