"""Landlock: which files this process, and whatever it starts, may still read, write and run (Linux 5.13 and later).

No root is needed and nothing takes it back. Rights and structures are those of linux/landlock.h; what a kernel's
version of the interface doesn't know is left out.
"""

import ctypes
import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
# Version of the interface → rights that it knows.
RIGHTS_OF_VERSION = {1: REFER - 1, 2: (REFER << 1) - 1, 3: (TRUNCATE << 1) - 1, 5: (IOCTL_DEVICE << 1) - 1}
READ = READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE

# What programs and libraries of the system are made of: code, fonts, time zones, tables. Nobody's data.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/fonts",
    "/etc/libreoffice", "/etc/localtime", "/etc/mime.types", "/proc/cpuinfo", "/proc/meminfo", "/proc/version",
    "/sys/devices/system/cpu", "/var/lib/libreoffice", "/var/spool/libreoffice", "/dev/urandom",
)  # fmt: skip
DEVICES = ("/dev/null",)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


@cache
def version() -> int:
    """Version of the interface that this kernel has; 0: none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG)))


def python_libraries() -> list[Path]:
    """Where this interpreter's own code lies, and this package."""
    own = Path(__file__).resolve().parents[1]
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), str(own)}
    # A checkout's root is on the path too, with everything that lies in it.
    return [Path(p) for p in [*places, *(p for p in sys.path if p and Path(p) != own.parent)]]


def programs(found: Iterable[str]) -> list[Path]:
    """What installed programs need beside the system's folders: the tree that they were installed into."""
    out = []
    for program in found:
        folder = Path(program).resolve().parent
        out.append(folder.parent if folder.name in ("bin", "sbin", "program") and folder.parent.parts[1:] else folder)
    return out


def restrict(*, read: Iterable[Path], write: Iterable[Path], execute: bool) -> bool:
    """From now on this thread and what it starts can open only the system's and Python's libraries, `read`, and
    `write` (also to be written to). With `execute` programs may be run from what can be read, but for `write`.

    False where the kernel has no Landlock: nothing is restricted then.
    """
    known = max((v for v in RIGHTS_OF_VERSION if v <= version()), default=0)
    if not known:
        return False
    handled = RIGHTS_OF_VERSION[known]
    libc = _libc()
    rules = ctypes.c_uint64(handled)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    if ruleset < 0:
        return False
    try:
        code = READ | (EXECUTE if execute else 0)
        for rights, paths in (
            (code, [*map(Path, SYSTEM), *python_libraries(), *read]),
            (READ_FILE | WRITE_FILE | IOCTL_DEVICE, list(map(Path, DEVICES))),
            (handled & ~EXECUTE, list(write)),
        ):
            for path in paths:
                _allow(libc, ruleset, path, rights & handled)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    """A path that isn't there, or that we can't reach ourselves, needs no rule."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneath(rights if path.is_dir() else rights & OF_FILES, descriptor)
        libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
