"""Answers whose KV is computed, loaded, or both at once: the same bits and words; and what is done about mishaps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import SEGMENT_TOKENS
from engine.engine import LocalEngine
from engine.errors import KVMissing, OutOfMemory
from engine.interfaces import AnswerRequest, SamplingParams
from engine.kv_plan import KVWay
from engine.kv_source import KVSource
from engine.sparse.settings import SparseSettings, for_fidelity

TOKENS = random_tokens(3 * SEGMENT_TOKENS + 777)
ADAPTIVE = SparseSettings(policy="adaptive", crossover_tokens=SEGMENT_TOKENS, target=0.8)


def ask(engine: LocalEngine) -> tuple[list[int], int]:
    """The first tokens, and how many of the prefix were computed for them."""
    request = AnswerRequest(TOKENS, random_tokens(20, seed=9), b"salt", SamplingParams(max_tokens=5))
    answer = engine.start_answer(request)
    tokens: list[int] = []
    while True:
        delta = answer.step()
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            return tokens, answer.computed_tokens


def source_of(engine: LocalEngine, **changes: Any) -> KVSource:
    settings = for_fidelity(engine._sparse, "default")
    parts = {
        "store": engine.store,
        "planner": engine._planner,
        "tokens": TOKENS,
        "settings": settings,
        "open_rows": lambda chain: engine._open_rows(chain, settings=settings),
        "device": torch.device("cpu"),
    }
    return KVSource(**parts | changes)


def read_all(source: KVSource, engine: LocalEngine) -> list[list[bytes]]:
    reader = source.open_reader(engine.chain(TOKENS, b"salt", "default"))
    try:
        with torch.inference_mode():
            return [[bytes(part) for part in reader.read_layer(layer)] for layer in range(3)]
    finally:
        reader.close()


def prefilled(engine_on: OpenEngine, folder: Any, **options: Any) -> LocalEngine:
    """An engine in whose store TOKENS are: prefilled now, unless that store has them already."""
    engine = engine_on(folder, options.get("kv_dtype", "kv"), sparse=ADAPTIVE, **options)
    run(engine.start_prefill(prefill_request(TOKENS)))
    return engine


@pytest.mark.parametrize("kv_dtype", ["float32", "float8", "int8"])
@pytest.mark.parametrize(
    ("way", "least", "most"), [("both", 1, len(TOKENS) - 1), ("compute", len(TOKENS), len(TOKENS))]
)
def test_kv_is_the_same_to_the_bit(
    way: KVWay, least: int, most: int, kv_dtype: str, llama_folder: Any, module_engine_on: OpenEngine
) -> None:
    engine = prefilled(module_engine_on, llama_folder, kv_way=way, kv_dtype=kv_dtype)
    source = source_of(engine)
    assert read_all(source, engine) == stored_kv(engine, TOKENS)
    assert least <= source.computed_tokens <= most


def test_answers_say_the_same_whichever_way(llama_folder: Any, module_engine_on: OpenEngine) -> None:
    loading = prefilled(module_engine_on, llama_folder, kv_way="load")
    words, computed = ask(loading)
    assert computed == 0
    for way in ("both", "compute"):
        engine = module_engine_on(llama_folder, sparse=ADAPTIVE, kv_way=way)  # over the same store
        assert engine.cached_tokens(TOKENS, salt=b"salt", fidelity="default") == len(TOKENS)
        again, computed = ask(engine)
        assert again == words
        assert computed > 0


def test_a_slow_tier_is_helped_and_a_fast_one_is_not(llama_folder: Any, module_engine_on: OpenEngine) -> None:
    engine = prefilled(module_engine_on, llama_folder)
    words, computed = ask(engine)
    assert computed == 0, "nothing is known of the disk yet"
    planner = engine._planner
    planner._slowness = 1e-4  # this machine computes slower than the planner believes
    chain, size = engine.chain(TOKENS, b"salt", "default"), planner._layout.layer_bytes(len(TOKENS))
    believed_s = planner._slowness * planner._work_s(chain, engine._sparse)
    for _ in range(30):
        planner.loaded("disk", 3 * size, 3 * believed_s)
    assert 0 < planner.plan(chain, engine._sparse, "disk").segments < len(chain)
    source = source_of(engine)
    kv = read_all(source, engine)
    assert kv == stored_kv(engine, TOKENS)
    assert source.computed_tokens == 0, "the first layer showed that the disk is not so slow"
    assert ask(engine)[0] == words


@dataclass
class _SlowReader:
    """Another reader, each layer of which takes so long."""

    reader: Any
    layer_s: float
    reads: list[int]

    @property
    def tier(self) -> Any:
        return self.reader.tier

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        self.reads.append(layer)
        time.sleep(self.layer_s)
        return self.reader.read_layer(layer)

    def close(self) -> None:
        self.reader.close()


@dataclass
class _SlowStore:
    store: Any
    layer_s: float
    reads: list[int] = field(default_factory=list)

    @property
    def layout(self) -> Any:
        return self.store.layout

    def open_reader(self, chain: Any) -> _SlowReader:
        return _SlowReader(self.store.open_reader(chain), self.layer_s * len(chain), self.reads)


def test_loading_goes_on_while_the_front_is_computed(llama_folder: Any, module_engine_on: OpenEngine) -> None:
    engine = prefilled(module_engine_on, llama_folder, kv_way="both")
    store = _SlowStore(engine.store, layer_s=0.4)
    inside: list[tuple[int, bool]] = []
    source = source_of(engine, store=store)
    opened = source._open_rows

    def open_rows(chain: Any) -> Any:
        rows = opened(chain)
        layer_of = rows.layer

        def layer(index: int, keep: Any) -> Any:
            for piece in layer_of(index, keep):
                inside.append((index, index in store.reads))
                yield piece

        rows.layer = layer
        return rows

    source._open_rows = open_rows
    assert read_all(source, engine) == stored_kv(engine, TOKENS)
    assert source.computed_tokens == 2 * SEGMENT_TOKENS
    assert {index for index, loading in inside if loading} == {0, 1, 2}, "each layer is asked for before it is computed"


def test_too_little_memory_means_loading(llama_folder: Any, module_engine_on: OpenEngine) -> None:
    engine = prefilled(module_engine_on, llama_folder, kv_way="both")

    def no_rows(chain: Any) -> Any:
        raise OutOfMemory(2, 1)

    source = source_of(engine, open_rows=no_rows)
    assert read_all(source, engine) == stored_kv(engine, TOKENS)
    assert source.computed_tokens == 0


def test_memory_that_runs_out_on_the_way_means_loading_from_there(
    llama_folder: Any, module_engine_on: OpenEngine
) -> None:
    engine = prefilled(module_engine_on, llama_folder, kv_way="both")
    source = source_of(engine)
    opened = source._open_rows

    def open_rows(chain: Any) -> Any:
        rows = opened(chain)
        layer_of = rows.layer

        def layer(index: int, keep: Any) -> Any:
            if index == 1:
                raise OutOfMemory(2, 1)
            yield from layer_of(index, keep)

        rows.layer = layer
        return rows

    source._open_rows = open_rows
    assert read_all(source, engine) == stored_kv(engine, TOKENS)
    assert source.computed_tokens == 0


def test_damage_behind_the_cut_is_a_miss_as_ever(llama_folder: Any, engine_on: OpenEngine) -> None:
    engine = prefilled(engine_on, llama_folder, kv_way="both")
    last = engine.chain(TOKENS, b"salt", "default")[-1]
    for file in engine.store.catalog.blocks.folder.glob(f"{last.key}*"):  # type: ignore[attr-defined]
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.write_bytes(data)
    with pytest.raises(KVMissing):
        ask(engine)
    assert engine._prefixes == {}


def test_readers_and_rows_are_let_go_of(llama_folder: Any, engine_on: OpenEngine) -> None:
    engine = prefilled(engine_on, llama_folder, kv_way="both")
    reader = source_of(engine).open_reader(engine.chain(TOKENS, b"salt", "default"))
    with torch.inference_mode():
        reader.read_layer(0)
    reader.close()
    reader.close()
    assert engine.store.release("document") > 0, "no lease is left on it"
    assert engine.cached_tokens(TOKENS, salt=b"salt", fidelity="default") == 0
