"""Decision 2: a full segment's KV is the same to the bit whatever follows, whatever the steps, and after a resume."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_models import SHAPE, OpenEngine, prefill_request, random_tokens, run, save_model, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.interfaces import PrefillResult
from engine.prefill import LayerMajorPrefill
from engine.sparse.settings import POLICIES, Policy, SparseSettings

# Sparse from the second segment on, with budgets that leave much out.
SETTINGS = {
    policy: SparseSettings(
        policy=policy, crossover_tokens=SEGMENT_TOKENS, a_shape_local=1024, slash_tokens=1024, top_blocks=12, target=0.8
    )
    for policy in POLICIES
}
TOKENS = random_tokens(2 * SEGMENT_TOKENS + 777)
END_OF_FULL = 2 * SEGMENT_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads for each of two heads of keys, as few as show every decision."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("grouped")
    save_model(folder, LlamaConfig(**SHAPE | {"num_attention_heads": 4}, tie_word_embeddings=True))
    return folder


@dataclass(frozen=True)
class Reference:
    """One policy's prefill of TOKENS in one go."""

    policy: Policy
    result: PrefillResult
    kv: list[list[bytes]]


@pytest.fixture(scope="module", params=POLICIES)
def reference(request: pytest.FixtureRequest, folder: Path, module_engine_on: OpenEngine) -> Reference:
    engine = module_engine_on(folder, request.param, sparse=SETTINGS[request.param])
    result = run(engine.start_prefill(prefill_request(TOKENS))).result
    return Reference(request.param, result, stored_kv(engine, TOKENS))


def test_kv_does_not_depend_on_what_follows(reference: Reference, folder: Path, engine_on: OpenEngine) -> None:
    engine = engine_on(folder, sparse=SETTINGS[reference.policy])
    run(engine.start_prefill(prefill_request(TOKENS[:END_OF_FULL])))
    kv = stored_kv(engine, TOKENS[:END_OF_FULL])
    assert kv == [segments[:2] for segments in reference.kv]
    if reference.policy == "dense":
        assert reference.result.density == 1
        assert reference.result.recall is None
    else:
        assert reference.result.density < 0.9
        assert reference.result.recall is not None

    # The same document again goes on from the two segments that are stored.
    result = run(engine.start_prefill(prefill_request(TOKENS, owner="second"))).result
    assert result.cached_tokens == END_OF_FULL
    assert stored_kv(engine, TOKENS) == reference.kv


def test_kv_does_not_depend_on_the_steps(
    reference: Reference, folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(folder, sparse=SETTINGS[reference.policy])
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    assert _count_steps(engine.start_prefill(prefill_request(TOKENS[: SEGMENT_TOKENS * 2]))) > 20
    assert stored_kv(engine, TOKENS[:END_OF_FULL]) == [segments[:2] for segments in reference.kv]


def test_kv_is_the_same_after_a_resume(
    reference: Reference, folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)  # so that it stops in the middle of the second layer
    killed = engine_on(folder, sparse=SETTINGS[reference.policy], checkpoint_s=0.0)
    prefill = killed.start_prefill(prefill_request(TOKENS))
    while prefill.progress < 0.5:
        assert prefill.step()
    prefill.suspend()
    again = engine_on(folder, sparse=SETTINGS[reference.policy], checkpoint_s=0.0)
    result = run(again.start_prefill(prefill_request(TOKENS))).result
    assert result.resumed_from_layer == 1
    assert stored_kv(again, TOKENS) == reference.kv
    assert replace(result, seconds=0, resumed_from_layer=0) == replace(reference.result, seconds=0)


def _count_steps(prefill: LayerMajorPrefill) -> int:
    steps = 1
    while prefill.step():
        steps += 1
    return steps
