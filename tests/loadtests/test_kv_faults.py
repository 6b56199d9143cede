"""The fault run itself: it finds nothing in the store as it is, and would find what it looks for."""

import subprocess
from pathlib import Path

import pytest

from loadtests.kv_faults.shim import command_under_shim, have_compiler

pytestmark = pytest.mark.skipif(not have_compiler(), reason="the shim is compiled with cc")

# A store that serves what it reads, whatever its checksum says.
TRUSTING = """
import sys
from engine.kv_store import group_file
from loadtests.kv_faults import __main__ as program

group_file.xxh3_128_digest = lambda data: b"0" * 16
sys.exit(program.main())
"""

# An index that cannot be written while a reader and a writer end: what they held must not stay held.
ENDINGS = """
import errno, sys
from pathlib import Path
from engine.kv_store import DiskLimits, LocalKVStore
from loadtests.kv_documents import chain_of, write, write_layers
from loadtests.kv_faults.bench import LAYOUT
from loadtests.kv_faults.shim import Calls, Files, Kind, Shim

folder = Path(sys.argv[1])
shim, store = Shim(folder), LocalKVStore(folder, LAYOUT, DiskLimits(2**30))
read, written = chain_of(9000, seed=1), chain_of(5000, seed=2)
write(store, read, owner="job")
reader, writer = store.open_reader(read), store.open_writer(written, first=0, owner="other")
write_layers(writer, written, range(LAYOUT.num_layers), LAYOUT)
writer.flush()
shim.arm(Kind.FAIL, Files.INDEX, Calls.WRITE | Calls.SYNC, times=1000, argument=errno.EIO)
reader.close()
for end in (writer.commit, writer.suspend):
    try:
        end()
    except OSError as error:
        print(error.errno == errno.EIO)
print(shim.disarm() > 0, store.counters.get("index_errors"))

def left():
    with store.catalog.index.snapshot() as db:
        return [db.execute(query).fetchone()[0] for query in (
            "SELECT COUNT(*) FROM leases", "SELECT COUNT(*) FROM copies WHERE session IS NOT NULL")]

print(left())
store.sweep()
print(left())
again = store.open_writer(written, first=0, owner="other")
print(again.groups_done() == LAYOUT.num_groups)
again.commit()
print(store.match(written), store.match(read))
store.close()
"""


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (python, *_), environment = command_under_shim(folder, "")
    command = [python, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    command, environment = command_under_shim(
        tmp_path, "loadtests.kv_faults", "--faults", "60", "--folder", str(tmp_path), "--no-summary"
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("uncounted: 0", "unsound: 0", "crashes: 0"):
        assert line in done.stdout.splitlines()
    assert " 0 wrong" in done.stdout


@pytest.mark.slow
def test_wrong_kv_would_be_noticed(tmp_path: Path) -> None:
    arguments = ("--faults", "40", "--folder", str(tmp_path), "--no-summary")
    done = run(tmp_path, TRUSTING, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG KV behind bit_flip" in done.stdout


def test_what_could_not_end_ends_with_the_next_sweep(tmp_path: Path) -> None:
    done = run(tmp_path, ENDINGS, str(tmp_path / "kv"))
    assert done.stdout.splitlines() == [
        "True", "True", "True 3", "[3, 2]", "[0, 0]", "True", "2 3",
    ], done.stdout + done.stderr  # fmt: skip
