"""One document over several GPUs of a host against one: `python -m loadtests.engine_parallel [--gpus 2] [--tokens N]`.

The engine's own prefill at Llama-3-8B's shape with planted heads on every rank, as in loadtests.engine_gpu: FP8 linears
and KV, guard on, from the tokens to the last row's logits. First a shorter document is computed both ways and its KV
compared to the bit; then one GPU and all of them take turns.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from engine.chain import Segment
from engine.kv_format import KVFormat
from engine.model import Model
from engine.parallel import RankGroup
from engine.parallel.process import RankParts
from engine.prefill_rows import RowsInHalves
from engine.sparse.settings import SparseSettings
from loadtests import results
from loadtests.engine_gpu import DEVICE, KeptInMemory, PlantedRows, facts, llama_8b, planted, prefill
from loadtests.heads import load_profile

COMMAND = "python -m loadtests.engine_parallel"
_CHECKED_TOKENS = 131_072
# Longer than that, rows of other shapes are chosen from: they are compiled before the clock runs.
_WARM_TOKENS = 294_912
Heads = tuple[torch.Tensor, torch.Tensor]
_FP8 = KVFormat(torch.float8_e4m3fn)


def open_planted(tokens: int, device: torch.device) -> RankParts:
    """A rank on the current GPU; its heads serve documents of up to `tokens`."""
    return _parts(llama_8b(fp8=True), planted(load_profile("llama8b"), tokens))


def _parts(model: Model, heads: Heads) -> RankParts:
    def open_rows(
        chain: Sequence[Segment], first: int, settings: SparseSettings, kv: KVFormat, own: Sequence[Segment]
    ) -> RowsInHalves:
        rows = PlantedRows(model, chain, first, settings, kv, own)
        rows.q, rows.k = heads
        return rows

    return RankParts(model, open_rows, "random weights, planted heads")


def equal_kv(parts: RankParts, ranks: RankGroup, heads: Heads) -> bool:
    """Whether a shorter document has the same KV to the bit on one GPU and on all."""
    stores = [KeptInMemory(_FP8.layout(parts.model.spec), keep=True, tokens=_CHECKED_TOKENS) for _ in range(2)]
    for store, group in zip(stores, (None, ranks), strict=True):
        prefill(parts.model, _CHECKED_TOKENS, heads, store=store, ranks=group)
    one, all_of_them = (store._memory for store in stores)
    return all(np.array_equal(a, b) for a, b in zip(one, all_of_them, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.gpus:
        parser.error(f"needs {arguments.gpus} CUDA devices, there are {torch.cuda.device_count()}")
    tokens = max(arguments.tokens, _WARM_TOKENS)
    ranks = RankGroup(arguments.gpus, partial(open_planted, tokens), DEVICE)
    try:
        with torch.inference_mode():
            heads = planted(load_profile("llama8b"), tokens)
            parts = _parts(llama_8b(fp8=True), heads)
            ranks.join(parts)
            measure(arguments, parts, ranks, heads)
    finally:
        ranks.close()


def measure(arguments: argparse.Namespace, parts: RankParts, ranks: RankGroup, heads: Heads) -> None:
    same = equal_kv(parts, ranks, heads)
    print(f"KV of {_CHECKED_TOKENS} tokens on one GPU and on {arguments.gpus}: {'equal' if same else 'DIFFERENT'}")
    runs: dict[str, list[float]] = {"one": [], "all": []}
    for group in (None, ranks):
        prefill(parts.model, _WARM_TOKENS, heads, ranks=group)
    for _ in range(arguments.repeats):
        for name, group in (("one", None), ("all", ranks)):
            measured = prefill(parts.model, arguments.tokens, heads, ranks=group)
            runs[name].append(measured.seconds)
            print(f"{name}: {measured.seconds:.2f} s {facts(measured, arguments.tokens)}", flush=True)
    speedups = [one / together for one, together in zip(runs["one"], runs["all"], strict=True)]
    print(f"speed-up {', '.join(f'{speedup:.3f}' for speedup in speedups)}")
    if arguments.tokens == 1_048_576 and arguments.gpus == 2:
        results.write_entry(
            "two_gpu_speedup_1m", statistics.median(speedups), "times", better="higher", samples=speedups,
            command=COMMAND, device=f"2 × {torch.cuda.get_device_name()}",
            commit=results.commit(), kv_equal_to_the_bit_at_128k=same,
            one_gpu_s=[round(seconds, 2) for seconds in runs["one"]],
            two_gpus_s=[round(seconds, 2) for seconds in runs["all"]], **facts(measured, arguments.tokens),
        )  # fmt: skip


if __name__ == "__main__":
    main()
