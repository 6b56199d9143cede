"""The faults of a disk, armed from Python: a small C library between this process and libc."""

import ctypes
import os
import shutil
import subprocess
import sys
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
_NAMED = "KV_FAULTS_SHIM"


class Kind(IntEnum):
    """What happens to a call."""

    FAIL = 1  # with an errno
    TORN = 2  # a write that says it was done, but only part of it was
    FLIP = 3  # of one bit, of what was read or is written
    SLOW = 4
    KILL = 5  # SIGKILL; inside a write, behind part of it


class Files(IntFlag):
    BLOCKS = 1
    INDEX = 2


class Calls(IntFlag):
    OPEN = 1
    READ = 2
    WRITE = 4
    SYNC = 8
    TRUNCATE = 16
    RENAME = 32
    UNLINK = 64


class Shim:
    """The library that this process runs under; see `run_under_shim`."""

    def __init__(self, folder: Path) -> None:
        """Faults will hit files below `folder` only."""
        self._library = ctypes.CDLL(None)
        self._library.kv_fault_disarm.restype = ctypes.c_long
        self._library.kv_fault_watch(str(folder).encode())

    def arm(
        self,
        kind: Kind,
        files: Files,
        calls: Calls,
        *,
        after: int = 0,
        times: int = 1,
        argument: int = 0,
        seed: int = 0,
    ) -> None:
        """Let `after` matching calls pass, then hit `times` of them. `argument`: an errno, or milliseconds."""
        as_long = ctypes.c_long
        self._library.kv_fault_arm(
            int(kind), int(files), int(calls), as_long(after), as_long(times), argument, ctypes.c_uint64(seed)
        )

    def disarm(self) -> int:
        """Returns how many calls were hit since `arm`."""
        return int(self._library.kv_fault_disarm())


def have_compiler() -> bool:
    return shutil.which("cc") is not None


def under_shim() -> bool:
    return _NAMED in os.environ


def command_under_shim(folder: Path, module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run `module` with the library, which is compiled into `folder`.

    Raises OSError where there is no C compiler, subprocess.CalledProcessError.
    """
    library = folder / "shim.so"
    compile_ = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(compile_, check=True)
    return [sys.executable, "-m", module, *arguments], {**os.environ, "LD_PRELOAD": str(library), _NAMED: "1"}
