"""From sources to a flat list of entries: archives opened, mails taken apart, litter dropped, ignore rules applied."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from service.ingest.base import IngestError, IngestLimits, IngestOptions, Kind, Source
from service.ingest.folder import MAX_INDEX_BYTES, read_folder
from service.ingest.git_bundle import read_git_bundle
from service.ingest.git_index import LINK_MODE, tracked_paths
from service.ingest.ignore import IgnoreRules
from service.ingest.kinds import SOURCE_SUFFIXES, folder_kind, kind_of_names
from service.ingest.names import display_name, is_junk, is_vcs, natural_key
from service.ingest.sniff import ARCHIVES, may_hold_files, refine_zip
from service.ingest.spool import Budget, Entry, Spool
from service.ingest.tar_archive import read_compressed, read_plain_tar
from service.ingest.zip_archive import read_zip

INSIDE = "!/"  # between a container and what is in it: `mail.eml!/annex.pdf`
# Faults that end the whole ingest, however deep inside they show.
FATAL = frozenset({"archive_bomb", "too_many_entries"})
MAIL_SUFFIXES = frozenset({".eml", ".mbox", ".mbx", ".msg", ".emlx"})
MAIL_HEADERS = re.compile(
    rb"\A(?:From [^\n]{3,200}\r?\n)?(?:(?:[A-Za-z][A-Za-z0-9-]{0,60}:[^\n]{0,2000}|[ \t][^\n]{0,2000})\r?\n){3,}"
)
MSG_STREAM = "__properties_version1.0".encode("utf-16-le")


@dataclass
class Attachment:
    name: str
    file: Path


@dataclass
class Opened:
    """What was inside a mail or a document, and the text that a mail was turned into."""

    text: str
    attachments: list[Attachment] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)


class Opener(Protocol):
    def __call__(self, file: Path, name: str, format: Literal["mail", "embedded"]) -> Opened:
        """Raises IngestError."""
        ...


@dataclass
class Collection:
    kind: Kind
    entries: list[Entry]
    ignored: list[str]
    warnings: list[dict[str, Any]]


class Collector:
    """Reads sources into the spool. Entries come out sorted, with unique paths."""

    def __init__(
        self,
        spool: Spool,
        limits: IngestLimits,
        options: IngestOptions,
        open_file: Opener,
        progress: Callable[[float, str], None],
    ) -> None:
        self.spool, self.limits, self.options = spool, limits, options
        self.open_file, self.progress = open_file, progress
        self.budget = Budget(max_bytes=limits.max_unpacked_bytes, max_entries=limits.max_entries)
        self.entries: dict[str, Entry] = {}
        self.ignored: list[str] = []
        self.warnings: list[dict[str, Any]] = []
        self.rules = IgnoreRules()

    def collect(self, sources: Sequence[Source], kind: Kind) -> Collection:
        """Raises IngestError: see the archives' modules; empty_input if there is nothing at all."""
        if all(s.path.is_file() and s.path.stat().st_size == 0 for s in sources):
            raise IngestError("empty_input", "the input is 0 bytes long")
        self.budget.input_bytes = sum(s.path.stat().st_size for s in sources if s.path.is_file())
        alone = len(sources) == 1
        kinds = {self._add_source(source, kind, alone=alone) for source in sources}
        if kind == "auto":
            kind = "repo" if kinds == {"repo"} else "doc" if kinds == {"doc"} and alone else "bundle"
        if not self.entries:
            raise IngestError("empty_input", "there is no file in the input" + self._ignored_note())
        if kind == "repo":
            self._apply_ignore_rules()
            self._find_submodules()
        else:
            self._expand_all()
        ordered = sorted(self.entries.values(), key=lambda e: (e.sort_key, e.path))
        if not ordered:
            raise IngestError("empty_input", "there is no file in the input" + self._ignored_note())
        return Collection(kind, ordered, self.ignored, self.warnings)

    def _ignored_note(self) -> str:
        return f"; ignore rules leave out {len(self.ignored)}" if self.ignored else ""

    # --- sources -----------------------------------------------------------------------------------------------

    def _add_source(self, source: Source, kind: Kind, *, alone: bool) -> str:
        """Read one source; returns what kind it looks like."""
        name = display_name(source.filename.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or "input")
        self.progress(0.0, name)
        if source.path.is_dir():
            looks = folder_kind(source.path)
            as_repository = kind == "repo" or (kind == "auto" and looks == "repo")
            rules = self.rules if as_repository and not self.options.include_ignored and alone else None
            members = read_folder(source.path, self.spool, self.budget, rules, self.ignored)
            self._take(members, prefix=[] if alone else [name], inside="/")
            return looks
        entry = Entry(path=name)
        with open(source.path, "rb") as file:
            self.spool.add(entry, file)
        if entry.format == "zip":
            assert entry.file is not None
            entry.format = refine_zip(entry.file, name)
        if entry.format not in ARCHIVES:
            parts = [name]
            self._keep(parts, entry)
            return "repo" if PurePosixPath(name).suffix.lower() in SOURCE_SUFFIXES else "doc"
        before = set(self.entries)
        self._take(self._members(entry, name), prefix=[] if alone else [name], inside="/" if alone else INSIDE)
        if entry.format == "git_bundle":
            return "repo"
        return kind_of_names([p for p in self.entries if p not in before] or list(self.entries))

    def _members(self, entry: Entry, name: str) -> Iterator[tuple[list[str], Entry]]:
        assert entry.file is not None
        if entry.format == "zip":
            return read_zip(entry.file, self.spool, self.budget)
        if entry.format == "tar":
            return read_plain_tar(entry.file, self.spool, self.budget)
        if entry.format == "compressed":
            return read_compressed(entry.file, name, self.spool, self.budget)
        if entry.format == "git_bundle":
            return read_git_bundle(entry.file, self.spool, self.budget)
        raise IngestError(
            "unsupported_archive",
            f"{name!r} is an archive of a kind that isn't read; readable are zip, tar (also .gz, .bz2, .xz, .zst)"
            " and git bundles",
        )

    def _take(self, members: Iterator[tuple[list[str], Entry]], *, prefix: list[str], inside: str) -> None:
        """Keep the members of one container. All of them or, where reading fails, none."""
        taken: list[tuple[list[str], Entry]] = []
        for parts, entry in members:
            taken.append((parts, entry))
            if len(taken) % 500 == 0:
                self.progress(0.0, f"{len(taken)} files")
        tracked: dict[str, tuple[int, str]] = {}
        for parts, entry in taken:
            if parts[-2:] == [".git", "index"] and entry.reason is None and entry.size < MAX_INDEX_BYTES:
                found = tracked_paths(b"".join(self.spool.blocks(entry)))
                tracked |= {"/".join([*parts[:-2], path]): row for path, row in found.items()}
        if prefix and inside == INSIDE:
            prefix = [*prefix[:-1], prefix[-1] + "!"]
        for parts, entry in taken:
            entry.tracked = entry.tracked or "/".join(parts) in tracked
            if entry.reason == "directory" or is_junk(parts) or is_vcs(parts):
                continue
            self._keep([*prefix, *parts], entry)
        for path, (mode, commit) in tracked.items():
            if mode == LINK_MODE and not any(e.startswith(path + "/") for e in self.entries):
                entry = Entry(path="", reason="submodule_missing", detail=commit)
                entry.warn("submodule_missing", commit=commit)
                self._keep([*prefix, *path.split("/")], entry)

    def _keep(self, parts: list[str], entry: Entry, *, sort_key: tuple[Any, ...] | None = None) -> None:
        path = "/".join(display_name(p) for p in parts)
        entry.path = path
        entry.sort_key = sort_key or tuple((0, natural_key(p), p) for p in parts)
        if entry.format == "zip" and entry.file is not None and entry.reason is None:
            entry.format = refine_zip(entry.file, path)
        if path in self.entries:
            # As unzip and tar have it: the later one wins. Told on the file, and nothing of the first remains.
            entry.warn("duplicate_path")
        if entry.reason in ("entry_encrypted", "entry_corrupt"):
            entry.warn(entry.reason)
        self.entries[path] = entry

    # --- repositories ------------------------------------------------------------------------------------------

    def _apply_ignore_rules(self) -> None:
        """For archives (a folder's were applied on the way): rules are entries themselves."""
        if self.options.include_ignored:
            return
        for path, entry in self.entries.items():
            if path.rpartition("/")[2] == ".gitignore" and entry.reason is None and entry.format == "text":
                self.rules.add(path.rpartition("/")[0], self.spool.read(entry, 1 << 20))
        for path, entry in list(self.entries.items()):
            if not entry.tracked and self.rules.ignores_file(path):
                self.ignored.append(path)
                del self.entries[path]

    def _find_submodules(self) -> None:
        """Folders that .gitmodules names and that nothing is in: a downloaded zip leaves them empty."""
        for modules_path, modules in list(self.entries.items()):
            if modules_path.rpartition("/")[2] != ".gitmodules" or modules.reason is not None:
                continue
            text = self.spool.read(modules, 1 << 20).decode("utf-8", "replace")
            root = modules_path.rpartition("/")[0]
            for found in re.finditer(r"(?m)^[ \t]*path[ \t]*=[ \t]*\"?([^\"\n\r]+?)\"?[ \t]*$", text):
                path = "/".join(p for p in [root, *found.group(1).split("/")] if p not in ("", ".", ".."))
                if path and path not in self.entries and not any(e.startswith(path + "/") for e in self.entries):
                    entry = Entry(path="", reason="submodule_missing")
                    entry.warn("submodule_missing")
                    self._keep(path.split("/"), entry)

    # --- bundles -----------------------------------------------------------------------------------------------

    def _expand_all(self) -> None:
        waiting = [(entry, 1) for entry in self.entries.values()]
        while waiting:
            entry, depth = waiting.pop()
            if entry.reason is not None or (entry.file is None and entry.format != "text"):
                continue
            before = set(self.entries)
            if entry.format in ARCHIVES:
                self._expand_archive(entry, depth)
            elif self._is_mail(entry):
                self._expand_mail(entry, depth)
            elif entry.file is not None and may_hold_files(entry.format, entry.file):
                self._expand_document(entry, depth)
            waiting += [(self.entries[p], depth + 1) for p in self.entries if p not in before]

    def _expand_archive(self, entry: Entry, depth: int) -> None:
        if depth > self.limits.max_nesting:
            entry.reason = "nested_too_deep"
            return
        before = dict(self.entries)
        try:
            parts = [(key, str(key[2])) for key in entry.sort_key]
            self._take_nested(entry, parts)
            entry.reason = "expanded"
        except IngestError as error:
            if error.code in FATAL:
                raise
            self.entries = before
            entry.reason, entry.detail = error.code, error.message
            entry.warn(error.code)

    def _take_nested(self, entry: Entry, parts: list[tuple[Any, str]]) -> None:
        taken = list(self._members(entry, entry.path))
        for index, (inner, member) in enumerate(taken):
            if member.reason == "directory" or is_junk(inner) or is_vcs(inner):
                continue
            key = (*(k for k, _ in parts), *((0, natural_key(p), p) for p in inner))
            self._keep([entry.path + "!", *inner], member, sort_key=key)
            self.progress(0.0, f"{index} files of {entry.path}")

    def _is_mail(self, entry: Entry) -> bool:
        if entry.rendered:
            return False
        suffix = PurePosixPath(entry.path.rpartition("/")[2]).suffix.lower()
        if entry.format == "ole":
            return suffix == ".msg" or MSG_STREAM in self.spool.read(entry, 1 << 20)
        if entry.format != "text":
            return False
        if suffix in MAIL_SUFFIXES:
            return True
        head = self.spool.read(entry, 65536)
        found = MAIL_HEADERS.match(head)
        return suffix in ("", ".txt", ".mail") and found is not None and _has_mail_headers(found.group())

    def _expand_mail(self, entry: Entry, depth: int) -> None:
        """The mail becomes text, its attachments entries right behind it, in the mail's order."""
        if depth > self.limits.max_nesting:
            entry.warn("nested_too_deep")  # and is read as the text that it is
            return
        file = entry.file
        if file is None:
            file = self.spool.new_file()
            with open(file, "wb") as out:
                for block in self.spool.blocks(entry):
                    out.write(block)
        try:
            mail = self.open_file(file, entry.path, "mail")
        except IngestError as error:
            if error.code in FATAL:
                raise
            entry.reason, entry.detail = error.code, error.message
            return
        rendered = Entry(path=entry.path)
        self.spool.add_bytes(rendered, mail.text.encode())
        entry.format, entry.offset, entry.file = rendered.format, rendered.offset, rendered.file
        entry.rendered, entry.rendered_size = True, rendered.size
        self._keep_inner(entry, mail, depth)

    def _expand_document(self, entry: Entry, depth: int) -> None:
        """Files inside a document become entries right behind it. One that can't be opened says so when it is read."""
        if depth > self.limits.max_nesting:
            entry.warn("nested_too_deep")
            return
        assert entry.file is not None
        try:
            inside = self.open_file(entry.file, entry.path, "embedded")
        except IngestError as error:
            if error.code in FATAL:
                raise
            entry.warn("embedded_unread", cause=error.code)
            return
        self._keep_inner(entry, inside, depth)

    def _keep_inner(self, entry: Entry, opened: Opened, depth: int) -> None:
        for warning in opened.warnings:
            entry.warn(**warning)
        for index, attachment in enumerate(opened.attachments):
            self.budget.add_entry()
            child = Entry(path=attachment.name)
            with open(attachment.file, "rb") as data:
                self.spool.add(child, data, self.budget.add_bytes)
            attachment.file.unlink()
            inner = display_name(attachment.name).replace("/", "_") or f"attachment {index + 1}"
            if depth >= self.limits.max_nesting and child.format in ARCHIVES:
                child.reason = "nested_too_deep"
            path = f"{entry.path}!/{inner}"
            if path in self.entries:
                inner = f"{index + 1} {inner}"
            self._keep([entry.path + "!", inner], child, sort_key=(*entry.sort_key, (1, index, inner)))


def _has_mail_headers(head: bytes) -> bool:
    names = {line.partition(b":")[0].strip().lower() for line in head.splitlines() if b":" in line}
    return (
        bool(names & {b"from", b"sender"})
        and len(names & {b"to", b"date", b"subject", b"message-id", b"received"}) >= 2
    )
