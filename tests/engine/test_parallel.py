"""One document over several ranks, real processes over gloo: the same KV to the bit, and what a rank's death does."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.engine import LocalEngine
from engine.errors import EngineError, ModelError, RankLost
from engine.interfaces import PrefillResult
from engine.parallel.group import RankGroup, rank_devices
from engine.parallel.leading import LeadingRows
from engine.parallel.process import RankParts
from engine.sparse.settings import SparseSettings

ADAPTIVE = SparseSettings(crossover_tokens=SEGMENT_TOKENS, target=0.8)
SETTINGS = {"adaptive": ADAPTIVE, "dense": replace(ADAPTIVE, policy="dense")}
# Behind a stored segment still one for each rank.
TOKENS = random_tokens(3 * SEGMENT_TOKENS + 777)
FIRST = SEGMENT_TOKENS


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, llama_folder: Path, module_engine_on: OpenEngine) -> Iterator[LocalEngine]:
    """An engine on several ranks; its sparse settings and store are changed by the tests."""
    engine = module_engine_on(
        llama_folder, f"ranks-{request.param}", gpus=request.param, sparse=ADAPTIVE, device="cpu", checkpoint_s=1e9
    )
    yield engine
    engine.close()


@pytest.fixture
def one(engine_on: OpenEngine, llama_folder: Path) -> Any:
    def open_one(**options: Any) -> LocalEngine:
        return engine_on(llama_folder, "one", device="cpu", **options)

    return open_one


def same(result: PrefillResult, other: PrefillResult) -> bool:
    """But for the order in which means were added up."""
    cells = [[(part.start, part.end, part.worst) for part in made.segment_recalls] for made in (result, other)]
    means = [[made.density, *(part.mean or 0.0 for part in made.segment_recalls)] for made in (result, other)]
    return (
        cells[0] == cells[1]
        and means[0] == pytest.approx(means[1])
        and (result.heads, result.num_tokens, result.cached_tokens, result.layers_recomputed)
        == (other.heads, other.num_tokens, other.cached_tokens, other.layers_recomputed)
        and (result.recall and result.recall.worst) == (other.recall and other.recall.worst)
    )


@pytest.mark.parametrize("fidelity", ["default", "exact"])
def test_kv_is_the_same_to_the_bit_on_any_number_of_ranks(fidelity: Any, ranks: LocalEngine, one: Any) -> None:
    alone = one(sparse=ADAPTIVE)
    expected = run(alone.start_prefill(prefill_request(TOKENS, fidelity=fidelity)))
    prefill = ranks.start_prefill(prefill_request(TOKENS, fidelity=fidelity, holder=f"{fidelity} document"))
    assert isinstance(prefill._rows, LeadingRows)
    run(prefill)
    assert stored_kv(ranks, TOKENS, fidelity) == stored_kv(alone, TOKENS, fidelity)
    assert torch.equal(prefill.last_logits, expected.last_logits)
    assert same(prefill.result, expected.result)
    assert (prefill.result.density < 0.9) == (fidelity == "default")
    ranks.store.release(f"{fidelity} document")


def test_what_is_stored_goes_to_all_ranks(ranks: LocalEngine, one: Any) -> None:
    alone = one(sparse=ADAPTIVE)
    run(alone.start_prefill(prefill_request(TOKENS)))
    first = TOKENS[:SEGMENT_TOKENS]
    run(ranks.start_prefill(prefill_request(first, holder="first")))
    prefill = ranks.start_prefill(prefill_request(TOKENS, holder="whole"))
    assert isinstance(prefill._rows, LeadingRows)
    assert run(prefill).result.cached_tokens == SEGMENT_TOKENS
    assert stored_kv(ranks, TOKENS) == stored_kv(alone, TOKENS)
    ranks.store.release("first")
    ranks.store.release("whole")


def test_a_short_document_overtakes_and_is_rank_0s_alone(
    ranks: LocalEngine, one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    alone = one(sparse=ADAPTIVE)
    other = random_tokens(len(TOKENS), seed=5)
    for tokens in (TOKENS, other):
        run(alone.start_prefill(prefill_request(tokens, owner=str(tokens[0]))))
    long = ranks.start_prefill(prefill_request(TOKENS, owner="long", holder="long"))
    while long.progress < 0.4:
        assert long.step()
    beside = ranks.start_prefill(prefill_request(other, owner="beside", holder="beside"))
    assert not isinstance(beside._rows, LeadingRows)
    run(beside)
    run(long)
    assert stored_kv(ranks, TOKENS) == stored_kv(alone, TOKENS)
    assert stored_kv(ranks, other) == stored_kv(alone, other)
    short = ranks.start_prefill(prefill_request(TOKENS[:5000], owner="short", holder="long"))
    assert not isinstance(short._rows, LeadingRows)
    run(short)
    ranks.store.release("long")
    ranks.store.release("beside")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.45, 0.8])
def test_a_cancelled_prefill_leaves_the_ranks_free(
    fraction: float, ranks: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops; the next one is right, which it would not be if ranks were in different places."""
    with monkeypatch.context() as patch:
        patch.setattr("engine.prefill.STEP_S", 0.0)
        cancelled = ranks.start_prefill(prefill_request(TOKENS, owner="cancelled", fidelity="exact"))
        while cancelled.progress < fraction:
            assert cancelled.step()
        cancelled.cancel()
    prefill = ranks.start_prefill(prefill_request(TOKENS, holder="after"))
    assert isinstance(prefill._rows, LeadingRows)
    run(prefill)
    assert prefill.result.cached_tokens == 0
    ranks.store.release("after")


def test_a_prefill_goes_on_on_another_number_of_ranks(
    ranks: LocalEngine, one: Any, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of all ranks make one resume point, whoever left it and whoever takes it up."""
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    monkeypatch.setattr("engine.prefill._CHECKPOINT_BYTES_S", 1e15)
    whole = engine_on(llama_folder, "whole", device="cpu", sparse=ADAPTIVE)
    expected = run(whole.start_prefill(prefill_request(TOKENS))).result
    alone = one(sparse=ADAPTIVE, checkpoint_s=0.0)
    stopped = alone.start_prefill(prefill_request(TOKENS))
    while stopped.progress < 0.5:
        assert stopped.step()
    stopped.suspend()
    monkeypatch.setattr(ranks, "store", alone.store)
    monkeypatch.setattr(ranks, "_resume", alone._resume)
    monkeypatch.setattr(ranks, "_checkpoint_s", 0.0)
    going_on = ranks.start_prefill(prefill_request(TOKENS))
    assert isinstance(going_on._rows, LeadingRows)
    while going_on.progress < 0.8:
        assert going_on.step()
    going_on.suspend()
    result = run(alone.start_prefill(prefill_request(TOKENS))).result
    assert result.resumed_from_layer == 2
    assert stored_kv(alone, TOKENS) == stored_kv(whole, TOKENS)
    assert same(result, expected)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_rank_that_dies_ends_the_prefill_and_a_fresh_group_makes_it(
    fraction: float, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cpu", "sparse": ADAPTIVE, "gpus": 3}
    doomed = engine_on(llama_folder, **options)
    with monkeypatch.context() as patch:
        patch.setattr("engine.prefill.STEP_S", 0.0)
        prefill = doomed.start_prefill(prefill_request(TOKENS))
        while prefill.progress < fraction:
            assert prefill.step()
        assert doomed._ranks is not None
        os.kill(doomed._ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 2 of 3 is gone: exit status -9"):
            run(prefill)
    with pytest.raises(RankLost):
        doomed.start_prefill(prefill_request(TOKENS))
    started = time.monotonic()
    doomed.close()
    assert time.monotonic() - started < 20
    fresh = engine_on(llama_folder, **options)
    try:
        run(fresh.start_prefill(prefill_request(TOKENS)))
        alone = engine_on(llama_folder, "alone", device="cpu", sparse=ADAPTIVE)
        run(alone.start_prefill(prefill_request(TOKENS)))
        assert stored_kv(fresh, TOKENS) == stored_kv(alone, TOKENS)
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
