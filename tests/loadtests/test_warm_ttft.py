"""The benchmark of warm TTFT on a tiny model: every cell writes its figures, and those it can't measure say why."""

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import KVMissing
from engine.kv_format import kv_format
from engine.kv_store import DiskLimits, LocalKVStore
from engine.model import load_model
from loadtests.raw_disk import raw_read_rate
from loadtests.results import read_entries
from loadtests.warm_ttft import Bench, Document, Skipped, parse_length
from tests.engine.tiny_models import SHAPE, save_model


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    save_model(tmp_path / "model", LlamaConfig(**SHAPE, tie_word_embeddings=True))
    model = load_model(tmp_path / "model", dtype=torch.float32)
    return Bench(
        model,
        kv_format("float8", model.dtype),
        tmp_path / "kv",
        tmp_path / "summary.json",
        max_disk_bytes=1e9,
        budget_s=1e9,
        linears="auto",
        io_threads=2,
    )


def test_each_cell_writes_its_figures(bench: Bench) -> None:
    document = Document(bench, "4100", 4100)
    for cell in (document.cold, document.host, document.disk):
        with torch.inference_mode():
            cell()
    document.close()
    entries = {entry["name"]: entry for entry in read_entries(bench.summary)}
    assert {
        "cpu_cold_ttft_4100_s",
        "cpu_store_overhead_4100",
        "cpu_warm_ttft_4100_host_s",
        "cpu_warm_ttft_4100_disk_s",
        "cpu_cold_over_warm_4100_host",
        "cpu_cold_over_warm_4100_disk",
    } <= set(entries)
    assert all(sample > 0 for sample in entries["cpu_warm_ttft_4100_disk_s"]["samples"])
    assert entries["cpu_store_overhead_4100"]["disk"] == "filled"
    with pytest.raises(Skipped, match="device"):
        document.device()


def test_computing_beside_loading_is_measured_against_either_alone(bench: Bench) -> None:
    document = Document(bench, "9000", 9000)
    with torch.inference_mode():
        document.both()
    (entry,) = read_entries(bench.summary)
    assert entry["name"] == "cpu_both_over_better_9000"
    assert 0 < entry["computed_tokens"] < 9000
    assert entry["value"] == pytest.approx(entry["both_s"] / min(entry["load_s"], entry["compute_s"]), rel=0.02)
    assert entry["slowed_to_gb_per_s"] > 0


def test_kv_beyond_the_disk_is_measured_from_the_host_without_being_written(bench: Bench) -> None:
    bench.max_disk_bytes = 1000
    document = Document(bench, "4100", 4100)
    with torch.inference_mode():
        document.cold()
        document.host()
    document.close()
    used = sum(file.stat().st_blocks * 512 for file in bench.files(4100))
    assert len(bench.files(4100)) > 0
    assert used < bench.kv_bytes(4100) / 2
    with pytest.raises(Skipped, match="max-disk-gb"):
        document.disk()
    entries = {entry["name"]: entry for entry in read_entries(bench.summary)}
    assert entries["cpu_warm_ttft_4100_host_s"]["kv_data"] == "one segment's, repeated"
    # Blocks without their data are no KV to any other store.
    store = LocalKVStore(bench.folder / "4100", bench.layout, DiskLimits(1 << 30))
    reader = store.open_reader(document._chain(store))
    with pytest.raises(KVMissing):
        reader.read_layer(0)
    reader.close()
    store.close()


def test_a_cell_that_would_end_behind_the_budget_is_left_out(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.took["host"] = (1000, 60.0)
    bench.budget_s = 100.0
    bench.cell("host", 4000, lambda: pytest.fail("240 s were expected"))
    assert "skipped" in capsys.readouterr().out
    done: list[bool] = []
    bench.cell("host", 1000, lambda: done.append(True))
    assert done == [True]


def test_lengths_are_parsed() -> None:
    assert [parse_length(text) for text in ("128k", "1M", "5000")] == [
        ("128k", 131_072),
        ("1m", 1_048_576),
        ("5000", 5000),
    ]
    with pytest.raises(ValueError, match="expected a positive"):
        parse_length("0k")


def test_raw_reading_counts_what_it_read(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(6)]
    for file in files:
        file.write_bytes(os.urandom(1 << 20))
    rate = raw_read_rate(files, most_bytes=1 << 30)
    assert rate is None or (rate.bytes_per_s > 0 and rate.threads in (2, 4, 8))
    with pytest.raises(ValueError, match="no files"):
        raw_read_rate([], most_bytes=1)
