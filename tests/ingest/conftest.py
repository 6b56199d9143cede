"""Reads small inputs in this process (fast), with a small tokenizer of the same make as the default model's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from service.ingest import IngestError, IngestLimits, IngestOptions, child
from tests.ingest.makers import make_zip

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the agreement of the parties and the return of def self import"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@dataclass
class Document:
    """What one ingest wrote."""

    folder: Path
    text: str
    tokens: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    manifest: dict[str, Any]
    summary: dict[str, Any]

    def row(self, path: str) -> dict[str, Any]:
        return next(row for row in self.manifest["files"] if row["path"] == path)

    def codes(self) -> set[str]:
        own = {w["code"] for w in self.manifest["warnings"]}
        return own | {w["code"] for row in self.manifest["files"] for w in row["warnings"]}

    def reasons(self) -> dict[str, str]:
        return {row["path"]: row["reason"] for row in self.manifest["files"] if row["status"] == "skipped"}

    def body(self, path: str) -> str:
        row = self.row(path)
        return self.slice(row["token_start"], row["token_end"])

    def page(self, path: str, number: int) -> str:
        page = next(p for p in self.row(path)["pages"] if p["page"] == number)
        return self.slice(page["token_start"], page["token_end"])

    def slice(self, start: int, end: int) -> str:
        return self.text.encode()[int(self.offsets[start]) : int(self.offsets[end])].decode()


Read = Callable[..., Document]


@pytest.fixture
def read(tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """read(content, name=…, kind=…): `content` is bytes of one file, a mapping (put into a zip), or a path."""
    monkeypatch.setattr(child, "_say", lambda message: None)
    count = 0

    def run(
        content: bytes | Mapping[str, bytes | str] | Path,
        name: str = "input.zip",
        kind: str = "repo",
        *,
        limits: IngestLimits | None = None,
        options: IngestOptions | None = None,
        base: Path | None = None,
        tokenizer: Path | None = None,
    ) -> Document:
        nonlocal count
        count += 1
        scratch = tmp_path / f"scratch{count}"
        scratch.mkdir()
        path = content if isinstance(content, Path) else tmp_path / f"upload{count}"
        if not isinstance(content, Path):
            path.write_bytes(content if isinstance(content, bytes) else make_zip(content))
        request = {
            "sources": [{"path": str(path), "filename": name}],
            "scratch": str(scratch),
            "kind": kind,
            "tokenizer_file": str(tokenizer or tokenizer_file),
            "limits": asdict(limits or IngestLimits(workers=1)),
            "options": asdict(options or IngestOptions(ocr="off", office="off")),
            "base_manifest": str(base) if base else None,
        }
        summary = child.run(request)
        return load(scratch / "out", summary)

    return run


def load(out: Path, summary: dict[str, Any]) -> Document:
    document = Document(
        out,
        (out / "document.txt").read_bytes().decode("utf-8"),
        np.load(out / "tokens.npy"),
        np.load(out / "offsets.npy"),
        json.loads((out / "manifest.json").read_text("utf-8")),
        summary,
    )
    # What every document must hold, whatever the test is about.
    assert document.manifest["num_tokens"] == len(document.tokens) == len(document.offsets) - 1
    assert int(document.offsets[-1]) == len(document.text.encode())
    assert "\0" not in document.text
    return document


def error_of(run: Callable[[], object]) -> str:
    with pytest.raises(IngestError) as caught:
        run()
    assert caught.value.message
    return caught.value.code
