"""Limits on this process and everything it starts: memory, CPU, file size, no core dumps, no network, few files.

The network is closed by a seccomp filter, the file system by Landlock (no root needed, inherited, irrevocable); where
the kernel or the machine doesn't offer one, `apply` says so and the others stand alone.
"""

import ctypes
import errno
import platform
import resource
import struct
from collections.abc import Iterable
from pathlib import Path

from service.ingest import landlock

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
AF_UNIX = 1
NO_FAMILY = 0xFFFFFFFF

# Classic BPF: (code, jump if true, jump if false, constant).
LOAD = (
    0x20  # load the 32-bit word at offset k of struct seccomp_data {nr, arch, instruction pointer (8), args (8 each)}
)
JUMP_EQUAL = 0x15
RETURN = 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE = 0x00050000 | errno.EPERM

# machine → (AUDIT_ARCH_*, numbers of its system calls)
ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "execve": 59,
            "execveat": 322,
            "ptrace": 101,
            "io_uring_setup": 425,
            "process_vm_writev": 311,
            "bpf": 321,
            "keyctl": 250,
            "mount": 165,
            "kill": 62,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198,
            "execve": 221,
            "execveat": 281,
            "ptrace": 117,
            "io_uring_setup": 425,
            "process_vm_writev": 271,
            "bpf": 280,
            "keyctl": 219,
            "mount": 40,
            "kill": 129,
        },
    ),
}
X32_BIT = 0x40000000


def apply(
    *,
    memory_bytes: int,
    cpu_s: float,
    file_bytes: int,
    may_execute: bool,
    read: Iterable[Path] = (),
    write: Iterable[Path] = (),
) -> frozenset[str]:
    """Put the limits on this process, for good.

    Returns what could be set beside the resource limits: `seccomp` (no network; no programs where not `may_execute`)
    and `landlock` (no files but the libraries', those below `read`, and those below `write`, where alone files can be
    made).
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_CPU, int(cpu_s) + 1)
    _lower(resource.RLIMIT_FSIZE, file_bytes)
    holds = set()
    if landlock.restrict(read=read, write=write, execute=may_execute):
        holds.add("landlock")
    if _filter_system_calls(may_execute):
        holds.add("seccomp")
    return frozenset(holds)


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (ceiling, ceiling))


def _filter_system_calls(may_execute: bool) -> bool:
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    audit_arch, numbers = known
    refused = [
        n for name, n in numbers.items() if name != "socket" and not (may_execute and name in _NEEDED_TO_EXECUTE)
    ]
    program = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, audit_arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        # On x86-64, calls with bit 30 set are the x32 twins of the same calls: none of our programs makes them.
        (0x45, 0, 1, X32_BIT),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in refused:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    program += [
        (JUMP_EQUAL, 0, 3, numbers["socket"]),
        (LOAD, 0, 0, 16),  # low word of the first argument: the address family
        # Office converters talk to themselves over a socket in a folder of theirs; parsers talk to nobody.
        (JUMP_EQUAL, 1, 0, AF_UNIX if may_execute else NO_FAMILY),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    argument = Program(len(program), ctypes.cast(code, ctypes.c_void_p))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0) == 0)


# A process that starts git, tesseract, office converters and parsers, and ends them.
_NEEDED_TO_EXECUTE = frozenset({"execve", "execveat", "kill"})
