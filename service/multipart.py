"""multipart/form-data as it arrives: files go where the caller says, fields are kept, nothing else is held."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.errors import InvalidRequest, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

CHUNK_BYTES = 1 << 20
MAX_PARTS = 10_000
MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 * 1024


def boundary_of(content_type: str) -> bytes:
    """Raises UnsupportedMediaType for anything but multipart/form-data with a boundary."""
    kind, parameters = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
        raise UnsupportedMediaType(
            f"multipart/form-data with a boundary is expected, got {content_type or 'no content type'!r}"
        )
    return parameters[b"boundary"]


class PartReader:
    """Feed it the body; it raises InvalidRequest at the first thing that can't be right."""

    def __init__(self, boundary: bytes, *, new_file: Callable[[str], Path], on_bytes: Callable[[int], None]) -> None:
        """`new_file(filename)` says where a file part goes, `on_bytes(count)` may refuse more by raising.

        Raises InvalidRequest for a boundary that is too long.
        """
        self.fields: dict[str, str] = {}
        self._new_file = new_file
        self._on_bytes = on_bytes
        self._file: BinaryIO | None = None
        self._field: tuple[str, bytearray] | None = None
        self._header = (b"", b"")  # name and value, so far
        self._disposition = b""
        self._num_parts = 0
        self._ended = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body can't be read: {error}", code="invalid_multipart") from error

    def feed(self, chunk: bytes) -> None:
        try:
            for start in range(0, len(chunk), CHUNK_BYTES):
                self._parser.write(chunk[start : start + CHUNK_BYTES])
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body is damaged: {error}", code="invalid_multipart") from error

    def finish(self) -> None:
        """The body is over: it must have come to its last boundary."""
        if not self._ended:
            raise InvalidRequest("the multipart body ends before its last boundary", code="invalid_multipart")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _part_begin(self) -> None:
        self._disposition = b""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"more than {MAX_PARTS} parts in one upload", code="too_many_parts")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequest("a part of the multipart body has no name", code="invalid_multipart")
        if b"filename" in options:
            self._file = self._new_file(options[b"filename"].decode("utf-8", "replace")).open("wb")
            return
        if len(self.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"more than {MAX_FIELDS} fields in one upload", code="too_many_fields")
        self._field = (options[b"name"].decode("utf-8", "replace"), bytearray())

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(memoryview(data)[start:end])
            self._on_bytes(end - start)
        elif self._field is not None:
            name, value = self._field
            value += data[start:end]
            if len(value) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"field {name!r} has more than {MAX_FIELD_BYTES} bytes", param=name)

    def _part_end(self) -> None:
        self.close()
        if self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode("utf-8", "replace")
            self._field = None

    def _end(self) -> None:
        self._ended = True
