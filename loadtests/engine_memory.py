"""A million tokens on smaller cards, four million on one: `python -m loadtests.engine_memory [--only 80gb 24gb 4m]`.

As loadtests.engine_gpu, under a cap on the device memory of this process. The planted queries and keys are the
benchmark's own, so the cap is that much higher while they are there. FP8 KV leaves for pinned host memory and is
answered from there, by the engine's own answers: seconds a token are the median step behind the first two. At 4M tokens
KV is dropped, so only the first token's time is told.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from engine.chain import Segment
from engine.cuda.memory import pinned_memory
from engine.engine import LocalEngine
from engine.interfaces import AnswerRequest, SamplingParams
from engine.model import Model
from engine.spec import ModelSpec, spec_from_config
from kernels import selftest
from loadtests.engine_gpu import DEVICE, LLAMA_8B, KeptInMemory, facts, free, llama_8b, planted, prefill, record
from loadtests.engine_gpu import FP8 as KV
from loadtests.heads import load_profile
from loadtests.kernels import HEAD_DIM

COMMAND = "python -m loadtests.engine_memory"
# Of the cards that a cap stands for: an 80 GB card, and what a 24 GB card leaves to a process.
CAPS = {"80gb": (80e9, "bf16"), "24gb": (22.4 * 2**30, "fp8")}
MILLION = 1_048_576
_TOKENS_ANSWERED = 8


class _Reader:
    tier = "host"

    def __init__(self, memory: "PinnedStore", chain: Sequence[Segment]) -> None:
        self._memory, self._chain = memory, chain

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        at = self._memory.layout.layer_bytes
        whole = self._memory.layers[layer].data
        return [whole[at(segment.start) : at(segment.end)] for segment in self._chain]

    def close(self) -> None:
        pass


class PinnedStore(KeptInMemory):
    """A KV store in page-locked memory, for one document."""

    def __init__(self, tokens: int, spec: ModelSpec) -> None:
        super().__init__(KV.layout(spec), keep=True)
        started = time.monotonic()
        size = self.layout.layer_bytes(tokens)
        with ThreadPoolExecutor(8) as pool:
            self.layers = self._memory = list(pool.map(_touched, [size] * self.layout.num_layers))
        print(f"host memory ready in {time.monotonic() - started:.0f} s", flush=True)

    def match(self, chain: Sequence[Segment]) -> int:
        return len(chain) if self.written_bytes else 0

    def open_reader(self, chain: Sequence[Segment]) -> _Reader:
        return _Reader(self, chain)


def _touched(size: int) -> np.ndarray:
    memory = pinned_memory(size)
    memory[::4096] = 0
    return memory


def capped(name: str, store: PinnedStore) -> None:
    """Prefill and answer under a cap; records prefill_ttft_1m_<cap>_s and decode_1m_<cap>_s."""
    cap, linears = CAPS[name]
    model, heads = llama_8b(fp8=linears == "fp8"), planted(load_profile("llama8b"), MILLION)
    total = torch.cuda.mem_get_info(DEVICE)[1]
    planted_bytes = sum(one.nbytes for one in heads)
    free()
    torch.cuda.set_per_process_memory_fraction((cap + planted_bytes) / total)
    try:
        measured = prefill(model, MILLION, heads, store=store)
        shown = facts(measured, MILLION) | {"peak_gb": round((measured.peak_bytes - planted_bytes) / 1e9, 1)}
        record(
            f"prefill_ttft_1m_{name}_s", [measured.seconds], "s", "lower", command=COMMAND,
            cap_gb=round(cap / 1e9, 1), linears=linears, kv="host", **shown,
        )  # fmt: skip
        del heads
        free()
        torch.cuda.set_per_process_memory_fraction(cap / total)
        first, steps, tier, peak = answered(model, store)
        record(
            f"decode_1m_{name}_s", steps, "s/token", "lower", command=COMMAND,
            cap_gb=round(cap / 1e9, 1), linears=linears, kv=tier, first_token_s=round(first, 3),
            peak_gb=round(peak / 1e9, 1),
        )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def answered(model: Model, store: PinnedStore) -> tuple[float, list[float], str, int]:
    """(seconds to the first token, seconds of each further one, the tier, peak bytes) of one answer at 1M tokens."""
    ids = np.random.default_rng(1).integers(0, model.spec.vocabulary, MILLION).astype(np.uint32)
    engine = LocalEngine(model, lambda ids: "", store, kv=KV)  # type: ignore[arg-type]
    request = AnswerRequest(
        prefix=ids, question=ids[:32], salt=b"benchmark", fidelity="default",
        sampling=SamplingParams(max_tokens=_TOKENS_ANSWERED, temperature=0.0),
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    answer = engine.start_answer(request)
    times = [started]
    while len(times) <= _TOKENS_ANSWERED:
        delta = answer.step()
        times.append(time.perf_counter())
        if delta.finish_reason is not None:
            break
    steps = [later - earlier for earlier, later in pairwise(times)]
    tier = answer.kv_tier
    answer.close()
    return steps[0], steps[2:], tier, torch.cuda.max_memory_allocated()


def four_million() -> None:
    """Records prefill_ttft_4m_fp8_s and time_a_token_growth_128k_4m, both measured here."""
    model, profile, times = llama_8b(fp8=True), load_profile("llama8b"), {}
    for tokens in (131_072, 4 * MILLION):
        heads = planted(profile, tokens)
        if tokens < MILLION:
            prefill(model, tokens, heads)
        measured = prefill(model, tokens, heads)
        times[tokens] = measured.seconds / tokens
        if tokens > MILLION:
            record(
                "prefill_ttft_4m_fp8_s", [measured.seconds], "s", "lower", command=COMMAND, kv="dropped",
                heads="background as at 1M", **facts(measured, tokens),
            )  # fmt: skip
        del heads
        free()
    growth = times[4 * MILLION] / times[131_072]
    record("time_a_token_growth_128k_4m", [growth], "times", "lower", command=COMMAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CAPS, "4m"], default=[*CAPS, "4m"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    selftest.run(DEVICE, head_dims=(HEAD_DIM,))
    with torch.inference_mode():
        if caps := [name for name in arguments.only if name in CAPS]:
            store = PinnedStore(MILLION, spec_from_config(LLAMA_8B))
            for name in caps:
                capped(name, store)
                free()
        if "4m" in arguments.only:
            four_million()


if __name__ == "__main__":
    main()
