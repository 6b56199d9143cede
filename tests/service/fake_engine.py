"""An engine that computes nothing: "KV" is an empty file, a prefill is so many steps, an answer is fixed words.

What a document says decides what happens to it: SLOW and PATIENT take many steps, LONG more than anybody waits for,
KILL kills the process in the middle, RAISE breaks a step, FULL finds no room. A question with STORY gets a long answer.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from engine.chain import TokenIds, segment_chain
from engine.errors import ContextTooLong, KVMissing, StorageFull
from engine.interfaces import (
    AnswerDelta,
    AnswerRequest,
    CacheState,
    Fidelity,
    PrefillRequest,
    PrefillResult,
    RecallReport,
)
from service.engine_parts import EngineParts
from service.metrics import Metrics
from service.served_model import ServedModel
from service.settings import Settings

LAYERS = 10
STEP_S = 0.005
STEPS = {"LONG": 1000, "PATIENT": 60, "SLOW": 10}  # a layer


@dataclass
class FakeKV:
    """Files `<key>` in a folder, and which holder has which."""

    folder: Path
    policies: dict[str, tuple[float | None, bool]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)  # bytes by holder, as far as this process made it

    def describe(self, holder: str) -> dict[str, int]:
        return {"disk": self.made[holder]} if holder in self.made else {}

    def holders(self) -> dict[str, int]:
        return dict(self.made)

    def usage(self) -> dict[str, int]:
        return {"disk": sum(self.made.values()), "host": 0}

    def path(self, key: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / key

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.policies[holder] = (ttl_s, pinned)

    def release(self, holder: str) -> int:
        self.made.pop(holder, None)
        self.released.append(holder)
        return 0

    def unfinished(self) -> set[str]:
        return set()

    def discard(self, owner: str) -> int:
        self.discarded.append(owner)
        return 0

    def sweep(self) -> int:
        return 0


class FakeEngine:
    max_positions = 65_536

    def __init__(self, kv: FakeKV, decode: Callable[[Sequence[int]], str], resume: Path) -> None:
        self.kv, self.decode, self.resume = kv, decode, resume
        self.steps: list[tuple[str, str]] = []  # (kind, owner or question) of every step, in order
        self.prefills: list[FakePrefill] = []
        self.answering = self.most_answering = 0  # answers open now, and at most at one time
        self.computes = 0  # leading tokens of a stored prefix that an answer computes again

    def digest(self, fidelity: Fidelity) -> str:
        return f"digest-{fidelity}"

    def key(self, tokens: TokenIds, salt: bytes, fidelity: Fidelity) -> str:
        return segment_chain(tokens, salt=salt, digest=self.digest(fidelity))[-1].key

    def cached_tokens(self, tokens: TokenIds, *, salt: bytes, fidelity: Fidelity) -> int:
        return len(tokens) if self.kv.path(self.key(tokens, salt, fidelity)).exists() else 0

    def start_prefill(self, request: PrefillRequest) -> "FakePrefill":
        text = self.decode(request.tokens.tolist())
        if "FULL" in text:
            raise StorageFull(1000, 10)
        self.prefills.append(FakePrefill(self, request, text))
        return self.prefills[-1]

    def start_answer(self, request: AnswerRequest) -> "FakeAnswer":
        if len(request.prefix) + len(request.question) > self.max_positions:
            raise ContextTooLong(len(request.prefix) + len(request.question), self.max_positions)
        if len(request.prefix) and not self.cached_tokens(request.prefix, salt=request.salt, fidelity=request.fidelity):
            raise KVMissing("prefill the prefix first")
        return FakeAnswer(self, request)


class FakePrefill:
    def __init__(self, engine: FakeEngine, request: PrefillRequest, text: str) -> None:
        self.engine, self.request, self.text = engine, request, text
        steps = next((steps for word, steps in STEPS.items() if word in text), 1)
        self.total = steps * LAYERS
        engine.resume.mkdir(parents=True, exist_ok=True)
        self.point = engine.resume / request.owner
        self.done = self.resumed_from = int(self.point.read_text()) if self.point.exists() else 0
        self.ended = ""

    def step(self) -> bool:
        self.engine.steps.append(("prefill", self.request.owner))
        if "RAISE" in self.text and self.done == 2:
            raise RuntimeError("the document says: hush")
        if "KILL" in self.text and self.done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)
        self.done += 1
        scratch = self.point.with_suffix(".new")
        scratch.write_text(str(self.done))
        scratch.rename(self.point)
        if self.done < self.total:
            return True
        key = self.engine.key(self.request.tokens, self.request.salt, self.request.fidelity)
        self.engine.kv.path(key).touch()
        self.engine.kv.made[self.request.holder] = 1000
        self.point.unlink()
        return False

    @property
    def progress(self) -> float:
        return self.done / self.total

    @property
    def eta_s(self) -> float | None:
        return (self.total - self.done) * STEP_S

    @property
    def result(self) -> PrefillResult:
        return PrefillResult(
            num_tokens=len(self.request.tokens),
            cached_tokens=0,
            layers_recomputed=0,
            resumed_from_layer=self.resumed_from,
            density=0.4,
            recall=RecallReport(0.95, 0.97, 0.9, 0.85, below_target=False),
            heads={"block_sparse": 90},
            head_map=["bbb"] * 30,
            seconds=0.2,
        )

    def suspend(self) -> None:
        self.ended = "suspended"

    def cancel(self) -> None:
        self.ended = "cancelled"
        self.point.unlink(missing_ok=True)


class FakeAnswer:
    kv_tier: CacheState = "warm_host"

    def __init__(self, engine: FakeEngine, request: AnswerRequest) -> None:
        self.engine, self.request = engine, request
        question = engine.decode(request.question.tolist())
        self.words = [f"{n} " for n in range(2000)] if "STORY" in question else ["It ", "is ", str(len(request.prefix))]
        self.completion_tokens = 0
        self.closed = False
        engine.answering += 1
        engine.most_answering = max(engine.most_answering, engine.answering)

    def step(self) -> AnswerDelta:
        self.engine.steps.append(("answer", str(self.completion_tokens)))
        time.sleep(STEP_S / 2)
        word = self.words[self.completion_tokens]
        self.completion_tokens += 1
        if self.completion_tokens == len(self.words):
            return AnswerDelta(word, (1,), "stop")
        if self.completion_tokens == self.request.sampling.max_tokens:
            return AnswerDelta(word, (1,), "length")
        return AnswerDelta(word, (1,))

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prefix) + len(self.request.question)

    @property
    def computed_tokens(self) -> int:
        return min(self.engine.computes, len(self.request.prefix))

    def close(self) -> None:
        self.engine.answering -= not self.closed
        self.closed = True


def open_fake_parts(settings: Settings, metrics: Metrics) -> EngineParts:
    """`settings.model` is a folder made by prompt_models.save_folder."""
    folder = Path(settings.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kv = FakeKV(settings.data_dir / "fake-kv")
    engine = FakeEngine(kv, lambda ids: tokenizer.decode(list(ids)), settings.data_dir / "fake-resume")
    model = ServedModel.load(settings.model, folder)
    return EngineParts(
        engine, kv, model, folder / "tokenizer.json", report=lambda: None, close=lambda: None, kv_report=kv
    )
