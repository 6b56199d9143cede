"""What was measured, one JSON line a (document, variant), so that a run goes on where the last one ended."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Key:
    """One measurement. `digest` stands for weights, numerics, policy and its constants."""

    device: str
    digest: str
    task: str
    tokens: int  # length asked for: document, question and reply
    questions: int
    index: int  # number of the document
    late: int = 0  # of variant `late`: how many of the questions it asks


@dataclass(frozen=True)
class Record:
    """One document under one variant; lists have one value a question, of `late` its first ones.

    "Later" is from the document's stored KV, "in the prompt" is prefilled as a part of it.
    """

    key: Key
    variant: str
    num_tokens: int  # of the prefix that was prefilled
    scores: list[float]  # share of the answers found in the greedy reply
    nlls: list[float]  # of the true reply, nats a token
    replies: list[str]
    density: float
    recall: dict[str, Any] | None
    heads: dict[str, int]
    prefill_s: float
    answer_s: float
    command: str
    versions: dict[str, str]
    commit: str  # empty where the measuring machine had no checkout
    date: str
    # The same questions in the prompt; [] where not measured, as everything below.
    in_prompt_scores: list[float] = field(default_factory=list)
    in_prompt_nlls: list[float] = field(default_factory=list)
    # The same questions behind another one and its true reply: all that later, and all that in the prompt.
    second_scores: list[float] = field(default_factory=list)
    second_nlls: list[float] = field(default_factory=list)
    second_in_prompt_scores: list[float] = field(default_factory=list)
    second_in_prompt_nlls: list[float] = field(default_factory=list)


class RecordFile:
    """Appends; a line that a killed run left half written is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = list(_read(path))
        self._keys = {record.key for record in self.records}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def append(self, record: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self.records.append(record)
        self._keys.add(record.key)

    def newest(self) -> list[Record]:
        """Those of the last measured digest of each (device, variant): older ones are of another model or policy."""
        last = {(record.key.device, record.variant): record.key.digest for record in self.records}
        return [record for record in self.records if record.key.digest == last[record.key.device, record.variant]]


def _read(path: Path) -> Iterable[Record]:
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    # Not splitlines(): a reply may hold any of Unicode's line ends.
    for line in filter(None, text.split("\n")):
        fields = json.loads(line)
        yield Record(**{**fields, "key": Key(**fields["key"])})
