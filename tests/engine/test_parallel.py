"""One document over several ranks, real processes over gloo: the same KV to the bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.engine import LocalEngine
from engine.interfaces import PrefillResult
from engine.parallel.leading import LeadingRows
from engine.prefill import LayerMajorPrefill
from engine.sparse.settings import SparseSettings

ADAPTIVE = SparseSettings(crossover_tokens=SEGMENT_TOKENS, target=0.6)
# Behind a stored segment still one for each rank.
TOKENS = random_tokens(3 * SEGMENT_TOKENS + 777)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, light_folder: Path, module_engine_on: OpenEngine) -> Iterator[LocalEngine]:
    """An engine on several ranks that all tests share, so that none may leave them, or the store, in another state."""
    engine = module_engine_on(
        light_folder, f"ranks-{request.param}", gpus=request.param, sparse=ADAPTIVE, device="cpu", checkpoint_s=1e9
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _ranks_as_they_were(ranks: LocalEngine) -> Iterator[None]:
    """Nothing stored before a test or behind it, the ranks free, and the processes that there were at first."""
    assert ranks._ranks is not None
    pids = ranks._ranks.pids

    def check() -> None:
        assert ranks._ranks is not None
        ranks._ranks.check()
        assert ranks._ranks.takes(ranks._ranks.size), "a test left the ranks taken"
        assert ranks._ranks.pids == pids
        for fidelity in ("default", "exact"):
            assert ranks.store.match(ranks.chain(TOKENS, b"salt", fidelity)) == 0, "a test left KV in the store"

    check()
    yield
    check()


@dataclass(frozen=True)
class Alone:
    """One rank's prefills of TOKENS by fidelity."""

    engine: LocalEngine
    prefills: dict[str, LayerMajorPrefill]


@pytest.fixture(scope="module")
def alone(light_folder: Path, module_engine_on: OpenEngine) -> Alone:
    engine = module_engine_on(light_folder, "alone", device="cpu", sparse=ADAPTIVE)
    requests = {name: prefill_request(TOKENS, fidelity=name, owner=name, holder=name) for name in ("default", "exact")}
    return Alone(engine, {name: run(engine.start_prefill(request)) for name, request in requests.items()})


def same(result: PrefillResult, other: PrefillResult) -> bool:
    """But for the order in which means were added up."""
    cells = [[(part.start, part.end, part.worst) for part in made.segment_recalls] for made in (result, other)]
    means = [[made.density, *(part.mean or 0.0 for part in made.segment_recalls)] for made in (result, other)]
    return (
        cells[0] == cells[1]
        and means[0] == pytest.approx(means[1])
        and (result.head_map, result.num_tokens, result.cached_tokens, result.layers_recomputed)
        == (other.head_map, other.num_tokens, other.cached_tokens, other.layers_recomputed)
        and result.heads == other.heads
        and (result.recall and result.recall.worst) == (other.recall and other.recall.worst)
    )


@pytest.mark.parametrize("fidelity", ["default", "exact"])
def test_kv_is_the_same_to_the_bit_on_any_number_of_ranks(fidelity: Any, ranks: LocalEngine, alone: Alone) -> None:
    prefill = ranks.start_prefill(prefill_request(TOKENS, fidelity=fidelity, holder="document"))
    assert isinstance(prefill._rows, LeadingRows)
    run(prefill)
    assert stored_kv(ranks, TOKENS, fidelity) == stored_kv(alone.engine, TOKENS, fidelity)
    expected = alone.prefills[fidelity]
    assert prefill.last_logits is not None
    assert expected.last_logits is not None
    assert torch.equal(prefill.last_logits, expected.last_logits)
    assert same(prefill.result, expected.result)
    assert (prefill.result.density < 0.9) == (fidelity == "default")
    assert ({"d"} == set("".join(prefill.result.head_map))) == (fidelity == "exact")
    ranks.store.release("document")


def test_what_is_stored_goes_to_all_ranks(ranks: LocalEngine, alone: Alone) -> None:
    run(ranks.start_prefill(prefill_request(TOKENS[:SEGMENT_TOKENS], holder="first")))
    prefill = ranks.start_prefill(prefill_request(TOKENS, holder="whole"))
    assert isinstance(prefill._rows, LeadingRows)
    assert run(prefill).result.cached_tokens == SEGMENT_TOKENS
    assert stored_kv(ranks, TOKENS) == stored_kv(alone.engine, TOKENS)
    ranks.store.release("first")
    ranks.store.release("whole")


def test_what_overtakes_is_rank_0s_alone(ranks: LocalEngine, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    long = ranks.start_prefill(prefill_request(TOKENS, owner="long", holder="long"))
    while long.progress < 0.4:
        assert long.step()
    beside = ranks.start_prefill(prefill_request(TOKENS, owner="beside", holder="beside", fidelity="exact"))
    assert not isinstance(beside._rows, LeadingRows)
    run(beside)
    run(long)
    assert stored_kv(ranks, TOKENS) == stored_kv(alone.engine, TOKENS)
    assert stored_kv(ranks, TOKENS, "exact") == stored_kv(alone.engine, TOKENS, "exact")
    short = ranks.start_prefill(prefill_request(random_tokens(4000, seed=3), owner="short", holder="long"))
    assert not isinstance(short._rows, LeadingRows)
    short.cancel()
    ranks.store.release("long")
    ranks.store.release("beside")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.45, 0.8])
def test_a_cancelled_prefill_leaves_the_ranks_free(
    fraction: float, ranks: LocalEngine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops; the next one is right, which it would not be if ranks were in different places."""
    with monkeypatch.context() as patch:
        patch.setattr("engine.prefill.STEP_S", 0.0)
        cancelled = ranks.start_prefill(prefill_request(TOKENS, owner="cancelled"))
        while cancelled.progress < fraction:
            assert cancelled.step()
        cancelled.cancel()
    prefill = ranks.start_prefill(prefill_request(TOKENS, holder="after", fidelity="exact"))
    assert isinstance(prefill._rows, LeadingRows)
    run(prefill)
    assert stored_kv(ranks, TOKENS, "exact") == stored_kv(alone.engine, TOKENS, "exact")
    ranks.store.release("after")


def test_a_prefill_goes_on_on_another_number_of_ranks(
    ranks: LocalEngine, alone: Alone, light_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of all ranks make one resume point, whoever left it and whoever takes it up."""
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    monkeypatch.setattr("engine.prefill._CHECKPOINT_BYTES_S", 1e15)
    other = engine_on(light_folder, device="cpu", sparse=ADAPTIVE, checkpoint_s=0.0)
    stopped = other.start_prefill(prefill_request(TOKENS))
    while stopped.progress < 0.5:
        assert stopped.step()
    stopped.suspend()
    monkeypatch.setattr(ranks, "store", other.store)
    monkeypatch.setattr(ranks, "_resume", other._resume)
    monkeypatch.setattr(ranks, "_checkpoint_s", 0.0)
    going_on = ranks.start_prefill(prefill_request(TOKENS))
    assert isinstance(going_on._rows, LeadingRows)
    while going_on.progress < 0.8:
        assert going_on.step()
    going_on.suspend()
    result = run(other.start_prefill(prefill_request(TOKENS))).result
    assert result.resumed_from_layer == 2
    assert stored_kv(other, TOKENS) == stored_kv(alone.engine, TOKENS)
