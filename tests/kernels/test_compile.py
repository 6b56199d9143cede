"""Every Triton kernel compiles for A100, RTX 4090 and H100 and fits their shared memory, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.arguments import HAS_GPU

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("arch", sorted(SHARED_BYTES))
def test_compiles_and_fits(arch, tmp_path):
    """Some head sizes and the small kernels here; all of them on a machine with a GPU."""
    only = (
        [] if HAS_GPU else ["block_sparse_attention-d128-k128", "block_lse-d64", "needed", "swiglu-fp8=False", "rope"]
    )
    if arch == 90 and only:
        only.append("gluon_block_sparse_attention-d128-k128")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    program = Path(__file__).with_name("compile_offline.py")
    done = subprocess.run(
        [sys.executable, str(program), str(arch), *only], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split("\t") for line in done.stdout.splitlines())
    assert len(sizes) >= (len(only) or 20)
    assert all(int(size) <= SHARED_BYTES[arch] for size in sizes.values()), sizes
