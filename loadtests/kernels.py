"""Kernel benchmarks on a GPU, after the kernels' self-test: `python -m loadtests.kernels [--only NAME …]`.

Shapes are one layer of Llama-3-8B (32 query heads, 8 KV heads, 128 channels) in bfloat16. Every figure is a median over
CUDA events after warm-up; its spread stands beside it in the results.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch

from engine.sparse.settings import default_settings
from kernels import dispatch, selftest
from kernels.block_lists import BlockLists, lists_from_mask
from kernels.block_scores import block_scores
from kernels.block_selection import select_blocks
from kernels.block_sparse_attention import block_sparse_attention
from kernels.block_sparse_attention.reference import block_sparse_attention as reference
from kernels.decode_attention import decode_attention, pages_view
from kernels.dense_attention import dense_attention
from kernels.kv_quant import quantise_kv
from kernels.sampled_lse import sampled_lse
from loadtests import results
from loadtests.heads import generate, load_profile

HEADS, KV_HEADS, HEAD_DIM, BLOCK, SEGMENT = 32, 8, 128, 128, 4096
DEVICE = torch.device("cuda")
COMMAND = "python -m loadtests.kernels"
TARGET = 0.95
# The device sleeps some milliseconds before each run, so that every launch is queued by then: in the engine the host
# runs ahead as well, and gaps between launches would otherwise count as the kernels' time.
_HEAD_START_CYCLES = 10_000_000


def timed(run: Callable[[], object], *, repeats: int = 9, warm_up: int = 2, head_start: bool = True) -> list[float]:
    """Milliseconds of each of `repeats` runs; without a head start they follow each other and heat the device."""
    for _ in range(warm_up):
        run()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if head_start:
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return samples


def record(name: str, samples: list[float], unit: str, better: Literal["lower", "higher"], **details: Any) -> None:
    """Print one figure and put it into the results."""
    value = statistics.median(samples)
    print(f"{name:32s} {value:10.4g} {unit}  [{min(samples):.4g} … {max(samples):.4g}]  {details}", flush=True)
    commit = results.commit()
    device = torch.cuda.get_device_name()
    results.write_entry(
        name, value, unit, better=better, samples=samples, command=COMMAND, device=device, **details, commit=commit
    )


def random_heads(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    return normal(tokens, HEADS, HEAD_DIM), normal(KV_HEADS, tokens, HEAD_DIM), normal(KV_HEADS, tokens, HEAD_DIM)


def scattered_lists(tokens: int, keys: int) -> BlockLists:
    """`keys` keys a row in random blocks, the first and the diagonal among them; all where there are not so many."""
    blocks = tokens // BLOCK
    generator = torch.Generator(DEVICE).manual_seed(2)
    weight = torch.rand(blocks, KV_HEADS, blocks, device=DEVICE, generator=generator)
    block = torch.arange(blocks, device=DEVICE)
    weight[..., 0] = 2
    weight.masked_fill_((block == block[:, None])[:, None], 3)
    weight.masked_fill_((block > block[:, None])[:, None], -1)
    top = weight.topk(min(keys // BLOCK, blocks), -1).indices
    mask = torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, top, True) & (weight >= 0)
    return lists_from_mask(mask, row_block=BLOCK, key_block=BLOCK)


def kept_pairs(lists: BlockLists) -> float:
    """Causal (row, key) pairs of all KV heads, for lists of square blocks that hold their diagonal."""
    counts = lists.counts.double()
    return float((counts - 1).sum() * BLOCK**2 + counts.numel() * BLOCK * (BLOCK + 1) / 2)


def block_sparse() -> None:
    """131,072 tokens, 8,192 scattered keys a row, LSE out; FLOPs = 4 · head_dim · causal pairs kept."""
    tokens = 131_072
    q, k, v = random_heads(tokens)
    lists = scattered_lists(tokens, 8192)
    flops = 4 * HEAD_DIM * kept_pairs(lists) * (HEADS // KV_HEADS)
    samples = timed(lambda: block_sparse_attention(q, k, v, lists), repeats=15, head_start=False)
    path = dispatch.paths()["block_sparse_attention"][0]
    record("block_sparse_tflops", [flops / ms / 1e9 for ms in samples], "TFLOP/s", "higher", tokens=tokens, path=path)
    dense = timed(lambda: dense_attention(q, k, v), repeats=3, warm_up=1, head_start=False)
    dense_flops = 2 * tokens * (tokens + 1) * HEADS * HEAD_DIM
    record(
        "dense_attention_tflops", [dense_flops / ms / 1e9 for ms in dense], "TFLOP/s", "higher", tokens=tokens,
        path=dispatch.paths()["dense_attention"][0], milliseconds=statistics.median(dense),
    )  # fmt: skip


def relative_error() -> None:
    """‖o − o64‖ / ‖o64‖ on the kept work, 8,192 rows behind an offset of 8,192."""
    q, k, v = random_heads(16_384)
    rows = q[8192:]
    lists = scattered_lists(16_384, 4096)
    # The lists of the last half of the row blocks, as a chunk behind an offset has them.
    half = lists.row_blocks // 2
    begin = lists.offsets[half * KV_HEADS]
    later = BlockLists(lists.offsets[half * KV_HEADS :] - begin, lists.blocks[int(begin) :], KV_HEADS, BLOCK, BLOCK)
    out, _ = block_sparse_attention(rows, k, v, later, row_offset=8192)
    want = torch.empty(rows.shape, dtype=torch.float64, device=DEVICE)
    reference(rows.double(), k.double(), v.double(), later, 8192, HEAD_DIM**-0.5, want)
    error = float((out.double() - want).norm() / want.norm())
    record("kernel_rel_error_bf16", [error], "ratio", "lower", tokens=8192)


def decode() -> None:
    """One row over 1,048,576 tokens of FP8 KV: the KV's bytes a second against a device-to-device copy's."""
    tokens = 1 << 20
    _, k, v = random_heads(tokens)
    (k8, k_scales), (v8, v_scales) = quantise_kv(k), quantise_kv(v)
    q = torch.randn(1, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(tokens // BLOCK, dtype=torch.int32, device=DEVICE)[None]
    length = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / statistics.median(timed(lambda: target.copy_(source)))
    scales = {"k_scales": k_scales.T, "v_scales": v_scales.T}
    quantised = timed(lambda: decode_attention(q, pages_view(k8), pages_view(v8), table, length, **scales), repeats=15)
    plain = timed(lambda: decode_attention(q, pages_view(k), pages_view(v), table, length), repeats=15)
    shares = [2 * k8.numel() / ms / copy for ms in quantised]
    record("decode_1m_bandwidth_share", shares, "share", "higher", copy_gb_per_s=copy / 1e6, kv="fp8")
    record("decode_1m_bf16_bandwidth_share", [4 * k.numel() / ms / copy for ms in plain], "share", "higher", kv="bf16")


def sample_offsets(samples: int, row_block: int) -> torch.Tensor:
    """Evenly spaced rows, staggered over the heads: [heads, samples] int32."""
    step = row_block // samples
    head = torch.arange(HEADS)[:, None] * step // (HEADS // KV_HEADS)
    return ((torch.arange(samples) * step + head) % row_block).to(torch.int32).to(DEVICE)


def selection_share(name: str, tokens: int) -> None:
    """Scoring + selection + guard against attention over what was selected, a layer of `llama8b`, in 64K-row chunks.

    As many rows are looked at as the engine looks at where a chunk ends; its guard and witnesses are one draw here.
    """
    q, k = generate(load_profile("llama8b"), tokens, device=DEVICE)
    v, settings = torch.randn_like(k), default_settings("cuda")
    generator = torch.Generator().manual_seed(3)
    choosing, attending, counts, recalls = 0.0, 0.0, [], []
    for start in range(0, tokens, 65_536):
        rows = q[start : start + 65_536]
        end = start + len(rows)
        samples, row_block = settings.sampled_rows_at(end), settings.row_block_at(end)
        offsets, guard_rows = sample_offsets(samples, row_block), 2 * settings.guard_rows_at(end)
        segments = len(rows) // SEGMENT
        fresh = torch.randint(SEGMENT, (HEADS, segments, guard_rows), generator=generator, dtype=torch.int32)
        fresh = (fresh + torch.arange(segments, dtype=torch.int32)[:, None] * SEGMENT).flatten(1).to(DEVICE)
        shape = {"row_block": row_block, "key_block": BLOCK, "row_offset": start}

        def choose(
            rows: torch.Tensor = rows, shape: dict[str, int] = shape, offsets: torch.Tensor = offsets
        ) -> BlockLists:
            masses = block_scores(rows, k, offsets, **shape)
            return select_blocks(masses, target=TARGET, smooth_blocks=SEGMENT // shape["row_block"], **shape)

        lists = choose()

        def choose_and_guard(
            rows: torch.Tensor = rows, start: int = start, fresh: torch.Tensor = fresh, run: Any = choose
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return sampled_lse(rows, k, fresh, run(), row_offset=start)

        def attend(rows: torch.Tensor = rows, start: int = start, lists: BlockLists = lists) -> None:
            block_sparse_attention(rows, k, v, lists, row_offset=start)

        choosing += statistics.median(timed(choose_and_guard, repeats=5))
        attending += statistics.median(timed(attend, repeats=5))
        lse_all, lse_kept = choose_and_guard()
        # A cell is one (segment, KV-head group).
        cells = (lse_kept - lse_all).exp().view(KV_HEADS, -1, segments, guard_rows).mean((1, 3))
        recalls.append(cells.flatten())
        counts.append(lists.counts.double().mean())
    recall = torch.cat(recalls)
    record(
        name, [choosing / attending], "share", "lower", tokens=tokens, profile="llama8b",
        choosing_ms=choosing, attention_ms=attending, mean_keys=float(torch.stack(counts).mean()) * BLOCK,
        recall_mean=float(recall.mean()), recall_p5=float(recall.quantile(0.05)), recall_worst=float(recall.min()),
        sampled_rows_at_the_end=f"{samples} of {row_block}",
    )  # fmt: skip


BENCHMARKS: dict[str, Callable[[], None]] = {
    "block_sparse": block_sparse,
    "relative_error": relative_error,
    "decode": decode,
    "selection_128k": lambda: selection_share("selection_share_128k", 131_072),
    "selection_1m": lambda: selection_share("selection_share_1m", 1 << 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    for result in selftest.run(DEVICE):
        print(f"{result.op:24s} {result.path:10s} {result.reason} {result.failed or ''}")
        if result.failed:
            parser.error(f"{result.op} failed its self-test: {result.failed}")
    for name in arguments.only:
        BENCHMARKS[name]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
