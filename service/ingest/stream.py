"""The token stream on disk: pieces of text go in, document.txt, tokens.npy and offsets.npy grow as they are encoded."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from service.ingest.base import IngestError
from service.ingest.token_bytes import TextTokenizer

BATCH_CHARS = 1 << 20
MAX_WAITING_BATCHES = 2
NPY_HEADER_BYTES = 128


class TokenStream:
    """Writes one document. Positions are taken as marks while text goes in and known as tokens after `close`."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, *, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._text = open(folder / "document.txt", "wb")  # noqa: SIM115 (closed by `close`)
        self._tokens = open(folder / "tokens.npy", "wb")  # noqa: SIM115
        self._offsets = open(folder / "offsets.npy", "wb")  # noqa: SIM115
        for file in (self._tokens, self._offsets):
            file.write(b"\0" * NPY_HEADER_BYTES)
        self._hash = blake3()
        self._batch: list[str] = []
        self._batch_chars = 0
        self._num_pieces = 0
        self._ends: list[int] = []  # tokens up to the end of each piece
        self._num_bytes = 0
        self.num_tokens = 0
        # One thread: batches are written in order. It waits in Rust, where rayon uses all its threads.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._waiting: deque[Future[None]] = deque()

    def write(self, piece: str) -> None:
        """Append a piece. Raises IngestError document_too_long once that is known."""
        if not piece:
            return
        self._batch.append(piece)
        self._num_pieces += 1
        self._batch_chars += len(piece)
        if self._batch_chars >= BATCH_CHARS:
            self._send()

    def mark(self) -> int:
        """A position; `token_at` turns it into a token index after `close`."""
        return self._num_pieces

    def token_at(self, mark: int) -> int:
        return self._ends[mark - 1] if mark else 0

    def close(self) -> str:
        """Finish the files. Returns the stream's hash (of the text, in order)."""
        self._send()
        while self._waiting:
            self._waiting.popleft().result()
        self._pool.shutdown()
        self._write_offsets(np.array([], dtype=np.uint32), last=True)
        self._text.close()
        _finish_npy(self._tokens, "<u4", self.num_tokens)
        _finish_npy(self._offsets, "<u8", self.num_tokens + 1)
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Stop without finishing: what lies on disk is no document."""
        self._pool.shutdown(cancel_futures=True)
        for file in (self._text, self._tokens, self._offsets):
            file.close()

    def _send(self) -> None:
        while len(self._waiting) >= MAX_WAITING_BATCHES:
            self._waiting.popleft().result()
        if self._batch:
            self._waiting.append(self._pool.submit(self._encode, self._batch))
            self._batch, self._batch_chars = [], 0

    def _encode(self, batch: list[str]) -> None:
        for text, ids in zip(batch, self._tokenizer.encode(batch), strict=True):
            self._tokens.write(ids.astype("<u4").tobytes())
            self._write_offsets(ids)
            raw = text.encode()
            self._text.write(raw)
            self._hash.update(raw)
            self.num_tokens += len(ids)
            self._ends.append(self.num_tokens)
        if self._max_tokens and self.num_tokens > self._max_tokens:
            raise IngestError(
                "document_too_long",
                f"the document has more than {self._max_tokens} tokens, the limit; got {self.num_tokens} so far",
            )

    def _write_offsets(self, ids: NDArray[np.uint32], *, last: bool = False) -> None:
        """The byte in document.txt where each token begins; behind the last token, where the text ends."""
        if last:
            self._offsets.write(np.array([self._num_bytes], dtype="<u8").tobytes())
            return
        lengths = self._tokenizer.lengths[ids].astype(np.uint64)
        ends = np.cumsum(lengths, dtype=np.uint64) + np.uint64(self._num_bytes)
        self._offsets.write((ends - lengths).astype("<u8").tobytes())
        self._num_bytes = int(ends[-1]) if len(ends) else self._num_bytes


def _finish_npy(file: "object", dtype: str, count: int) -> None:
    """Put the NPY header (format 1.0) into the room left for it; its length is only known at the end."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({count},), }}".encode()
    padded = header.ljust(NPY_HEADER_BYTES - 11) + b"\n"
    file.seek(0)  # type: ignore[attr-defined]
    file.write(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)  # type: ignore[attr-defined]
    file.close()  # type: ignore[attr-defined]
