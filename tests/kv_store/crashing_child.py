"""A process that works on a KV folder until it dies: `crashing_child.py FOLDER CAP SEED DIE_AT`.

It kills itself with SIGKILL right before the DIE_AT-th time that Python opens, renames, truncates or removes a file
(0: never; then it holds a reader, says so, and waits to be killed). All it does follows from SEED.
"""

import os
import random
import signal
import sys
from pathlib import Path

from engine.errors import KVMissing, StorageFull
from engine.kv_store import DiskLimits, LocalKVStore
from tests.kv_store.kv_data import LAYOUT, assert_right, chain, write_layers

DOCUMENTS = [(seed, (1 + seed % 3) * 4096 - 100 * (seed % 2)) for seed in range(6)]
SHARED = 4096


def document(number: int) -> list:
    seed, num_tokens = DOCUMENTS[number]
    return chain(num_tokens, seed=seed, shared=SHARED)


def die_at(count: int) -> None:
    seen = 0

    def hook(event: str, _: tuple) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.truncate", "os.remove"):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def work(store: LocalKVStore, rng: random.Random) -> None:
    number = rng.randrange(len(DOCUMENTS))
    links, name = document(number), f"doc {number}"
    action = rng.choice(["write", "write", "write", "read", "release", "suspend", "sweep"])
    try:
        if action in ("write", "suspend"):
            first = store.match(links)
            writer = store.open_writer(links, first=first, owner=f"job {number}")
            start = min(writer.groups_done() * LAYOUT.layers_per_group, LAYOUT.num_layers)
            stop = LAYOUT.num_layers if action == "write" else rng.randint(start, LAYOUT.num_layers)
            write_layers(writer, links[first:], range(start, stop))
            if action == "suspend":
                writer.suspend()
                return
            writer.commit()
            store.attach(links, name, ttl_s=None, pinned=False)
        elif action == "read":
            reader = store.open_reader(links)
            assert_right(reader, links)
            reader.close()
        elif action == "release":
            store.release(name)
        else:
            store.sweep()
    except (StorageFull, KVMissing):
        pass


def main() -> None:
    folder, cap_bytes, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if count:
        die_at(count)
    store = LocalKVStore(folder, LAYOUT, DiskLimits(cap_bytes), host_bytes=64 * 1024)
    rng = random.Random(seed)
    if count:
        while True:
            work(store, rng)
    links = document(0)
    reader = store.open_reader(links)
    print("reading", flush=True)
    signal.pause()
    reader.close()


if __name__ == "__main__":
    main()
