"""The kinds of fault. Each function injects one, at random, and leaves the store whole."""

import errno
import os
import shutil
import time

from engine.chain import Segment
from loadtests.kv_documents import write
from loadtests.kv_faults.bench import DOCUMENTS, LAYOUT, Bench
from loadtests.kv_faults.processes import Other
from loadtests.kv_faults.shim import Calls, Files, Kind

_CALLS_OF_A_WRITER = Calls.OPEN | Calls.WRITE | Calls.SYNC | Calls.TRUNCATE | Calls.RENAME


def bit_flip(bench: Bench) -> None:
    """On the disk, on the way to it, or on the way from it."""
    where = bench.rng.choice(["disk", "disk", "write", "read"])
    links = bench.absent_document() if where == "write" else bench.stored_document()
    with bench.fault("bit_flip", links) as placed:
        if where == "disk":
            path = bench.rng.choice(bench.files_of(links))
            with path.open("r+b") as file:
                offset = bench.rng.randrange(path.stat().st_size)
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ (1 << bench.rng.randrange(8))]))
            placed(f"{path.name} at {offset}")
        elif where == "write":
            bench.shim.arm(Kind.FLIP, Files.BLOCKS, Calls.WRITE, after=_some_write(bench, links), seed=_seed(bench))
            write(bench.store, links, owner="bench")
        else:
            after = bench.rng.randrange(2 * LAYOUT.num_layers * len(links))  # a header and the data of each layer
            bench.shim.arm(Kind.FLIP, Files.BLOCKS, Calls.READ, after=after, seed=_seed(bench))
            bench.read("bit_flip", links)


def truncation(bench: Bench) -> None:
    """Of a published file, found by a reader or when the folder is opened."""
    links = bench.stored_document()
    with bench.fault("truncation", links) as placed:
        path = bench.rng.choice(bench.files_of(links))
        opened_later = bench.rng.random() < 0.2
        if opened_later:
            bench.store.close()
        os.truncate(path, bench.rng.randrange(path.stat().st_size))
        placed()
        if opened_later:
            bench.open()


def torn_write(bench: Bench) -> None:
    """The disk says that all was written, and part of it was."""
    links = bench.absent_document()
    with bench.fault("torn_write", links):
        times = bench.rng.randint(1, 3)
        after = _some_write(bench, links)
        bench.shim.arm(Kind.TORN, Files.BLOCKS, Calls.WRITE, after=after, times=times, seed=_seed(bench))
        write(bench.store, links, owner="bench")


def stale_index(bench: Bench) -> None:
    """The index says what is no longer, or never was, in the files."""
    links = bench.stored_document()
    kind = bench.rng.choice(["older", "gone", "another's", "swapped"])
    with bench.fault("stale_index", links, reopen=True) as placed:
        if kind == "older":
            _restore_older_index(bench)
        elif kind == "gone":
            bench.rng.choice(bench.files_of(links)).unlink()
        elif kind == "another's":
            target, source = (
                bench.rng.choice(bench.files_of(links)),
                bench.rng.choice(bench.files_of(bench.stored_document())),
            )
            if target.exists():  # storing the other one may have pushed it out
                shutil.copyfile(source, target)
        else:
            with bench.store.catalog.index.transaction() as db:
                ids = db.execute(
                    "SELECT id, key FROM copies WHERE state = 'stored' ORDER BY random() LIMIT 2"
                ).fetchall()
                db.execute("UPDATE copies SET key = 'x' WHERE id = ?", (ids[0][0],))
                db.execute("UPDATE copies SET key = ? WHERE id = ?", (ids[0][1], ids[1][0]))
                db.execute("UPDATE copies SET key = ? WHERE id = ?", (ids[1][1], ids[0][0]))
        placed(kind)


def _restore_older_index(bench: Bench) -> None:
    """A backup of the index alone comes back: its copies have been replaced since."""
    bench.store.close()
    index = bench.folder / "index.sqlite3"
    backup = index.with_suffix(".backup")
    shutil.copyfile(index, backup)
    bench.open()
    for _ in range(2):
        write(bench.store, bench.absent_document(), owner="bench")
    bench.store.close()
    for suffix in ("-wal", "-shm"):
        index.with_name(index.name + suffix).unlink(missing_ok=True)
    backup.replace(index)
    bench.open()


def no_space(bench: Bench) -> None:
    _failing_disk(bench, "enospc", errno.ENOSPC, _CALLS_OF_A_WRITER)


def io_error(bench: Bench) -> None:
    _failing_disk(bench, "eio", errno.EIO, _CALLS_OF_A_WRITER | Calls.READ | Calls.UNLINK)


def _failing_disk(bench: Bench, name: str, code: int, calls: Calls) -> None:
    """Some call of some kind fails once, a few times, or until the disk is mended."""
    rng = bench.rng
    reads = bool(calls & Calls.READ) and rng.random() < 0.4
    links = bench.stored_document() if reads else bench.absent_document()
    files = rng.choice([Files.BLOCKS, Files.BLOCKS, Files.INDEX])
    chosen = rng.choice([call for call in Calls if call & calls])
    with bench.fault(name, links):
        times = rng.choice([1, 1, 3, 1_000_000])
        bench.shim.arm(Kind.FAIL, files, chosen, after=rng.randrange(12), times=times, argument=code)
        if reads:
            bench.read(name, links)
        else:
            write(bench.store, links, owner="bench")
        bench.absent_document(beside=links)


def slow_disk(bench: Bench) -> None:
    rng = bench.rng
    links = bench.absent_document()
    with bench.fault("slow_disk", links):
        calls = rng.choice([Calls.READ, Calls.WRITE, Calls.SYNC, Calls.RENAME, _CALLS_OF_A_WRITER | Calls.READ])
        pause_ms, times = rng.randint(5, 40), rng.randint(1, 4)
        bench.shim.arm(
            Kind.SLOW, Files.BLOCKS | Files.INDEX, calls, after=rng.randrange(8), times=times, argument=pause_ms
        )
        write(bench.store, links, owner="bench")
        bench.read("slow_disk", links)


def two_writers(bench: Bench, peer: Other) -> None:
    """Another process writes the same document at the same time, and ends well or not."""
    rng = bench.rng
    number = rng.randrange(len(DOCUMENTS))
    links = DOCUMENTS[number]
    bench.store.attach(links, "absent", ttl_s=None, pinned=False)
    bench.store.release("absent")
    ending = rng.choice(["commit", "commit", "commit", "suspend", "abort"])
    with bench.fault("two_writers", links) as placed:
        peer.send(number, rng.choice(["bench", "peer"]), ending)
        peer.answer()
        time.sleep(rng.choice([0.0, 0.0, rng.random() * 0.003]))
        try:
            write(bench.store, links, owner="bench")
        finally:
            bench.counters.add("duplicate_segments", amount=peer.answer())
        placed()


def kill_in_write(bench: Bench, victims: Other) -> None:
    _kill(bench, victims, "kill_in_write", Calls.WRITE)


def kill_elsewhere(bench: Bench, victims: Other) -> None:
    _kill(bench, victims, "kill_elsewhere", Calls.OPEN | Calls.SYNC | Calls.TRUNCATE | Calls.RENAME | Calls.UNLINK)


def _kill(bench: Bench, victims: Other, name: str, calls: Calls) -> None:
    """SIGKILL of a process with a store of its own, while this one's is open, or before it is."""
    rng = bench.rng
    links = bench.document()
    with bench.fault(name, links, always=True) as placed:
        closed = rng.random() < 0.3
        if closed:
            bench.store.close()
        files = rng.choice([Files.BLOCKS, Files.BLOCKS, Files.INDEX])
        victims.send(_seed(bench), files, calls, rng.randrange(40))
        killed = victims.answer()
        if closed:
            bench.open()
        else:
            bench.store.sweep()
        if killed:
            placed()
        for other in rng.sample(DOCUMENTS, 3):
            bench.read(name, other)


def _some_write(bench: Bench, links: list[Segment]) -> int:
    return bench.rng.randrange((LAYOUT.num_layers + LAYOUT.num_groups) * len(links))


def _seed(bench: Bench) -> int:
    return bench.rng.getrandbits(63)
