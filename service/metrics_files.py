"""All processes' values as one scrape. What dead processes counted goes into one file, their gauges are forgotten."""

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.metrics_folder import DEAD, alone_in, enter, fill, is_alive, owner_of

_counting: list[Path] = []


def count_into(folder: Path) -> None:
    """Metrics made from now on write to this process's own files in `folder`. The same for the whole process."""
    if _counting == [folder]:
        return
    assert not _counting, f"this process counts into {_counting[0]} already"
    _counting.append(folder)
    identity = enter(folder)
    values.ValueClass = values.MultiProcessValue(lambda: identity)  # type: ignore[no-untyped-call]


class FolderCollector(Collector):
    """Adds up the files of `folder` at each scrape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        with alone_in(self._folder):
            fold_dead(self._folder)
            files = [str(path) for path in self._folder.glob("*.db") if _has_content(path)]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
            return list(merged)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # gauges of a process that has just begun anew
        return False


def fold_dead(folder: Path) -> None:
    """So that a worker that dies again and again leaves one file and not thousands. `folder` is the caller's alone."""
    alive: dict[str, bool] = {}
    for path in sorted(folder.glob("*.db")):
        owner = owner_of(path)
        if owner == DEAD:
            continue
        if owner not in alive:
            alive[owner] = is_alive(folder, owner)
        if alive[owner]:
            continue
        if not path.name.startswith("gauge"):
            _add(path, folder / f"{path.stem.partition('_')[0]}_{DEAD}.db")
        path.unlink()


def _add(source: Path, target: Path) -> None:
    """Add the values of one file to those of another, which appears complete or not at all."""
    sums: dict[str, float] = {}
    for path in (target, source):
        if path.exists() and path.stat().st_size:
            for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                sums[key] = sums.get(key, 0.0) + value
    scratch = target.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    fill(scratch)
    written = MmapedDict(str(scratch))  # type: ignore[no-untyped-call]
    for key, value in sums.items():
        written.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    written.close()  # type: ignore[no-untyped-call]
    os.replace(scratch, target)
