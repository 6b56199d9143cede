"""What a batch has come to so far: rows appended to a file in its folder, one file for each keeper that worked on it.

A keeper that lost its lease without knowing writes into a file of its own; of two rows for one line the first counts.
So a torn last line and a line answered twice do no harm.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]


class RowStore:
    """`writer` names this keeper: the version under which it claimed the batch. Close it when done."""

    def __init__(self, folder: Path, writer: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.done: set[str] = set()
        self.completed = self.failed = 0
        for row in self.rows():
            self._count(row)
        self._sink: BinaryIO = (folder / f"{writer:08}.jsonl").open("ab")

    def append(self, row: Row) -> None:
        """On disk when this returns."""
        self._sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._count(row)

    def _count(self, row: Row) -> None:
        self.done.add(row["custom_id"])
        if has_failed(row):
            self.failed += 1
        else:
            self.completed += 1

    def rows(self) -> Iterator[Row]:
        """Each line's row once, in the order they came."""
        seen: set[str] = set()
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as source:
                for text in source:
                    if not text.endswith(b"\n"):  # torn by a crash
                        continue
                    row: Row = json.loads(text)
                    if row["custom_id"] not in seen:
                        seen.add(row["custom_id"])
                        yield row

    def write(self, name: str, failed: bool) -> Path | None:
        """A file of the rows that failed, or of those that didn't; None where there are none."""
        path, size_bytes = self._folder / name, 0
        with path.open("wb") as target:
            for row in self.rows():
                if has_failed(row) is failed:
                    size_bytes += target.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        return path if size_bytes else None

    def usage(self) -> Row:
        """Tokens of all answers, in the shape of a response's usage."""
        prompt = completion = cached = 0
        for row in self.rows():
            if not has_failed(row):
                used = row["response"]["body"]["usage"]
                prompt += used.get("prompt_tokens", used.get("input_tokens"))
                completion += used.get("completion_tokens", used.get("output_tokens"))
                details = used.get("prompt_tokens_details") or used["input_tokens_details"]
                cached += details["cached_tokens"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }

    def close(self) -> None:
        self._sink.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def has_failed(row: Row) -> bool:
    return bool(row["response"] is None or row["response"]["status_code"] >= 400)
