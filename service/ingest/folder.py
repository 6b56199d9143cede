"""Reading a directory on disk: links are named and not followed, devices not opened, ignored trees not entered."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from service.ingest.base import IngestError
from service.ingest.git_index import LINK_MODE, tracked_paths
from service.ingest.ignore import IgnoreRules
from service.ingest.names import VCS_FOLDERS
from service.ingest.spool import Budget, Entry, Spool

MAX_INDEX_BYTES = 256 * 1024 * 1024


def read_folder(
    root: Path, spool: Spool, budget: Budget, rules: IgnoreRules | None, ignored: list[str]
) -> Iterator[tuple[list[str], Entry]]:
    """(path parts, entry) of each file below `root`. With `rules`, ignore files are added to them as they are met and
    what they leave out goes to `ignored`: whole directories end with a slash. Tracked files are never ignored."""
    tracked = _tracked(root) if rules is not None else {}
    tracked_folders = {"/".join(p.split("/")[:i]) for p in tracked for i in range(1, p.count("/") + 1)}
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        try:
            listing = sorted(os.scandir(root / directory), key=lambda item: item.name)
        except OSError as error:
            if not directory:
                raise IngestError("not_found", f"the directory can't be read: {error.strerror}") from error
            yield directory.split("/"), Entry(path="", reason="unreadable", detail=error.strerror)
            continue
        if rules is not None:
            _add_rules(rules, root, directory, listing)
        if not listing and directory:
            yield directory.split("/"), Entry(path="", reason="directory")
        for item in listing:
            path = f"{directory}/{item.name}" if directory else item.name
            if item.is_dir(follow_symlinks=False):
                if item.name.lower() in VCS_FOLDERS:
                    continue
                if rules is not None and rules.ignores_directory(path) and path not in tracked_folders:
                    ignored.append(path + "/")
                else:
                    waiting.append(path)
                continue
            if rules is not None and path not in tracked and rules.ignores_file(path):
                ignored.append(path)
                continue
            budget.add_entry()
            entry = _read_file(root / path, item, spool, budget)
            entry.tracked = path in tracked
            yield path.split("/"), entry
    for path, (mode, commit) in tracked.items():
        if mode == LINK_MODE and not _holds_files(root / path):
            entry = Entry(path="", reason="submodule_missing", detail=commit)
            entry.warn("submodule_missing", commit=commit)
            yield path.split("/"), entry


def _read_file(path: Path, item: "os.DirEntry[str]", spool: Spool, budget: Budget) -> Entry:
    entry = Entry(path=item.name)
    if item.is_symlink():
        entry.reason, entry.detail = "symlink", os.readlink(path)
        return entry
    if not item.is_file(follow_symlinks=False):
        entry.reason = "special_file"
        return entry
    try:
        # Between listing and opening the file may have become a link or a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                entry.reason = "special_file"
                return entry
            budget.input_bytes += os.fstat(descriptor).st_size
            spool.add(entry, file, budget.add_bytes)
    except OSError as error:
        return Entry(path=item.name, reason="unreadable", detail=error.strerror)
    return entry


def _add_rules(rules: IgnoreRules, root: Path, directory: str, listing: "list[os.DirEntry[str]]") -> None:
    if not directory:
        exclude = root / ".git" / "info" / "exclude"
        if exclude.is_file():
            rules.add("", exclude.read_bytes()[: 1 << 20])
    if any(item.name == ".gitignore" and item.is_file(follow_symlinks=False) for item in listing):
        with open(root / directory / ".gitignore", "rb") as file:
            rules.add(directory, file.read(1 << 20))


def _tracked(root: Path) -> dict[str, tuple[int, str]]:
    index = root / ".git" / "index"
    if not index.is_file() or index.stat().st_size > MAX_INDEX_BYTES:
        return {}
    return tracked_paths(index.read_bytes())


def _holds_files(path: Path) -> bool:
    return path.is_dir() and any(os.scandir(path))
