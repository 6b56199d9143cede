"""Groups of ranks that end: by a rank's death or silence, by a model that can't be opened, by their owner; and on GPUs.

Each test has a group of its own, and a process can be in one at a time; those that share one are in test_parallel.py.
"""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.errors import EngineError, ModelError, RankLost
from engine.parallel.group import RankGroup, rank_devices
from engine.parallel.leading import LeadingRows
from engine.parallel.process import RankParts
from engine.sparse.settings import SparseSettings

ADAPTIVE = SparseSettings(crossover_tokens=SEGMENT_TOKENS, target=0.8)
# Behind a stored segment still one for each rank.
TOKENS = random_tokens(3 * SEGMENT_TOKENS + 777)
FIRST = SEGMENT_TOKENS


@pytest.fixture(scope="module")
def expected(llama_folder: Path, module_engine_on: OpenEngine) -> list[list[bytes]]:
    """The KV of TOKENS as one rank makes it."""
    alone = module_engine_on(llama_folder, "alone", device="cpu", sparse=ADAPTIVE)
    run(alone.start_prefill(prefill_request(TOKENS)))
    return stored_kv(alone, TOKENS)


@pytest.mark.parametrize(
    ("how", "fraction", "said"),
    [
        (signal.SIGKILL, 0.0, "rank 2 of 3 is gone: exit status -9"),
        (signal.SIGKILL, 0.5, "rank 2 of 3 is gone: exit status -9"),
        (signal.SIGSTOP, 0.5, "don't hear each other|has not answered"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_prefill_and_a_fresh_group_makes_it(
    request: pytest.FixtureRequest,
    how: signal.Signals,
    fraction: float,
    said: str,
    llama_folder: Path,
    engine_on: OpenEngine,
    expected: list[list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"device": "cpu", "sparse": ADAPTIVE}
    if how == signal.SIGSTOP:
        monkeypatch.setattr("engine.parallel.group._STALL_S", 10.0)
        monkeypatch.setattr("engine.parallel.group._ENDING_S", 1.0)  # none of the two ends by itself
    doomed = engine_on(llama_folder, gpus=3, **options)
    request.addfinalizer(doomed.close)
    with monkeypatch.context() as patch:
        patch.setattr("engine.prefill.STEP_S", 0.0)
        prefill = doomed.start_prefill(prefill_request(TOKENS))
        while prefill.progress < fraction:
            assert prefill.step()
        assert doomed._ranks is not None
        os.kill(doomed._ranks.pids[1], how)
        with pytest.raises(RankLost, match=said):
            run(prefill)
    if how == signal.SIGKILL:
        with pytest.raises(RankLost):
            doomed.start_prefill(prefill_request(TOKENS))
    started = time.monotonic()
    doomed.close()
    assert time.monotonic() - started < 60
    fresh = engine_on(llama_folder, gpus=2, **options)
    try:
        prefill = fresh.start_prefill(prefill_request(TOKENS))
        assert isinstance(prefill._rows, LeadingRows)
        run(prefill)
        assert stored_kv(fresh, TOKENS) == expected
    finally:
        fresh.close()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [device.index for device in rank_devices(3, torch.device("cuda", 1))] == [1, 2, 0]
    with pytest.raises(ValueError, match="gpus: got 4, but there are 3 CUDA devices"):
        rank_devices(4, torch.device("cuda", 0))


def test_a_rank_that_cannot_open_its_model_is_named() -> None:
    group = RankGroup(2, partial(_refuse, "no such folder"), torch.device("cpu"))
    try:
        with pytest.raises(RankLost, match="rank 1 of 2 is gone: ModelError: no such folder"):
            group.join(RankParts(None, None, "never compared"))  # type: ignore[arg-type]
    finally:
        group.close()


def _refuse(reason: str, device: torch.device) -> RankParts:
    raise ModelError(reason)


def test_ranks_end_with_the_group(llama_folder: Path, engine_on: OpenEngine) -> None:
    engine = engine_on(llama_folder, device="cpu", gpus=2)
    assert engine._ranks is not None
    (pid,) = engine._ranks.pids
    engine.close()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineError):
        run(engine.start_prefill(prefill_request(TOKENS)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fidelity", ["default", "exact"])
def test_kv_is_the_same_to_the_bit_on_two_gpus(
    fidelity: Any, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = replace(ADAPTIVE, key_block=128, local_blocks=2, sampled_rows=4, guard_rows=8, corrections=1)
    options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "float8", "linears": "float8", "sparse": sparse}
    alone = engine_on(llama_folder, "one", **options)
    expected = run(alone.start_prefill(prefill_request(TOKENS, fidelity=fidelity)))
    both = engine_on(llama_folder, "two", gpus=2, **options)
    try:
        run(both.start_prefill(prefill_request(TOKENS[:FIRST], fidelity=fidelity, owner="first")))
        prefill = both.start_prefill(prefill_request(TOKENS, fidelity=fidelity))
        assert isinstance(prefill._rows, LeadingRows)
        run(prefill)
        assert stored_kv(both, TOKENS, fidelity) == stored_kv(alone, TOKENS, fidelity)
        assert torch.equal(prefill.last_logits, expected.last_logits)
        with monkeypatch.context() as stepwise:
            stepwise.setattr("engine.prefill.STEP_S", 0.0)  # a GPU would do all of it in one step
            cancelled = both.start_prefill(prefill_request(random_tokens(len(TOKENS), seed=8), owner="cancelled"))
            assert cancelled.step()
            cancelled.cancel()
        other = random_tokens(len(TOKENS), seed=9)
        run(both.start_prefill(prefill_request(other, fidelity=fidelity, owner="other")))
        run(alone.start_prefill(prefill_request(other, fidelity=fidelity, owner="other")))
        assert stored_kv(both, other, fidelity) == stored_kv(alone, other, fidelity)
    finally:
        both.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpus_process_that_dies_ends_the_prefill(
    llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    engine = engine_on(llama_folder, device="cuda", dtype="bfloat16", sparse=ADAPTIVE, gpus=2)
    prefill = engine.start_prefill(prefill_request(TOKENS))
    assert prefill.step()
    assert engine._ranks is not None
    os.kill(engine._ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost):
        run(prefill)
    engine.close()
