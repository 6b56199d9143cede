"""The KV store against the bare file system, as ratios in one run: a 32K-token prefix of the default model (755 MB).

    python -m loadtests.kv_store [--tokens 32768] [--rounds 3] [--folder DIR]

Each round writes the prefix, then reads it as a warm answer does, from the page cache and from the disk; raw sequential
I/O of the same files alternates with it. Checksums are included in the store's times.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.chain import Segment, segment_chain
from engine.kv_store import DiskLimits, LocalKVStore, layout_for
from loadtests.results import write_entry

COMMAND = "python -m loadtests.kv_store"
NUM_LAYERS, BYTES_PER_TOKEN = 30, 768  # SmolLM2-135M in bfloat16
GIB = 1024**3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default: the temporary folder"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        rates = measure(folder, arguments.tokens, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    report(rates, arguments.tokens)


def measure(folder: Path, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """GB/s by what was done, one a round."""
    layout = layout_for(NUM_LAYERS, BYTES_PER_TOKEN)
    chain = segment_chain(np.arange(num_tokens, dtype=np.uint32), salt=b"benchmark", digest="benchmark")
    data = memoryview(np.random.default_rng(0).bytes(layout.layer_bytes(4096)))
    size = NUM_LAYERS * sum(layout.layer_bytes(segment.num_tokens) for segment in chain)
    rates: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        rates.setdefault(name, []).append(size / (time.perf_counter() - started) / 1e9)

    for number in range(rounds):
        store = LocalKVStore(folder / f"kv-{number}", layout, DiskLimits(64 * GIB), host_bytes=0)
        timed("write", lambda store=store: write(store, chain, data))
        files = sorted((folder / f"kv-{number}" / "blocks").iterdir())
        timed("raw write", lambda files=files: raw_write(folder / "raw", files))
        for name, before in (("warm", lambda files: None), ("disk", drop_from_page_cache)):
            before(files)
            timed(f"read {name}", lambda store=store: read(store, chain))
            before(files)
            timed(f"raw read {name}", lambda files=files: raw_read(files))
        store.close()
        in_host = LocalKVStore(folder / f"kv-{number}", layout, DiskLimits(64 * GIB), host_bytes=64 * GIB)
        read(in_host, chain)
        timed("read host", lambda store=in_host: read(store, chain))
        in_host.close()
        shutil.rmtree(folder / f"kv-{number}")
    return rates


def write(store: LocalKVStore, chain: list[Segment], data: memoryview) -> None:
    writer = store.open_writer(chain, first=0, owner="benchmark")
    for layer in range(store.layout.num_layers):
        for index, segment in enumerate(chain):
            writer.write_layer(layer, index, data[: store.layout.layer_bytes(segment.num_tokens)])
    writer.commit()


def read(store: LocalKVStore, chain: list[Segment]) -> None:
    reader = store.open_reader(chain)
    for layer in range(store.layout.num_layers):
        reader.read_layer(layer)
    reader.close()


def raw_write(folder: Path, files: list[Path]) -> None:
    """As many files of the same sizes, each with an fsync, one after the other."""
    folder.mkdir()
    for file in files:
        payload = os.urandom(1024) * (file.stat().st_size // 1024)
        with (folder / file.name).open("wb", buffering=0) as target:
            target.write(payload)
            os.fsync(target.fileno())
    shutil.rmtree(folder)


def raw_read(files: list[Path]) -> None:
    buffer = bytearray(4 * 1024**2)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(rates: dict[str, list[float]], num_tokens: int) -> None:
    details = {
        "tokens": num_tokens,
        "gb_per_s": {name: round(statistics.median(each), 2) for name, each in rates.items()},
    }
    for name, rate in details["gb_per_s"].items():
        print(f"{name:>14}: {rate:8.2f} GB/s  {[round(each, 2) for each in rates[name]]}")
    for name, ours, raw in (
        ("kv_read_warm_raw_share", "read warm", "raw read warm"),
        ("kv_read_disk_raw_share", "read disk", "raw read disk"),
        ("kv_write_raw_share", "write", "raw write"),
    ):
        shares = [mine / bare for mine, bare in zip(rates[ours], rates[raw], strict=True)]
        write_entry(
            name,
            round(statistics.median(shares), 3),
            "share",
            better="higher",
            samples=shares,
            command=COMMAND,
            **details,
        )
        print(f"{name}: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
