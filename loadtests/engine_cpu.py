"""The engine on the CPU against transformers and against itself, as ratios in one run.

    python -m loadtests.engine_cpu [--only dense4k,32k,64k,warm,memory] [--threads 2] [--cache-dir DIR]

Every comparison alternates its two sides in one process; figures go to loadtests/results/summary.json.
"""

import argparse
import os

# Threads that wait should sleep: spinning ones cost whole cores as soon as anything else runs beside them. Read by
# the OpenMP runtime when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.engine import LocalEngine, load_tokenizer, open_engine
from engine.interfaces import AnswerRequest, Fidelity, KVLayout, PrefillRequest, PrefillResult, SamplingParams
from engine.kv_store import DiskLimits, LocalKVStore
from engine.model_folder import resolve_model
from loadtests.haystack import Haystack, haystack
from loadtests.results import write_entry

SALT = b"benchmark"
NEEDLES = 20
COMMAND = "python -m loadtests.engine_cpu"


@dataclass
class Bench:
    """One engine on a throw-away KV folder."""

    engine: LocalEngine
    tokenizer: Tokenizer
    folder: Path
    needles: int = NEEDLES
    owners: int = 0

    def prefill(self, tokens: np.ndarray, fidelity: Fidelity) -> PrefillResult:
        """From scratch: earlier KV of the same tokens is removed first."""
        self.engine.store.release("bench")
        self.owners += 1
        prefill = self.engine.start_prefill(
            PrefillRequest(tokens=tokens, salt=SALT, owner=f"bench-{self.owners}", holder="bench", fidelity=fidelity)
        )
        while prefill.step():
            pass
        return prefill.result

    def ask(
        self, prefix: np.ndarray, question: np.ndarray, fidelity: Fidelity, max_tokens: int = 12
    ) -> tuple[str, float]:
        """(the greedy answer, seconds to the first token)."""
        request = AnswerRequest(prefix, question, SALT, SamplingParams(max_tokens=max_tokens), fidelity)
        started = time.perf_counter()
        answer = self.engine.start_answer(request)
        delta = answer.step()
        first = time.perf_counter() - started
        text = delta.text
        while delta.finish_reason is None:
            delta = answer.step()
            text += delta.text
        return text, first


def open_bench(model: Path, threads: int) -> Bench:
    folder = Path(tempfile.mkdtemp(prefix="foreword-bench-"))

    def open_store(layout: KVLayout) -> LocalKVStore:
        return LocalKVStore(folder, layout, DiskLimits(cap_bytes=20 << 30, floor_bytes=1 << 30))

    engine = open_engine(model, open_store, resume_dir=folder / "resume", dtype="bfloat16", threads=threads)
    return Bench(engine, load_tokenizer(model), folder)


def dense_4k(bench: Bench, model: Path, rounds: int = 5) -> None:
    """Our dense prefill of 4,096 tokens, KV written to disk, beside transformers' own forward with a cache."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    tokens = haystack(bench.tokenizer, 4096, needles=1).prefix
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    ours, theirs = [], []
    for round_ in range(rounds + 1):
        result = bench.prefill(tokens, "exact")
        started = time.perf_counter()
        with torch.inference_mode():
            oracle(ids, use_cache=True, logits_to_keep=1)
        if round_:  # the first is warm-up
            theirs.append(time.perf_counter() - started)
            ours.append(result.seconds)
    ratios = [theirs_s / ours_s for ours_s, theirs_s in zip(ours, theirs, strict=True)]
    write_entry(
        "cpu_dense_vs_transformers_4k",
        statistics.median(theirs) / statistics.median(ours),
        "ratio",
        better="higher",
        samples=ratios,
        command=f"{COMMAND} --only dense4k",
        ours_s=statistics.median(ours),
        transformers_s=statistics.median(theirs),
    )
    print(f"dense 4K: ours {statistics.median(ours):.2f} s, transformers {statistics.median(theirs):.2f} s")


def speedups(bench: Bench, num_tokens: int) -> None:
    """adaptive and fast beside dense in the same engine; all needles asked of each."""
    size = f"{num_tokens // 1024}k"
    stack = haystack(bench.tokenizer, num_tokens, needles=bench.needles)
    results: dict[Fidelity, PrefillResult] = {}
    texts: dict[Fidelity, list[str]] = {}
    for fidelity in ("exact", "default", "fast"):
        results[fidelity] = bench.prefill(stack.prefix, fidelity)
        texts[fidelity] = [bench.ask(stack.prefix, question, fidelity)[0] for question in stack.questions]
        _print_prefill(size, fidelity, results[fidelity], stack, texts[fidelity])
    dense_s = results["exact"].seconds
    for fidelity, name in (("default", f"cpu_adaptive_speedup_{size}"), ("fast", f"cpu_fast_speedup_{size}")):
        result = results[fidelity]
        recall = result.recall
        write_entry(
            name,
            dense_s / result.seconds,
            "ratio",
            better="higher",
            samples=[dense_s / result.seconds],
            command=f"{COMMAND} --only {size} --needles {bench.needles}",
            dense_s=dense_s,
            sparse_s=result.seconds,
            density=result.density,
            recall=None if recall is None else vars(recall),
            heads=dict(result.heads),
            needles_as_dense=sum(a == b for a, b in zip(texts[fidelity], texts["exact"], strict=True)),
            needles_right=_right(stack, texts[fidelity]),
            needles_right_dense=_right(stack, texts["exact"]),
            needles=bench.needles,
        )


def _right(stack: Haystack, texts: list[str]) -> int:
    return sum(answer in text for answer, text in zip(stack.answers, texts, strict=True))


def _print_prefill(size: str, fidelity: str, result: PrefillResult, stack: Haystack, texts: list[str]) -> None:
    recall = result.recall
    kept = f"recall mean {recall.mean:.3f} p5 {recall.p5:.3f} worst {recall.worst:.3f}" if recall else "dense"
    right = _right(stack, texts)
    print(
        f"{size} {fidelity}: {result.seconds:.1f} s, density {result.density:.3f}, {kept}, needles {right}/{len(texts)}"
    )


def warm(bench: Bench) -> None:
    """Cold TTFT (prefill, then the question) against warm TTFT from disk at 32K."""
    stack = haystack(bench.tokenizer, 32768, needles=NEEDLES)
    cold = bench.prefill(stack.prefix, "default").seconds
    cold += bench.ask(stack.prefix, stack.questions[0], "default", max_tokens=1)[1]
    samples = [bench.ask(stack.prefix, question, "default", max_tokens=1)[1] for question in stack.questions[1:6]]
    value = cold / statistics.median(samples)
    write_entry(
        "cpu_cold_over_warm_disk_32k",
        value,
        "ratio",
        better="higher",
        samples=[cold / sample for sample in samples],
        command=f"{COMMAND} --only warm",
        cold_s=cold,
        warm_s=statistics.median(samples),
    )
    print(f"32K: cold {cold:.1f} s, warm from disk {statistics.median(samples):.2f} s")


def memory(model: Path, threads: int) -> None:
    """Peak resident memory of a 64K prefill in a process of its own, over that of the opened engine."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_measure_memory, args=(model, threads, send))
    child.start()
    opened, peak = receive.recv()
    child.join()
    write_entry(
        "cpu_prefill_64k_peak_over_model_gb",
        (peak - opened) / 1e9,
        "GB",
        better="lower",
        samples=[(peak - opened) / 1e9],
        command=f"{COMMAND} --only memory",
        peak_gb=peak / 1e9,
    )
    print(f"64K prefill: peak {peak / 1e9:.2f} GB, {(peak - opened) / 1e9:.2f} GB over the opened model")


def _measure_memory(model: Path, threads: int, send: "multiprocessing.connection.Connection") -> None:
    bench = open_bench(model, threads)
    try:
        tokens = haystack(bench.tokenizer, 65536, needles=1).prefix
        opened = _peak_bytes()
        bench.prefill(tokens, "fast")
        send.send((opened, _peak_bytes()))
    finally:
        shutil.rmtree(bench.folder)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="dense4k,warm,32k,64k,memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--needles", type=int, default=NEEDLES, help="asked of each prefill at 32k and 64k")
    parser.add_argument("--model", default="default")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/foreword").expanduser())
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    model = resolve_model(arguments.model, cache_dir=arguments.cache_dir)
    bench = open_bench(model, arguments.threads)
    bench.needles = arguments.needles
    try:
        if "dense4k" in parts:
            dense_4k(bench, model)
        if "warm" in parts:
            warm(bench)
        for size in (32, 64):
            if f"{size}k" in parts:
                speedups(bench, size * 1024)
    finally:
        shutil.rmtree(bench.folder)
    if "memory" in parts:
        memory(model, arguments.threads)


if __name__ == "__main__":
    main()
