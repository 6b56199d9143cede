"""Git bundles, read through git's own plumbing in a bare repository of ours.

Only `index-pack`, `ls-tree` and `cat-file` run: nothing is checked out, no hook, filter, attribute, submodule or
configuration of the bundle has a say, and nothing is fetched.
"""

import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.ingest.base import IngestError
from service.ingest.spool import Budget, Entry, Spool

MAX_HEADER_BYTES = 4 * 1024 * 1024
OBJECT_ID = re.compile(rb"^[0-9a-f]{40}(?:[0-9a-f]{24})?$")
CONFIG = [
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "gc.auto=0",
    "-c",
    "maintenance.auto=false",
    "-c",
    "protocol.allow=never",
    "-c",
    "core.packedGitLimit=128m",
    "-c",
    "core.bigFileThreshold=8m",
    "-c",
    "pack.threads=1",
    "-c",
    "pack.windowMemory=64m",
]
# What an unlabelled bundle is read from, in this order; then its first branch, then its first reference.
DEFAULT_REFERENCES = ("HEAD", "refs/heads/main", "refs/heads/master")


@dataclass
class BundleHeader:
    capabilities: list[str] = field(default_factory=list)
    prerequisites: list[str] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)  # name → object id
    pack_offset: int = 0

    @property
    def object_format(self) -> str:
        return next((c.partition("=")[2] for c in self.capabilities if c.startswith("object-format=")), "sha1")

    def choose(self) -> tuple[str, str]:
        """(reference, object id) of the tree to read."""
        for name in DEFAULT_REFERENCES:
            if name in self.references:
                return name, self.references[name]
        for name, object_id in self.references.items():
            if name.startswith("refs/heads/"):
                return name, object_id
        return next(iter(self.references.items()))


def read_header(path: Path) -> BundleHeader:
    """The text part of a bundle (v2 and v3). Raises IngestError archive_corrupt."""
    header = BundleHeader()
    with open(path, "rb") as file:
        file.readline()
        while True:
            line = file.readline(MAX_HEADER_BYTES)
            if not line.endswith(b"\n") or file.tell() > MAX_HEADER_BYTES:
                raise IngestError("archive_corrupt", "the git bundle's header is cut off")
            if line == b"\n":
                break
            body = line[:-1]
            if body.startswith(b"@"):
                header.capabilities.append(body[1:].decode("utf-8", "replace"))
                continue
            object_id, _, rest = body.lstrip(b"-").partition(b" ")
            if not OBJECT_ID.match(object_id):
                raise IngestError("archive_corrupt", "the git bundle's header is damaged")
            if body.startswith(b"-"):
                header.prerequisites.append(object_id.decode())
            else:
                header.references[rest.decode("utf-8", "surrogateescape")] = object_id.decode()
        header.pack_offset = file.tell()
    return header


def read_git_bundle(path: Path, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
    """Files of the chosen commit's tree. A note on which reference was read is the first entry's warning.

    Raises IngestError archive_corrupt, bundle_missing_prerequisite, empty_input, unsupported_format (git isn't there).
    """
    git = shutil.which("git")
    if git is None:
        raise IngestError("unsupported_format", "reading a git bundle needs git, which isn't installed here")
    header = read_header(path)
    if not header.references:
        raise IngestError("empty_input", "the git bundle names no branch")
    if header.prerequisites:
        raise IngestError(
            "bundle_missing_prerequisite",
            f"the git bundle builds on {len(header.prerequisites)} commits that it doesn't hold "
            f"({header.prerequisites[0][:12]}…); make it with `git bundle create FILE HEAD`",
        )
    repository = Repository(git, spool.folder / f"git{spool._files}", header.object_format)
    repository.index_pack(path, header.pack_offset)
    reference, object_id = header.choose()
    first = True
    for parts, entry in repository.tree(object_id, spool, budget):
        if first and reference != "HEAD":
            entry.warn("bundle_without_head", reference=reference)
        first = False
        yield parts, entry


class Repository:
    """A bare repository of ours. Every call runs git with our configuration only."""

    def __init__(self, git: str, folder: Path, object_format: str) -> None:
        self.git, self.folder = git, folder
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "GIT_DIR": str(folder),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "LC_ALL": "C",
        }
        folder.mkdir()
        # The flag is newer than git's default format; without it older versions read what they can.
        wanted = [] if object_format == "sha1" else [f"--object-format={object_format}"]
        self._run("init", "--bare", "--quiet", "--template=", *wanted)

    def _command(self, *arguments: str) -> list[str]:
        return [self.git, *CONFIG, *arguments]

    def _run(self, *arguments: str, stdin: io.BufferedReader | None = None) -> bytes:
        done = subprocess.run(
            self._command(*arguments),
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            cwd=self.folder,
            check=False,
        )
        if done.returncode != 0:
            message = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise IngestError(
                "archive_corrupt", f"git can't read the bundle: {message[-1][:300] if message else 'failed'}"
            )
        return done.stdout

    def index_pack(self, bundle: Path, offset: int) -> None:
        with open(bundle, "rb") as file:
            os.lseek(file.fileno(), offset, os.SEEK_SET)
            self._run("index-pack", "--stdin", "--threads=1", stdin=file)

    def tree(self, object_id: str, spool: Spool, budget: Budget) -> Iterator[tuple[list[str], Entry]]:
        listing = self._run("ls-tree", "-r", "-z", "--full-tree", f"{object_id}^{{tree}}")
        rows = [row for row in listing.split(b"\0") if row]
        budget.add_entry(len(rows))
        with subprocess.Popen(
            self._command("cat-file", "--batch"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            cwd=self.folder,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for row in rows:
                meta, _, raw_name = row.partition(b"\t")
                mode, _, blob = meta.decode().split(" ", 2)
                parts = [p for p in raw_name.decode("utf-8", "surrogateescape").split("/") if p not in ("", ".", "..")]
                entry = Entry(path="", tracked=True)
                if mode == "160000":
                    entry.reason, entry.detail = "submodule_missing", blob
                    entry.warn("submodule_missing", commit=blob)
                else:
                    process.stdin.write(blob.encode() + b"\n")
                    process.stdin.flush()
                    _read_blob(process.stdout, entry, spool, budget, is_link=mode == "120000")
                if parts:
                    yield parts, entry
            process.stdin.close()


def _read_blob(out: Any, entry: Entry, spool: Spool, budget: Budget, *, is_link: bool) -> None:
    fields = out.readline().split()
    if len(fields) != 3:
        entry.reason = "missing_object"
        return
    blob = _Bounded(out, int(fields[2]))
    if is_link:
        entry.reason, entry.detail = "symlink", blob.read(4096).decode("utf-8", "surrogateescape")
        while blob.read(65536):
            pass
    else:
        spool.add(entry, blob, budget.add_bytes)
    out.read(1)


class _Bounded:
    """The next `size` bytes of a stream, as a stream."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stream.read(min(size, self._left))
        if not data and self._left:
            raise IngestError("archive_corrupt", "git ended in the middle of a file of the bundle")
        self._left -= len(data)
        return data
