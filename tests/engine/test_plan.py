"""Plans: sizes that follow from the shapes, and problems in words with both numbers."""

import pytest
from tiny_models import SHAPE

from engine.plan import plan
from engine.spec import spec_from_config
from engine.work import MachineRates, PrefillWork

SPEC = spec_from_config({**SHAPE, "model_type": "llama"})
GIB = 1 << 30


def test_sizes_follow_from_the_shapes() -> None:
    made = plan(SPEC, 10_000)
    assert made.layer_kv_bytes == 10_000 * 2 * 2 * 64 * 2
    assert made.kv_bytes == 3 * made.layer_kv_bytes
    assert made.hidden_bytes == 10_000 * 96 * 2
    assert made.resume_bytes == 2 * made.hidden_bytes
    attention = 96 * 64 * (6 + 2 + 2 + 6)
    assert made.weight_bytes == (3 * (attention + 3 * 96 * 160) + 2 * 256 * 96) * 2
    assert made.fits


def test_sparse_takes_less_time_and_dense_grows_with_the_square() -> None:
    short, long = plan(SPEC, 16_384), plan(SPEC, 32_768)
    assert long.prefill_s < long.dense_prefill_s
    assert 2 < long.dense_prefill_s / short.dense_prefill_s < 4
    assert plan(SPEC, 32_768, fidelity="exact").prefill_s == long.dense_prefill_s
    assert plan(SPEC, 32_768, fidelity="fast").prefill_s < long.prefill_s
    assert plan(SPEC, 4096).prefill_s == plan(SPEC, 4096).dense_prefill_s


def test_rows_that_go_through_the_linears_together_follow_from_the_model_alone() -> None:
    assert PrefillWork(SPEC, MachineRates()).tile_rows == 4096
    large = spec_from_config({**SHAPE, "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336})
    rows = PrefillWork(large, MachineRates()).tile_rows
    assert rows == PrefillWork(large, MachineRates(linear_flops=1e15)).tile_rows
    assert 64 <= rows <= 512
    assert 4096 % rows == 0


def test_what_does_not_fit_is_said_with_both_numbers() -> None:
    made = plan(SPEC, 32_769, memory_bytes=GIB // 2, disk_bytes=1000, resume_cap_bytes=1000)
    assert not made.fits
    assert made.resume_bytes == 0
    text = "\n".join(made.problems)
    assert "32769 tokens are more than the model's 32768 positions" in text
    assert "0.50 GiB are there" in text
    assert "of disk, 0.00 GiB may be used" in text
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        plan(SPEC, 0)
