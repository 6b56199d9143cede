import logging
import subprocess
import sys
import types

import pytest
import torch

from kernels import dispatch, selftest
from kernels.dispatch import Capability
from tests.kernels.arguments import attention_inputs

CPU = torch.device("cpu")


def test_every_operation_has_a_reference_and_a_selftest():
    for op in dispatch.OPS:
        assert "reference" in [path for path, _ in dispatch.candidates(op, CPU)]
    assert set(selftest._CASES) == set(dispatch.OPS)


def test_choice_is_made_once_and_logged(caplog):
    with caplog.at_level(logging.INFO, logger="kernels.dispatch"):
        first = dispatch.implementation("rope", CPU)
        assert dispatch.implementation("rope", CPU) is first
    assert [(record.op, record.path) for record in caplog.records] == [("rope", dispatch.paths()["rope"][0])]


def test_a_failed_path_gives_way_to_the_next_with_its_reason():
    best = dispatch.candidates("dense_attention", CPU)[0][0]
    dispatch.implementation("dense_attention", CPU)
    dispatch.mark_failed("dense_attention", best, CPU, "wrong on Tuesdays")
    dispatch.implementation("dense_attention", CPU)
    assert dispatch.paths()["dense_attention"] == ("reference", f"{best}: wrong on Tuesdays")


def test_override_ends_with_its_block():
    with dispatch.override("rope", "triton"):
        assert dispatch.implementation("rope", CPU).__name__ == "kernels.rope.triton_kernel"
        with dispatch.override("rope", "reference"):
            assert dispatch.implementation("rope", CPU).__name__ == "kernels.rope.reference"
        assert dispatch.implementation("rope", CPU).__name__ == "kernels.rope.triton_kernel"
    assert dispatch.implementation("rope", CPU).__name__ != "kernels.rope.triton_kernel"


@pytest.mark.parametrize(("op", "path"), [("rope", "cutlass"), ("rope", "gluon"), ("softmax", "triton")])
def test_unknown_paths(op, path):
    with pytest.raises(ValueError, match=f"operation '{op}' has no path '{path}'"), dispatch.override(op, path):
        pass


def test_unknown_operation():
    with pytest.raises(ValueError, match="unknown operation 'softmax'"):
        dispatch.implementation("softmax", CPU)


@pytest.mark.parametrize(
    ("compute", "shared", "expected"),
    [
        ((9, 0), 227 * 1024, ["gluon", "triton"]),
        ((9, 0), 99 * 1024, ["triton"]),
        ((8, 9), 99 * 1024, ["triton"]),
        ((7, 5), 64 * 1024, []),
    ],
)
def test_capability_numbers_decide(compute, shared, expected, monkeypatch):
    """The modules themselves say what they need; no device is asked."""
    if not dispatch.capability(CPU).triton:
        pytest.skip("needs Triton")
    monkeypatch.setattr(dispatch, "capability", lambda device: Capability("cuda", compute, shared, 132, "3.6.0"))
    found = [p for p, obstacle in dispatch.candidates("block_sparse_attention", torch.device("cuda")) if not obstacle]
    assert found == [*expected, "reference"]


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "capability", lambda device: Capability("cuda", (9, 0), 232448, 132, None))
    obstacles = dict(dispatch.candidates("block_scores", torch.device("cuda")))
    assert obstacles == {"triton": "Triton is not installed", "reference": None}


def test_selftest_passes_here(device):
    for result in selftest.run(device):
        assert result.failed == ()


def test_selftest_takes_a_wrong_kernel_out(monkeypatch, caplog):
    best = dispatch.candidates("dense_attention", CPU)[0][0]
    broken = types.SimpleNamespace(
        dense_attention=lambda q, k, v, row_offset, scale: (torch.zeros_like(q), torch.zeros(q.shape[:2]))
    )
    load = dispatch._load
    monkeypatch.setattr(
        dispatch, "_load", lambda op, path: broken if (op, path) == ("dense_attention", best) else load(op, path)
    )
    results = {result.op: result for result in selftest.run(CPU)}
    assert results["dense_attention"].path == "reference"
    assert results["dense_attention"].failed[0][0] == best
    assert "relative errors" in results["dense_attention"].failed[0][1]
    assert "kernel path failed" in caplog.text
    q, k, v = attention_inputs(3, 1, 1, 3, 64, torch.float32, CPU)
    assert float(dispatch.implementation("dense_attention", CPU).dense_attention(q, k, v, 0, 1.0)[0].abs().max()) > 0


def test_import_touches_no_device():
    """A fresh interpreter imports every operation; CUDA stays uninitialised and Triton unloaded."""
    code = (
        "import importlib, sys, torch\n"
        "from kernels import dispatch, selftest\n"
        "for op in dispatch.OPS: importlib.import_module(f'kernels.{op}')\n"
        "print(torch.cuda.is_initialized(), 'kernels.rope.triton_kernel' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
