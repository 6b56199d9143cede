"""TTFT of the GPU engine at Llama-3-8B's shape: `python -m loadtests.engine_gpu [--only PART …]`.

Weights are random, of the real shapes; queries and keys of every layer are replaced by heads with realistic structure
(loadtests/heads.py), values stay the model's. A run is the engine's own prefill from its tokens to the last row's
logits, guard on, KV leaving for host memory in FP8; heads are made before the clock starts. The dense side is what
DESIGN's Decision 10 says: 32 times one dense FlashAttention-3 layer and the bf16 linears, by themselves.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch

from engine.chain import Segment, segment_chain
from engine.cuda.rows import CudaRows
from engine.interfaces import Fidelity, KVLayout, PrefillRequest, PrefillResult
from engine.kv_format import KVFormat
from engine.model import LayerWeights, Model, fp8_layer
from engine.parallel import RankGroup
from engine.plan import plan
from engine.prefill import LayerMajorPrefill
from engine.prefill_rows import PrefillRows
from engine.rope import frequencies
from engine.sparse.settings import SparseSettings, default_settings, for_fidelity
from engine.spec import ModelSpec, spec_from_config
from engine.work import MachineRates, PrefillWork, gpu_rates
from kernels import dispatch, selftest
from kernels.dense_attention import dense_attention
from loadtests import results
from loadtests.heads import Group, Profile, generate, load_profile
from loadtests.kernels import HEAD_DIM, HEADS, KV_HEADS, timed

COMMAND = "python -m loadtests.engine_gpu"
DEVICE = torch.device("cuda")
LENGTHS = {"8k": 8192, "32k": 32_768, "128k": 131_072, "512k": 524_288, "1m": 1_048_576}
FP8 = KVFormat(torch.float8_e4m3fn)
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": 128_256,
    "max_position_embeddings": 1 << 23, "rms_norm_eps": 1e-5, "rope_theta": 3.58e9, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 128_001,
}  # fmt: skip


# Shapes that the rates of engine.work were not fitted to, nor to these lengths.
OTHER_SHAPES = {
    "qwen2.5-7b": {
        **LLAMA_8B, "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "rms_norm_eps": 1e-6,
    },
    "llama-3.2-3b": {
        **LLAMA_8B, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
OTHER_LENGTHS = (98_304, 196_608)


def llama_8b(*, fp8: bool) -> Model:
    """Random weights of Llama-3-8B's shapes on the device."""
    return random_model(LLAMA_8B, fp8=fp8)


def random_model(config: dict[str, Any], *, fp8: bool, device: torch.device = DEVICE) -> Model:
    """Random weights of the shapes of a transformers config, of a family without norms of q and k."""
    spec = spec_from_config(config)
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16).mul_(0.02)

    ones = torch.ones(spec.hidden, dtype=torch.bfloat16, device=device)
    qkv_channels = (spec.heads + 2 * spec.kv_heads) * spec.head_dim

    def layer() -> LayerWeights:
        made = LayerWeights(
            input_norm=ones,
            qkv=normal(qkv_channels, spec.hidden),
            qkv_bias=normal(qkv_channels) if spec.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            out=normal(spec.hidden, spec.heads * spec.head_dim),
            out_bias=None,
            mlp_norm=ones,
            gate_up=normal(2 * spec.intermediate, spec.hidden),
            gate_up_bias=None,
            down=normal(spec.hidden, spec.intermediate),
            down_bias=None,
        )
        return fp8_layer(made) if fp8 else made

    layers = tuple(layer() for _ in range(spec.num_layers))
    inverse, factor = frequencies(spec.rope, spec.rotary_dim, device)
    name = "float8_e4m3fn" if fp8 else ""
    embedding = normal(spec.vocabulary, spec.hidden)
    head = embedding if spec.tied_embeddings else normal(spec.vocabulary, spec.hidden)
    return Model(spec, embedding, layers, ones, head, inverse, factor, False, "random", name)


class KeptInMemory:
    """A KV store in this process's memory, or one that drops what it gets. Serves one benchmark, no reader."""

    def __init__(self, layout: KVLayout, *, keep: bool, tokens: int = 0) -> None:
        self.layout, self._keep = layout, keep
        size = layout.layer_bytes(tokens) if keep else 0
        # Touched now, so that no page fault falls into a run.
        self._memory = [np.ones(size, np.uint8) for _ in range(layout.num_layers)]
        self.written_bytes = 0

    def match(self, chain: Sequence[Segment]) -> int:
        return 0

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> "KeptInMemory":
        self._chain = chain[first:]
        return self

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        pass

    def write_layer(self, layer: int, segment: int, data: memoryview) -> None:
        self.written_bytes += data.nbytes
        if self._keep:
            first = self.layout.layer_bytes(self._chain[segment].start)
            np.copyto(self._memory[layer][first : first + data.nbytes], np.frombuffer(data, np.uint8))

    def groups_done(self) -> int:
        return 0

    def flush(self) -> None:
        pass

    commit = suspend = abort = flush


class PlantedRows(CudaRows):
    """Rows whose queries and keys are the planted ones, the same in every layer; all else is computed as usual."""

    q: torch.Tensor
    k: torch.Tensor

    def _keep_values(self, layer: int, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        heads = slice(self._model.spec.heads, self._model.spec.heads + self._model.spec.kv_heads)
        own[: segment.num_tokens, heads] = self.k[:, segment.start : segment.end].transpose(0, 1)
        return super()._keep_values(layer, segment, own)

    def _attend(self, layer: int, run: list[Segment], q: torch.Tensor, out: torch.Tensor) -> None:
        super()._attend(layer, run, self.q[run[0].start : run[-1].end], out)


class PlantedPrefill(LayerMajorPrefill):
    heads: tuple[torch.Tensor, torch.Tensor] | None = None

    def _open_rows(self) -> PrefillRows:
        if self._ranks is not None:  # they plant their own
            return super()._open_rows()
        kind = CudaRows if self.heads is None else PlantedRows
        rows = kind(self._model, self._chain, self._first, self._settings, self._kv_format)
        if isinstance(rows, PlantedRows) and self.heads is not None:
            rows.q, rows.k = self.heads
        return rows


@dataclass
class Measured:
    seconds: float
    result: PrefillResult
    peak_bytes: int


def prefill(
    model: Model,
    tokens: int,
    heads: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    fidelity: Fidelity = "default",
    settings: SparseSettings | None = None,
    store: KeptInMemory | None = None,
    kv: KVFormat = FP8,
    ranks: RankGroup | None = None,
) -> Measured:
    """One prefill; seconds to the last row's logits."""
    settings = for_fidelity(settings or default_settings("cuda"), fidelity)
    store = store or KeptInMemory(kv.layout(model.spec), keep=False)
    ids = np.random.default_rng(1).integers(0, model.spec.vocabulary, tokens).astype(np.uint32)
    chain = segment_chain(ids, salt=b"benchmark", digest="benchmark")
    request = PrefillRequest(tokens=ids, salt=b"benchmark", owner="benchmark", holder="benchmark", fidelity=fidelity)
    torch.cuda.reset_peak_memory_stats()
    PlantedPrefill.heads = heads
    torch.cuda.synchronize()
    made = PlantedPrefill(
        model, store, chain, request, settings, resume=None, checkpoint_s=1e9,  # type: ignore[arg-type]
        work=PrefillWork(model.spec, MachineRates()), kv=kv, ranks=ranks,
    )  # fmt: skip
    while made.step():
        pass
    assert made.seconds_to_logits is not None
    return Measured(made.seconds_to_logits, made.result, torch.cuda.max_memory_allocated())


def planted(profile: Profile, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return generate(profile, tokens, device=DEVICE)


def wider(profile: Profile, factor: int) -> Profile:
    """The same profile with its mass on `factor` times the keys."""
    layers = tuple(
        tuple(replace(group, keys=None if group.keys is None else group.keys * factor) for group in layer)
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def for_shape(profile: Profile, spec: ModelSpec) -> Profile:
    """The profile for a model of other heads: of each layer the groups whose mean number of keys comes nearest to that
    of all. Raises ValueError where the model has more KV heads than the profile, or another head size."""
    if spec.kv_heads > profile.kv_heads or spec.head_dim != profile.head_dim:
        most = f"at most {profile.kv_heads} of {profile.head_dim}"
        raise ValueError(f"got {spec.kv_heads} KV heads of {spec.head_dim}, expected {most}")

    def mean_keys(groups: tuple[Group, ...]) -> float:
        return statistics.mean(group.keys or 0 for group in groups)

    def chosen(layer: tuple[Group, ...]) -> tuple[Group, ...]:
        wanted = mean_keys(layer)
        return min(combinations(layer, spec.kv_heads), key=lambda groups: abs(mean_keys(groups) - wanted))

    layers = tuple(chosen(layer) for layer in profile.layers)
    return replace(profile, kv_heads=spec.kv_heads, group=spec.group, layers=layers)


def predicted_s(spec: ModelSpec, tokens: int, *, fp8: bool) -> float:
    """What `foreword plan` says of one H200."""
    rates = gpu_rates("float8" if fp8 else "auto")
    return plan(spec, tokens, sparse=default_settings("cuda"), rates=rates).prefill_s


def record(
    name: str,
    samples: list[float],
    unit: str,
    better: Literal["lower", "higher"],
    *,
    command: str = COMMAND,
    **details: Any,
) -> None:
    value = statistics.median(samples)
    print(f"{name:34s} {value:9.4g} {unit:8s} {details}", flush=True)
    results.write_entry(
        name, value, unit, better=better, samples=samples, command=command, device=torch.cuda.get_device_name(),
        commit=results.commit(), **details,
    )  # fmt: skip


def facts(measured: Measured, tokens: int) -> dict[str, Any]:
    """What stands beside every TTFT."""
    result, recall = measured.result, measured.result.recall
    groups = sum(result.heads.values()) or 1
    shown: dict[str, Any] = {
        "tokens": tokens,
        "density": round(result.density, 4),
        "mean_keys": round(result.density * (tokens + 1) / 2),
        "dense_group_share": round(result.heads.get("dense", 0) / groups, 3),
        "peak_gb": round(measured.peak_bytes / 1e9, 1),
    }
    if recall is not None:
        shown |= {
            "recall_mean": round(recall.mean, 4),
            "recall_p5": round(recall.p5, 4),
            "recall_worst": round(recall.worst, 4),
            "below_target": recall.below_target,
        }
    return shown


def dense_seconds(spec: ModelSpec, tokens: int) -> tuple[float, float]:
    """(32 dense FlashAttention-3 layers, all bf16 linears) of a document, in seconds."""
    random = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, generator=random)

    heads = normal(tokens, HEADS, HEAD_DIM), normal(KV_HEADS, tokens, HEAD_DIM), normal(KV_HEADS, tokens, HEAD_DIM)
    repeats, warm_up = (1, 1) if tokens > 262_144 else (5, 2)
    attention = statistics.median(timed(lambda: dense_attention(*heads), repeats=repeats, warm_up=warm_up))
    rows = min(tokens, 32_768)
    x, inner, attended = normal(rows, spec.hidden), normal(rows, spec.intermediate), normal(rows, HEADS * HEAD_DIM)
    weights = [
        normal((HEADS + 2 * KV_HEADS) * HEAD_DIM, spec.hidden), normal(spec.hidden, HEADS * HEAD_DIM),
        normal(2 * spec.intermediate, spec.hidden), normal(spec.hidden, spec.intermediate),
    ]  # fmt: skip
    inputs = [x, attended, x, inner]

    def linears() -> None:
        for one, weight in zip(inputs, weights, strict=True):
            torch.nn.functional.linear(one, weight)

    linear = statistics.median(timed(linears, repeats=5)) * tokens / rows
    return attention * spec.num_layers / 1e3, linear * spec.num_layers / 1e3


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def lengths(names: Sequence[str]) -> None:
    """TTFT and speed-up by length, in FP8 and in bf16 linears."""
    profile = load_profile("llama8b")
    dense: dict[str, tuple[float, float]] = {}
    spec = spec_from_config(LLAMA_8B)
    for name in names:
        dense[name] = dense_seconds(spec, LENGTHS[name])
        print(f"dense {name}: attention {dense[name][0]:.2f} s, linears {dense[name][1]:.2f} s", flush=True)
        free()
    for kind in ("fp8", "bf16"):
        model = llama_8b(fp8=kind == "fp8")
        for name in names:
            tokens = LENGTHS[name]
            heads = planted(profile, tokens)
            store = KeptInMemory(FP8.layout(model.spec), keep=tokens <= 524_288, tokens=tokens)
            repeats = 1 if tokens > 262_144 else 3
            if tokens <= 524_288:
                prefill(model, tokens, heads)
            runs = [prefill(model, tokens, heads, store=store) for _ in range(repeats)]
            runs.sort(key=lambda run: run.seconds)
            middle, seconds = runs[len(runs) // 2], [run.seconds for run in runs]
            kept = "host" if tokens <= 524_288 else "passed on and dropped"
            record(f"prefill_ttft_{name}_{kind}_s", seconds, "s", "lower", kv=kept, **facts(middle, tokens))
            whole = sum(dense[name])
            record(
                f"prefill_speedup_{name}_{kind}", [whole / second for second in seconds], "times", "higher",
                dense_s=round(whole, 3), dense_attention_s=round(dense[name][0], 3),
            )  # fmt: skip
            del heads, store
            free()
        del model
        free()


def short() -> None:
    """Adaptive against the same engine's dense, 1K to 32K, in turns."""
    model, profile, worst = llama_8b(fp8=False), load_profile("llama8b"), []
    for tokens in (1024, 2048, 4096, 8192, 16_384, 32_768):
        heads = planted(profile, tokens)
        for fidelity in ("default", "exact"):
            prefill(model, tokens, heads, fidelity=fidelity)  # type: ignore[arg-type]
        pairs = [
            (prefill(model, tokens, heads).seconds, prefill(model, tokens, heads, fidelity="exact").seconds)
            for _ in range(7)
        ]
        ratio = statistics.median(sparse for sparse, _ in pairs) / statistics.median(dense for _, dense in pairs)
        print(f"  {tokens}: adaptive / dense {ratio:.3f}, dense {min(d for _, d in pairs):.3f} s", flush=True)
        worst.append((ratio - 1, tokens))
    record("slowdown_max_1k_32k", [max(worst)[0]], "share", "lower", tokens=max(worst)[1], against="exact, same engine")


def density() -> None:
    """TTFT with the mass on twice and four times the keys, and with the probe's density."""
    model, tokens = llama_8b(fp8=True), LENGTHS["128k"]
    for label, profile in (
        ("2x", wider(load_profile("llama8b"), 2)),
        ("4x", wider(load_profile("llama8b"), 4)),
        ("probe", load_profile("probe")),
    ):
        heads = planted(profile, tokens)
        prefill(model, tokens, heads)
        runs = [prefill(model, tokens, heads) for _ in range(2)]
        seconds = [run.seconds for run in runs]
        record(f"prefill_ttft_128k_fp8_{label}_s", seconds, "s", "lower", **facts(runs[0], tokens))
        del heads
        free()


def profiled(tokens: int = 131_072) -> None:
    """Where the device's time goes in one prefill, by kernel; nothing recorded."""
    model, heads = llama_8b(fp8=True), planted(load_profile("llama8b"), tokens)
    prefill(model, tokens, heads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        measured = prefill(model, tokens, heads)
    print(f"{tokens} tokens in {measured.seconds:.2f} s")
    print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60))


def planned() -> None:
    """How far `foreword plan` is from TTFTs that its rates were not fitted to."""
    worst, cells = 0.0, []
    for shape, config in OTHER_SHAPES.items():
        for fp8 in (True, False):
            model = random_model(config, fp8=fp8)
            for tokens in OTHER_LENGTHS:
                heads = planted(for_shape(load_profile("llama8b"), model.spec), tokens)
                prefill(model, tokens, heads)
                measured = min((prefill(model, tokens, heads) for _ in range(2)), key=lambda run: run.seconds)
                predicted = predicted_s(model.spec, tokens, fp8=fp8)
                error = predicted / measured.seconds - 1
                worst = max(worst, abs(error))
                cells.append(
                    {
                        "shape": shape,
                        "linears": "fp8" if fp8 else "bf16",
                        "ttft_s": round(measured.seconds, 3),
                        "predicted_s": round(predicted, 3),
                        "error": round(error, 4),
                        **facts(measured, tokens),
                    }
                )
                print(f"  {cells[-1]}", flush=True)
                del heads
                free()
            del model
            free()
    record("plan_error_share", [worst], "share", "lower", cells=cells)


PARTS: dict[str, Callable[[], None]] = {
    "short": short,
    "density": density,
    "plan": planned,
    "profile": profiled,
}


def _parts(names: Sequence[str]) -> Iterator[Callable[[], None]]:
    wanted = [name for name in names if name in LENGTHS]
    if wanted:
        yield lambda: lengths(wanted)
    for name in names:
        if name in PARTS:
            yield PARTS[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*LENGTHS, *PARTS]
    parser.add_argument("--only", nargs="+", choices=known, default=[name for name in known if name != "profile"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    for checked in selftest.run(DEVICE, head_dims=(HEAD_DIM,)):
        print(f"{checked.op:24s} {checked.path:10s} {checked.failed or ''}")
    print({op: path for op, (path, _) in dispatch.paths().items()})
    started = time.monotonic()
    with torch.inference_mode():
        for part in _parts(arguments.only):
            part()
            free()
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
