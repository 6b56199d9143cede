"""Which prefills a worker has under way at once: their memory, and who waits for whom."""

from pathlib import Path

import numpy as np

from engine.interfaces import PrefillRequest
from service.admission import MARGIN_BYTES, Admission
from service.engine_parts import open_engine_parts
from service.metrics import Metrics
from service.settings import Settings
from service.stages.prefill import PrefillRuns


class Job:
    def __init__(self, kind: str = "prefill") -> None:
        self.job = self
        self.kind = kind

    def prefill_progress(self, fraction: float, eta_s: float | None) -> None: ...


class Prefill:
    progress, eta_s = 0.0, None

    def step(self) -> bool:
        return True


def runs_of(room: int) -> PrefillRuns:
    return PrefillRuns(Admission(lambda tokens: tokens, lambda: MARGIN_BYTES + room))


def join(runs: PrefillRuns, name: str, num_tokens: int, kind: str = "prefill") -> None:
    tokens = np.zeros(num_tokens, dtype=np.uint32)
    runs.join(PrefillRequest(tokens=tokens, salt=b"", owner=name, holder=name), Job(kind))  # type: ignore[arg-type]


def steps(runs: PrefillRuns, count: int) -> list[str]:
    names = []
    for _ in range(count):
        run = runs.next()
        assert run is not None
        run.step(lambda request: Prefill())  # type: ignore[arg-type,return-value]
        names.append(run.request.holder)
    return names


def test_the_first_is_let_in_whatever_it_needs() -> None:
    runs = runs_of(10)
    join(runs, "huge", 1000)
    assert steps(runs, 2) == ["huge", "huge"]


def test_what_does_not_fit_waits_and_what_fits_goes_on() -> None:
    runs = runs_of(1500)
    join(runs, "first", 1000)
    steps(runs, 1)
    join(runs, "large", 900)
    join(runs, "small", 400)
    assert set(steps(runs, 8)) == {"first", "small"}
    runs.end(runs.runs["first"])
    assert set(steps(runs, 8)) == {"large", "small"}


def test_younger_ones_do_not_keep_an_older_one_out_for_ever() -> None:
    runs = runs_of(1000)
    join(runs, "small", 300)
    steps(runs, 1)
    join(runs, "large", 800)
    join(runs, "small-2", 250)
    assert set(steps(runs, 8)) == {"small", "small-2"}, "the older one keeps it out anyway"
    runs.end(runs.runs["small"])
    join(runs, "small-3", 100)
    assert set(steps(runs, 8)) == {"small-2"}, "only a younger one does: no more of them begin"
    runs.end(runs.runs["small-2"])
    assert "large" in steps(runs, 8)


def test_a_question_goes_before_a_shorter_prefill_job() -> None:
    runs = runs_of(10_000)
    join(runs, "job", 100)
    join(runs, "question", 1000, kind="answer")
    assert steps(runs, 3) == ["question"] * 3


def test_the_default_models_prefills_need_what_the_plan_says(tmp_path: Path) -> None:
    parts = open_engine_parts(Settings(data_dir=tmp_path, device="cpu", disk_floor_bytes=0).resolved(), Metrics())
    long, short = parts.prefill_bytes(1_000_000), parts.prefill_bytes(1)
    parts.close()
    hidden, kv = 576, 2 * 3 * 64  # numbers a token, of 2 bytes or 4
    assert (long - short) / 999_999 in (2 * (hidden + kv), 4 * (hidden + kv))
    assert 0 < short < 2 << 30
