"""TTFT of a document whose KV is stored, by length and by the tier it comes from, beside its cold TTFT.

    python -m loadtests.warm_ttft [--device cpu|cuda] [--lengths 128k 512k 1m] [--tiers cold host device disk both]
        [--linears auto|float8] [--kv-dtype auto|float8|int8] [--max-disk-gb 40] [--budget-s 290] [--results DIR]

The engine itself over a real store. On CUDA: Llama-3-8B's shape with random weights and planted heads
(loadtests/engine_gpu.py); on a CPU the default model. Cells, each written down as soon as it is measured:

cold    a prefill until the last row's logits, KV dropped, then the same with KV stored: buffers of the writer are
        there before it begins, what then waits for the disk is finished behind the clock. The difference is the
        store's overhead.
host    a question of 32 tokens until its first token, KV in (pinned) host memory.
device  the same, KV still on the device from the question before. Not on a CPU, where that is the host tier.
disk    the same, nothing in host memory and the page cache dropped; beside it what O_DIRECT reads of the same files.
both    the same from disk, where the engine computes the first tokens again while the rest is loaded, against loading
        alone and computing alone. On a CPU, whose disk is far faster than its computing, the reading is slowed down to
        what computing takes, as a distant tier would be. Without --tiers up to 256K tokens only.

A length whose KV is more than `--max-disk-gb` has its blocks made but not filled: the tiers above the disk are measured
all the same, on KV whose layers repeat one segment's, and entries say so.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.chain import Segment
from engine.device import buffer_memory
from engine.engine import LocalEngine
from engine.interfaces import AnswerRequest, KVLayout, KVReader, KVStore, PrefillRequest, SamplingParams
from engine.kv_format import KVFormat, kv_format
from engine.kv_plan import KVPlanner
from engine.kv_store import DiskLimits, LocalKVStore
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.buffers import BufferPool
from engine.kv_store.copies import Copy
from engine.kv_store.group_file import GroupFileReader
from engine.model import Model, load_model
from engine.model_folder import resolve_model
from engine.prefill import LayerMajorPrefill
from engine.prefill_rows import PrefillRows
from engine.prefix_kv import available_bytes
from engine.sparse.settings import SparseSettings, default_settings, for_fidelity
from engine.threads import keep_freed_memory, release_freed_memory
from engine.work import MachineRates, PrefillWork, gpu_rates
from kernels import selftest
from loadtests import results
from loadtests.engine_gpu import KeptInMemory, PlantedPrefill, PlantedRows, free, llama_8b, planted
from loadtests.heads import load_profile
from loadtests.raw_disk import drop_from_page_cache, raw_read_rate

COMMAND = "python -m loadtests.warm_ttft"
SALT = b"benchmark"
QUESTION_TOKENS = 32
TIERS = ("cold", "host", "device", "disk", "both")
GB = 1e9
_SHORT = 262_144  # tokens up to which a cell is measured several times
_MOST_RAW_BYTES = 12e9  # of raw reading beside a disk cell
# Of host memory: what the writer's buffers, or the host tier, may take.
_WRITE_SHARE, _HOST_SHARE = 0.45, 0.85


@dataclass
class Bench:
    """What is measured, and where figures go."""

    model: Model
    kv: KVFormat
    folder: Path
    summary: Path
    max_disk_bytes: float
    budget_s: float
    linears: str
    io_threads: int
    started: float = field(default_factory=time.monotonic)
    took: dict[str, tuple[int, float]] = field(default_factory=dict)  # by cell: tokens and seconds of the last one

    @property
    def cuda(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def layout(self) -> KVLayout:
        return self.kv.layout(self.model.spec)

    def kv_bytes(self, tokens: int) -> int:
        return self.layout.num_layers * self.layout.layer_bytes(tokens)

    @property
    def rates(self) -> MachineRates:
        return gpu_rates(self.linears) if self.cuda else MachineRates()

    def engine(self, store: KVStore, planner: KVPlanner | None = None) -> LocalEngine:
        """A fresh one: nothing is on the device from before. Without `planner` all KV is loaded."""
        planner = planner or KVPlanner(PrefillWork(self.model.spec, self.rates), self.layout, "load")
        return PlantedEngine(self.model, lambda ids: "", store, kv=self.kv, rates=self.rates, planner=planner)

    @contextmanager
    def store(
        self, tokens: int, *, host_bytes: int = 0, write_buffers: BufferPool | None = None, write_bytes: int = 1 << 27
    ) -> Iterator[LocalKVStore]:
        opened = LocalKVStore(
            self.folder / str(tokens),
            self.layout,
            DiskLimits(1 << 50, floor_bytes=1 << 30 if self.on_disk(tokens) else 0),
            host_bytes=host_bytes,
            io_threads=self.io_threads,
            allocate=buffer_memory(self.model.device.type),
            write_buffers=write_buffers,
            write_buffer_bytes=write_bytes,
            open_blocks=BlockFolder if self.on_disk(tokens) else UnfilledBlocks,
        )
        try:
            yield opened
        finally:
            opened.close()

    def on_disk(self, tokens: int) -> bool:
        """Whether the length's KV is written; asked before and after, so it must not look at what is free."""
        return self.kv_bytes(tokens) <= self.max_disk_bytes

    def files(self, tokens: int) -> list[Path]:
        return sorted((self.folder / str(tokens)).rglob("*.kv"))

    def free(self) -> None:
        if self.cuda:
            free()
        release_freed_memory()

    def record(
        self, name: str, samples: Sequence[float], unit: str, better: Literal["lower", "higher"], **details: Any
    ) -> float:
        name, value = name if self.cuda else f"cpu_{name}", statistics.median(samples)
        print(f"  {name:32s} {value:9.4g} {unit:6s} {details}", flush=True)
        kept = {"kv": str(self.kv.dtype).removeprefix("torch."), "linears": self.linears}
        results.write_entry(
            name, value, unit, better=better, samples=samples, command=COMMAND, summary=self.summary,
            device=torch.cuda.get_device_name() if self.cuda else None,
            commit=results.commit(), **kept, **details,
        )  # fmt: skip
        return value

    def cell(self, name: str, tokens: int, measure: Callable[[], None]) -> None:
        """Measure it, unless it would end behind the budget by what the same cell took at another length."""
        used = time.monotonic() - self.started
        before_tokens, before_s = self.took.get(name, (tokens, 0.0))
        expected = 1.2 * before_s * tokens / before_tokens
        if used + expected > self.budget_s:
            print(f"{tokens} {name}: skipped, {used:.0f} s are used and it would take {expected:.0f} s", flush=True)
            return
        print(f"{tokens} {name} (at {used:.0f} s)", flush=True)
        started = time.monotonic()
        try:
            measure()
            self.free()
        except Skipped as reason:
            print(f"  skipped: {reason}", flush=True)
            return
        self.took[name] = tokens, time.monotonic() - started


class Skipped(Exception):
    """This cell can't be measured here; the message says why."""


class UnfilledBlocks(BlockFolder):
    """Blocks that take no room: files have their header and length, data is dropped, and what is read is the layer
    that was written last of the same length. For KV that fits this machine's memory and not its disk."""

    def write(self, copy: Copy, group: int, offset: int, data: bytes | memoryview) -> None:
        sample = self._sample(len(data))
        if not sample.exists():
            sample.write_bytes(data)
        super().write(copy, group, 0, b"\0")

    def open(self, copy: Copy, group: int) -> GroupFileReader:
        return _SampleReader(np.memmap(self._sample(copy.layer_bytes), np.uint8, "r"))

    def free_bytes(self) -> int:
        return 1 << 50

    def _sample(self, size: int) -> Path:
        return self.folder.parent / f"sample-{size}"


class _SampleReader(GroupFileReader):
    def __init__(self, sample: NDArray[np.uint8]) -> None:
        self._sample = sample

    def read_into(self, layer: int, buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(self._sample)], self._sample)

    def close(self) -> None:
        pass


class PlantedEngine(LocalEngine):
    """One that computes with planted heads, where there are any, also beside loading."""

    def _open_rows(self, chain: Sequence[Segment], settings: SparseSettings) -> PrefillRows:
        if PlantedPrefill.heads is None:
            return super()._open_rows(chain, settings)
        rows = PlantedRows(self._model, chain, 0, settings, self._kv)
        rows.q, rows.k = PlantedPrefill.heads
        return rows


class ThrottledStore:
    """A store whose readers give no more than `bytes_per_s`, the next layer on its way while one is used."""

    def __init__(self, store: LocalKVStore, bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self.layout, self.match = store.layout, store.match

    def open_reader(self, chain: Sequence[Segment]) -> "ThrottledReader":
        return ThrottledReader(self._store.open_reader(chain), self._bytes_per_s)


class ThrottledReader:
    """A `KVReader`."""

    def __init__(self, reader: KVReader, bytes_per_s: float) -> None:
        self._reader, self._bytes_per_s = reader, bytes_per_s
        self._begun = time.perf_counter()  # when the layer that is asked for next began to come
        self.tier: Literal["host", "disk", "shared"] = reader.tier

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        asked = time.perf_counter()
        begun = asked if layer == 0 else self._begun
        buffers = self._reader.read_layer(layer)
        arrives = begun + sum(buffer.nbytes for buffer in buffers) / self._bytes_per_s
        time.sleep(max(0.0, arrives - time.perf_counter()))
        self._begun = max(arrives, asked)
        return buffers

    def close(self) -> None:
        self._reader.close()


class Document:
    """One length's measurements."""

    def __init__(self, bench: Bench, name: str, tokens: int) -> None:
        self.bench, self.name, self.tokens = bench, name, tokens
        random = np.random.default_rng(tokens)
        self.ids = random.integers(3, bench.model.spec.vocabulary, tokens).astype(np.uint32)
        self.question = random.integers(3, bench.model.spec.vocabulary, QUESTION_TOKENS).astype(np.uint32)
        self.cold_s: float | None = None
        self.computed_tokens = 0  # of the last answer's prefix
        self._in_host = ExitStack()  # holds the store whose host tier has the whole document
        self._host_store: LocalKVStore | None = None

    # --- cells ---

    def cold(self) -> None:
        bench, size = self.bench, self.bench.kv_bytes(self.tokens)
        dropped, stored, backlogs = list[float](), list[float](), list[float]()
        backlog = min(size, int(_WRITE_SHARE * (available_bytes() or size))) if bench.on_disk(self.tokens) else 1 << 28
        piece = bench.layout.layer_bytes(min(self.tokens, 4096))
        buffers = BufferPool(backlog)
        started = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda count: buffers.fill(piece, count), [backlog // piece // 8] * 8))
        print(f"  {backlog / GB:.1f} GB of buffers in {time.monotonic() - started:.1f} s", flush=True)
        heads = planted(load_profile("llama8b"), self.tokens) if bench.cuda else None
        nothing = KeptInMemory(bench.layout, keep=False)
        self._warm_up(heads)
        for turn in range(3 if self.tokens <= _SHORT else 1):
            dropped.append(self._prefill(nothing, heads)[0])
            shutil.rmtree(bench.folder / str(self.tokens), ignore_errors=True)
            with bench.store(self.tokens, write_buffers=buffers, write_bytes=backlog) as store:
                seconds, whole = self._prefill(store, heads)
            stored.append(seconds)
            backlogs.append(whole - seconds)
            print(
                f"  {turn}: dropped {dropped[-1]:.3f} s, stored {seconds:.3f} s + {whole - seconds:.1f} s", flush=True
            )
        self.cold_s = bench.record(
            f"cold_ttft_{self.name}_s", dropped, "s", "lower", tokens=self.tokens, kept="passed on and dropped",
        )  # fmt: skip
        shares = [after / before - 1 for before, after in zip(dropped, stored, strict=True)]
        bench.record(
            f"store_overhead_{self.name}", shares, "share", "lower", tokens=self.tokens, stored_s=stored,
            backlog_s=[round(each, 2) for each in backlogs], kv_gb=round(size / GB, 2),
            disk="filled" if bench.on_disk(self.tokens) else "not filled: more than the disk may take",
        )  # fmt: skip

    def host(self) -> None:
        store = self._host()
        self._ask(store)  # what is compiled for this length
        self._warm("host", [self._ask(store, tier="warm_host") for _ in range(3)])

    def device(self) -> None:
        if not self.bench.cuda:
            raise Skipped("on a CPU nothing stays on the device, the host tier is the same memory")
        store = self._host()
        engine = self.bench.engine(store)
        self._ask(store, engine)
        self._warm("device", [self._ask(store, engine, tier="warm_device") for _ in range(5)])

    def disk(self) -> None:
        self.close()
        bench = self.bench
        if not bench.on_disk(self.tokens):
            raise Skipped(f"{bench.kv_bytes(self.tokens) / GB:.1f} GB of KV are more than --max-disk-gb")
        seconds, raw, shares, threads = list[float](), list[float](), list[float](), 0
        with bench.store(self.tokens) as store:
            self._ready(store)
            files = bench.files(self.tokens)
            size = sum(file.stat().st_size for file in files)
            if bench.cuda and "host" not in bench.took:
                self._ask(store)  # what is compiled for this length
            for _ in range(2 if self.tokens <= _SHORT else 1):
                before = raw_read_rate(files, most_bytes=_MOST_RAW_BYTES / 2)
                drop_from_page_cache(files)
                seconds.append(self._ask(store, tier="warm_disk"))
                after = raw_read_rate(files, most_bytes=_MOST_RAW_BYTES / 2)
                if before is None or after is None:
                    continue
                raw.append((before.bytes_per_s + after.bytes_per_s) / 2)
                threads = before.threads
                shares.append(size / seconds[-1] / raw[-1])
            self._warm("disk", seconds, gb_per_s=round(size / min(seconds) / GB, 2))
        if not shares:
            print("  this file system has no O_DIRECT: no raw rate", flush=True)
            return
        bench.record(
            f"disk_read_share_{self.name}", shares, "share", "higher", tokens=self.tokens, raw_threads=threads,
            raw_gb_per_s=[round(rate / GB, 2) for rate in raw], kv_gb=round(size / GB, 2),
        )  # fmt: skip

    def both(self) -> None:
        self.close()
        bench = self.bench
        if not bench.on_disk(self.tokens):
            raise Skipped(f"{bench.kv_bytes(self.tokens) / GB:.1f} GB of KV are more than --max-disk-gb")
        PlantedPrefill.heads = planted(load_profile("llama8b"), self.tokens) if bench.cuda else None
        planner = KVPlanner(PrefillWork(bench.model.spec, bench.rates), bench.layout, "compute")
        seconds, computed, throttle = dict[str, float](), 0, None
        try:
            with bench.store(self.tokens) as opened:
                self._ready(opened)
                files, store = bench.files(self.tokens), opened
                compiled = ("compute",) if bench.cuda else ()
                # Each is done before it counts: kernels of these lengths, and for both what was learnt.
                for way in (*compiled, "compute", "load", "both", "both"):
                    planner.way = way  # type: ignore[assignment]
                    drop_from_page_cache(files)
                    engine = bench.engine(store, planner)
                    seconds[way] = self._ask(opened, engine)
                    computed = self.computed_tokens
                    print(f"  {way}: {seconds[way]:.2f} s, {computed} tokens computed", flush=True)
                    if way == "compute" and not bench.cuda:
                        throttle = bench.kv_bytes(self.tokens) / seconds[way]
                        store = ThrottledStore(opened, throttle)  # type: ignore[assignment]
                    del engine
        finally:
            PlantedPrefill.heads = None
        better = min(seconds["load"], seconds["compute"])
        bench.record(
            f"both_over_better_{self.name}", [seconds["both"] / better], "times", "lower", tokens=self.tokens,
            load_s=round(seconds["load"], 3), compute_s=round(seconds["compute"], 3),
            both_s=round(seconds["both"], 3), computed_tokens=computed,
            slowed_to_gb_per_s=None if throttle is None else round(throttle / GB, 4),
        )  # fmt: skip

    # --- parts ---

    def _prefill(self, store: Any, heads: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[float, float]:
        """Seconds to the last row's logits, and until all KV is stored."""
        gc.collect()
        engine = self.bench.engine(store)
        request = PrefillRequest(tokens=self.ids, salt=SALT, owner="benchmark", holder="benchmark")
        started = time.monotonic()
        made = engine.start_prefill(request) if heads is None else self._planted(engine, request, store, heads)
        while made.step():
            pass
        whole, seconds = time.monotonic() - started, made.seconds_to_logits
        assert seconds is not None
        return seconds, whole

    def _planted(
        self, engine: LocalEngine, request: PrefillRequest, store: KVStore, heads: tuple[torch.Tensor, torch.Tensor]
    ) -> LayerMajorPrefill:
        PlantedPrefill.heads = heads
        torch.cuda.synchronize()
        return PlantedPrefill(
            self.bench.model, store, engine.chain(self.ids, SALT, "default"), request,
            for_fidelity(default_settings("cuda"), "default"), resume=None, checkpoint_s=1e9,
            work=PrefillWork(self.bench.model.spec, MachineRates()), kv=self.bench.kv,
        )  # fmt: skip

    def _warm_up(self, heads: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Kernels of this length: a prefill where it is short, else one of two layers."""
        bench, model = self.bench, self.bench.model
        layers = model.spec.num_layers if self.tokens <= 32_768 else 2
        bench.model = _with_layers(model, layers)
        try:
            self._prefill(KeptInMemory(bench.layout, keep=False), heads)
        finally:
            bench.model = model

    def _ready(self, store: LocalKVStore) -> None:
        """KV of this length in the store: the prefill's, or where that was not run, noise of the same size."""
        chain = self._chain(store)
        if store.match(chain) == len(chain):
            return
        whole = np.random.default_rng(0).integers(0, 64, store.layout.layer_bytes(4096), dtype=np.uint8).data
        writer = store.open_writer(chain, first=0, owner="noise")
        for layer in range(store.layout.num_layers):
            for place, segment in enumerate(chain):
                writer.write_layer(layer, place, whole[: store.layout.layer_bytes(segment.num_tokens)])
        writer.commit()
        store.attach(chain, "benchmark", ttl_s=None, pinned=False)

    def _host(self) -> LocalKVStore:
        """A store that has read the whole document into its host tier. Raises Skipped where that is too small."""
        if self._host_store is not None:
            return self._host_store
        size, free_bytes = self.bench.kv_bytes(self.tokens), available_bytes()
        if free_bytes is not None and size > _HOST_SHARE * free_bytes:
            raise Skipped(f"{size / GB:.1f} GB of KV don't fit {free_bytes / GB:.1f} GB of free host memory")
        store = self._in_host.enter_context(self.bench.store(self.tokens, host_bytes=size))
        self._ready(store)
        started = time.monotonic()
        reader = store.open_reader(self._chain(store))
        for layer in range(store.layout.num_layers):
            reader.read_layer(layer)
        reader.close()
        print(f"  {size / GB:.1f} GB into host memory in {time.monotonic() - started:.1f} s", flush=True)
        self._host_store = store
        return store

    def close(self) -> None:
        """Let go of host memory."""
        self._host_store = None
        self._in_host.close()
        self.bench.free()

    def _ask(self, store: LocalKVStore, engine: LocalEngine | None = None, *, tier: str | None = None) -> float:
        """Seconds to the first token. Raises Skipped where its KV came from another tier than expected."""
        gc.collect()
        engine = engine or self.bench.engine(store)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        request = AnswerRequest(prefix=self.ids, question=self.question, salt=SALT, sampling=sampling)
        started = time.perf_counter()
        answer = engine.start_answer(request)
        answer.step()  # its token comes to the host: the device has done its work
        seconds = time.perf_counter() - started
        found, self.computed_tokens = answer.kv_tier, answer.computed_tokens
        answer.close()
        if tier is not None and found != tier:
            raise Skipped(f"KV came from {found}, expected {tier}")
        return seconds

    def _warm(self, tier: str, samples: Sequence[float], **details: Any) -> None:
        size = self.bench.kv_bytes(self.tokens)
        if not self.bench.on_disk(self.tokens):
            details["kv_data"] = "one segment's, repeated"
        warm_s = self.bench.record(
            f"warm_ttft_{self.name}_{tier}_s", samples, "s", "lower", tokens=self.tokens,
            question_tokens=QUESTION_TOKENS, kv_gb=round(size / GB, 2), io_threads=self.bench.io_threads, **details,
        )  # fmt: skip
        if self.cold_s is not None:
            ratios = [self.cold_s / sample for sample in samples]
            self.bench.record(
                f"cold_over_warm_{self.name}_{tier}", ratios, "times", "higher", tokens=self.tokens,
                cold_s=round(self.cold_s, 3), warm_s=round(warm_s, 3),
            )  # fmt: skip

    def _chain(self, store: LocalKVStore) -> list[Segment]:
        return self.bench.engine(store).chain(self.ids, SALT, "default")


def _with_layers(model: Model, layers: int) -> Model:
    return replace(model, spec=replace(model.spec, num_layers=layers), layers=model.layers[:layers])


def open_model(device: str, linears: str, kv_dtype: str, cache_dir: Path) -> tuple[Model, KVFormat]:
    """Raises ModelError, ValueError."""
    if device == "cuda":
        selftest.run(torch.device("cuda"), head_dims=(128,))
        model = llama_8b(fp8=linears == "float8")
        return model, kv_format(kv_dtype, model.dtype)
    folder = resolve_model("default", cache_dir=cache_dir)
    model = load_model(folder, dtype=torch.bfloat16, fp8_linears=linears == "float8")
    return model, kv_format(kv_dtype, model.dtype)


def parse_length(text: str) -> tuple[str, int]:
    """("128k", 131072) of 128k; ("1m", 1048576) of 1m; plain numbers as they are. Raises ValueError."""
    name = text.lower()
    factor = {"k": 1024, "m": 1 << 20}.get(name[-1:], 1)
    tokens = int(name.rstrip("km")) * factor
    if tokens < 1:
        raise ValueError(f"got {text!r}, expected a positive number of tokens")
    return name, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", nargs="+", type=parse_length, default=None, help="such as 8k 128k 1m")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=None)
    parser.add_argument("--linears", choices=["auto", "float8"], default=None, help="default: float8 on CUDA")
    parser.add_argument(
        "--kv-dtype", default=None, help="auto, bfloat16, float32, float8, int8; default: float8 on CUDA"
    )
    parser.add_argument("--max-disk-gb", type=float, default=40.0, help="KV that a length may have on the disk")
    parser.add_argument("--budget-s", type=float, default=290.0)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--results", type=Path, default=results.SUMMARY.parent, help="folder of summary.json")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    keep_freed_memory()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="foreword-warm-", dir=arguments.folder))
    linears = arguments.linears or ("float8" if cuda else "auto")
    try:
        with torch.inference_mode():
            model, kv = open_model(
                arguments.device, linears, arguments.kv_dtype or ("float8" if cuda else "auto"), folder / "model"
            )
            bench = Bench(
                model, kv, folder, arguments.results / "summary.json", arguments.max_disk_gb * GB, arguments.budget_s,
                linears, arguments.io_threads, started,
            )  # fmt: skip
            print(f"model and kernels ready in {time.monotonic() - started:.0f} s", flush=True)
            default = ["128k", "512k", "1m"] if cuda else ["4k", "16k"]
            for name, tokens in arguments.lengths or map(parse_length, default):
                document = Document(bench, name, tokens)
                wanted = arguments.tiers or (TIERS if tokens <= _SHORT else TIERS[:-1])
                for tier in (tier for tier in TIERS if tier in wanted):
                    bench.cell(tier, tokens, getattr(document, tier))
                document.close()
                shutil.rmtree(folder / str(tokens), ignore_errors=True)
                bench.free()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
