"""At least 10,000 random faults on the KV store's real code paths: nothing wrong may be served, no fault uncounted.

    python -m loadtests.kv_faults [--faults 10000] [--seed 1] [--folder DIR]

Disk faults come from a library between this process and libc (LD_PRELOAD; needs a C compiler), kills are SIGKILL of
real processes inside their writes. Behind each fault what matches is read and compared byte by byte.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from loadtests.kv_faults import kinds
from loadtests.kv_faults.bench import Bench, Book
from loadtests.kv_faults.processes import Other, fork_victims, write_beside
from loadtests.kv_faults.redis_restart import RedisBench
from loadtests.kv_faults.shim import Shim, command_under_shim, under_shim
from loadtests.results import command_line, write_entry

COMMAND = command_line("loadtests.kv_faults", sys.argv[1:])
SHARES: Mapping[str, float] = {
    "bit_flip": 0.255, "truncation": 0.12, "torn_write": 0.13, "stale_index": 0.08, "enospc": 0.11, "eio": 0.13,
    "slow_disk": 0.05, "two_writers": 0.04, "kill_in_write": 0.04, "kill_elsewhere": 0.02,
    "redis_restart": 0.035,
}  # fmt: skip
MOST_ATTEMPTS = 4  # a fault; some are armed for a call that never comes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where the store lies; default: the temporary folder")
    parser.add_argument("--no-summary", action="store_true", help="print only")
    arguments = parser.parse_args()
    if not under_shim():
        with tempfile.TemporaryDirectory(prefix="kv-faults-shim-") as folder:
            command, environment = command_under_shim(Path(folder), "loadtests.kv_faults", *sys.argv[1:])
            return subprocess.run(command, env=environment, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="kv-faults-", dir=arguments.folder) as folder:
        started = time.monotonic()
        book = inject(Path(folder) / "kv", arguments.faults, arguments.seed)
    seconds = time.monotonic() - started
    tell(book, seconds)
    if not arguments.no_summary:
        write_figures(book, seconds)
    return 0 if book.clean else 1


def inject(folder: Path, faults: int, seed: int) -> Book:
    """Inject `faults` or a few more, in random order."""
    shim, rng, book = Shim(folder), random.Random(seed), Book()
    victims = Other(fork_victims, shim, folder)
    peer = Other(write_beside, folder)
    bench = Bench(folder, shim, rng, book)
    redis = RedisBench(folder.parent, rng, book)
    actions: Mapping[str, Callable[[], None]] = {
        "bit_flip": lambda: kinds.bit_flip(bench),
        "truncation": lambda: kinds.truncation(bench),
        "torn_write": lambda: kinds.torn_write(bench),
        "stale_index": lambda: kinds.stale_index(bench),
        "enospc": lambda: kinds.no_space(bench),
        "eio": lambda: kinds.io_error(bench),
        "slow_disk": lambda: kinds.slow_disk(bench),
        "two_writers": lambda: kinds.two_writers(bench, peer),
        "kill_in_write": lambda: kinds.kill_in_write(bench, victims),
        "kill_elsewhere": lambda: kinds.kill_elsewhere(bench, victims),
        "redis_restart": redis.restart,
    }
    wanted = {kind: -(-int(faults * share * 1000) // 1000) + 1 for kind, share in SHARES.items()}
    if shutil.which("redis-server") is None:
        print("no redis-server here: its tier is left out", file=sys.stderr)
        del wanted["redis_restart"]
    attempts: Counter[str] = Counter()
    with ExitStack() as stack:
        for end in (victims.close, peer.close, lambda: bench.store.close()):
            stack.callback(end)
        if "redis_restart" in wanted:
            stack.enter_context(redis)
        while left := {
            kind: count - book.injected[kind] for kind, count in wanted.items() if count > book.injected[kind]
        }:
            (kind,) = rng.choices(list(left), list(left.values()))
            attempts[kind] += 1
            if attempts[kind] > MOST_ATTEMPTS * wanted[kind] + 20:
                raise RuntimeError(f"{kind}: {book.injected[kind]} of {attempts[kind]} faults could be placed")
            actions[kind]()
            if attempts.total() % 500 == 0:
                print(f"{book.injected.total()} faults, {book.blocks_compared} blocks compared", flush=True)
    return book


def tell(book: Book, seconds: float) -> None:
    print(f"{'kind':>16} {'injected':>9} {'counted':>8} {'refused':>8}")
    for kind in SHARES:
        print(f"{kind:>16} {book.injected[kind]:9} {book.noticed[kind]:8} {book.refused[kind]:8}")
    print(f"{book.injected.total()} faults in {seconds:.0f} s")
    print(f"{book.blocks_compared} blocks compared, {book.wrong_kv} wrong")
    for name, troubles in (("uncounted", book.uncounted), ("unsound", book.unsound), ("crashes", book.crashes)):
        print(f"{name}: {len(troubles)}")
        for trouble in troubles[:5]:
            print(f"  {trouble}")


def write_figures(book: Book, seconds: float) -> None:
    details = {
        "by_kind": dict(book.injected),
        "counted_by_the_store": dict(book.noticed),
        "clean_errors": dict(book.refused),
        "uncounted": len(book.uncounted),
        "unsound": len(book.unsound),
        "crashes": len(book.crashes),
        "blocks_compared": book.blocks_compared,
        "seconds": round(seconds),
    }
    write_entry(
        "faults_injected", book.injected.total(), "faults", better="higher", samples=[], command=COMMAND, **details
    )
    against = {"faults": book.injected.total(), "blocks_compared": book.blocks_compared}
    write_entry("wrong_kv_served", book.wrong_kv, "blocks", better="lower", samples=[], command=COMMAND, **against)


if __name__ == "__main__":
    sys.exit(main())
