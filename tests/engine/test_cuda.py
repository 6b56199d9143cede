"""The engine on a GPU: equal KV whatever the runs, answers that follow from it, quantised forms near the exact one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.cuda.rows import CudaRows
from engine.engine import LocalEngine
from engine.interfaces import AnswerRequest, SamplingParams
from engine.sparse.settings import SparseSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPARSE = SparseSettings(
    crossover_tokens=SEGMENT_TOKENS,
    key_block=128,
    local_blocks=2,
    sampled_rows=2,
    row_block=128,
    guard_rows=8,
    corrections=1,
    target=0.8,
)
TOKENS = random_tokens(4 * SEGMENT_TOKENS + 777)
FULL = 4 * SEGMENT_TOKENS


def open_cuda(engine_on: OpenEngine, folder: Path, name: str = "kv", **options: Any) -> LocalEngine:
    return engine_on(folder, name, device="cuda", dtype="bfloat16", **options)


def prefilled(engine: LocalEngine, tokens: np.ndarray = TOKENS, **fields: Any) -> torch.Tensor:
    logits = run(engine.start_prefill(prefill_request(tokens, **fields))).last_logits
    assert logits is not None
    return logits


def likeness(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def answer(
    engine: LocalEngine, prefix: np.ndarray, question: np.ndarray, count: int = 12, **fields: Any
) -> tuple[list[int], str]:
    made = engine.start_answer(
        AnswerRequest(
            prefix=prefix, question=question, salt=b"salt", sampling=SamplingParams(max_tokens=count), **fields
        )
    )
    tokens: list[int] = []
    while True:
        delta = made.step()
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            return tokens, made.kv_tier


def test_dense_logits_equal_the_cpu_engines(llama_folder: Path, engine_on: OpenEngine) -> None:
    tokens = TOKENS[:3001]
    reference = prefilled(engine_on(llama_folder, "cpu", device="cpu"), tokens, fidelity="exact")
    assert likeness(prefilled(open_cuda(engine_on, llama_folder), tokens, fidelity="exact"), reference) > 0.999


def test_quantised_linears_and_kv_stay_near(llama_folder: Path, engine_on: OpenEngine) -> None:
    tokens = TOKENS[:3001]
    reference = prefilled(open_cuda(engine_on, llama_folder), tokens, fidelity="exact")
    for name, options in {
        "kv8": {"kv_dtype": "float8"},
        "int8": {"kv_dtype": "int8"},
        "w8": {"linears": "float8"},
    }.items():
        got = prefilled(open_cuda(engine_on, llama_folder, name, **options), tokens, fidelity="exact")
        assert likeness(got, reference) > 0.98, name


@pytest.mark.parametrize("policy", ["adaptive", "vertical_slash", "dense"])
def test_kv_depends_neither_on_what_follows_nor_on_runs(
    policy: Any, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    options = {"sparse": replace(SPARSE, policy=policy), "kv_dtype": "float8", "linears": "float8"}
    whole = open_cuda(engine_on, llama_folder, "whole", **options)
    result = run(whole.start_prefill(prefill_request(TOKENS))).result
    kv = stored_kv(whole, TOKENS)
    if policy == "dense":
        assert result.density == 1
    else:
        assert result.density < 0.95
        assert result.recall is not None
    ends = open_cuda(engine_on, llama_folder, "ends", **options)
    run(ends.start_prefill(prefill_request(TOKENS[:FULL])))
    assert stored_kv(ends, TOKENS[:FULL]) == [segments[:4] for segments in kv]
    # What is stored is read again, and the rest is as before.
    assert run(ends.start_prefill(prefill_request(TOKENS, owner="more"))).result.cached_tokens == FULL
    assert stored_kv(ends, TOKENS) == kv
    monkeypatch.setattr(CudaRows.__init__, "__kwdefaults__", {"run_segments": 1})
    short = open_cuda(engine_on, llama_folder, "short", **options)
    run(short.start_prefill(prefill_request(TOKENS)))
    assert stored_kv(short, TOKENS) == kv


def test_kv_is_the_same_after_a_resume(
    llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    monkeypatch.setattr("engine.prefill._CHECKPOINT_BYTES_S", 1e15)
    whole = open_cuda(engine_on, llama_folder, "whole", sparse=SPARSE)
    run(whole.start_prefill(prefill_request(TOKENS)))
    killed = open_cuda(engine_on, llama_folder, sparse=SPARSE, checkpoint_s=0.0)
    prefill = killed.start_prefill(prefill_request(TOKENS))
    while prefill.progress < 0.7:
        assert prefill.step()
    prefill.suspend()
    again = open_cuda(engine_on, llama_folder, sparse=SPARSE, checkpoint_s=0.0)
    assert run(again.start_prefill(prefill_request(TOKENS))).result.resumed_from_layer >= 1
    assert stored_kv(again, TOKENS) == stored_kv(whole, TOKENS)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8", "int8"])
def test_answers_follow_from_the_prefix_wherever_its_kv_is(
    kv_dtype: str, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_cuda(engine_on, llama_folder, kv_dtype=kv_dtype)
    prefix, question = TOKENS[:5000], TOKENS[5000:5040]
    run(engine.start_prefill(prefill_request(prefix, fidelity="exact")))
    first, tier = answer(engine, prefix, question, fidelity="exact")
    assert tier == "warm_disk"
    again, tier = answer(engine, prefix, question, fidelity="exact")
    assert (again, tier) == (first, "warm_device")
    whole = prefilled(engine, np.concatenate((prefix, question)), fidelity="exact", owner="whole")
    assert first[0] == int(whole.argmax())

    # Without a graph, and streamed from the host.
    engine._device_kv.drop_unstored()
    for key in list(engine._device_kv._idle):
        engine._device_kv._idle.pop(key).close()
    monkeypatch.setattr("engine.device_kv.DeviceKV.make_room", lambda self, size: False)
    streamed, tier = answer(engine, prefix, question, fidelity="exact")
    assert tier in ("warm_disk", "warm_host")
    assert streamed[:3] == first[:3]


def test_a_deleted_documents_kv_leaves_the_device(llama_folder: Path, engine_on: OpenEngine) -> None:
    engine = open_cuda(engine_on, llama_folder)
    prefix, question = TOKENS[:5000], TOKENS[5000:5010]
    run(engine.start_prefill(prefill_request(prefix)))
    answer(engine, prefix, question, count=2)
    assert len(engine._device_kv._idle) == 1
    engine.store.release("document")
    answer(engine, TOKENS[:0], question, count=1)
    answer(engine, TOKENS[:0], question, count=1)
    run(engine.start_prefill(prefill_request(TOKENS[:100], owner="other")))
    assert len(engine._device_kv._idle) == 0


def test_the_future_leaves_no_trace(llama_folder: Path, engine_on: OpenEngine) -> None:
    """Other tokens behind a segment leave the segment's KV as it is, to the bit."""
    other = TOKENS.copy()
    other[FULL:] = random_tokens(len(TOKENS) - FULL, seed=9)
    one, two = (open_cuda(engine_on, llama_folder, name, sparse=SPARSE) for name in ("one", "two"))
    run(one.start_prefill(prefill_request(TOKENS)))
    run(two.start_prefill(prefill_request(other)))
    assert [part[:4] for part in stored_kv(one, TOKENS)] == [part[:4] for part in stored_kv(two, other)]
