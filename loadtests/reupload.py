"""What a re-upload of a repository reuses, one file changed: by the tokens of both streams and the chain over them.

    python -m loadtests.reupload [--folders engine foreword] [--end-to-end]

The repository is this one, at its commit: about 100,000 tokens. A line is added to its last file, and to its first one,
each ingested with `base`. KV is a chain, so a changed first file comes to stand behind all others, and nothing that was
computed behind it before can be used; from the second change of the same file on nearly all can. `--end-to-end` uploads
a smaller part to a real server and compares what its prefill took from the store with what the chain says.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.chain import segment_chain
from engine.model_folder import resolve_model
from foreword.ingest_command import default_tokenizer_file
from loadtests.http.server import LocalServer
from loadtests.results import write_entry
from service.ingest import Source, ingest
from service.prompt import PromptFormat
from service.settings import Settings

COMMAND = "python -m loadtests.reupload"
ARCHIVE = "repository.tar.gz"
ROOT = Path(__file__).parent.parent
SMALL_FOLDERS = ("engine/kv_store/catalog.py", "engine/kv_store/space.py")  # a segment and a bit


@dataclass(frozen=True)
class Version:
    """One state of the repository, ingested."""

    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def tokens(self) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / "tokens.npy")
        return loaded

    @property
    def paths(self) -> list[str]:
        """Of the files that have tokens, in the stream's order."""
        files = json.loads(self.manifest.read_text("utf-8"))["files"]
        return [row["path"] for row in files if row["status"] == "included" and row["token_end"] > row["token_start"]]


class Repository:
    """A checkout in which one file at a time is changed."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = folder, names
        self.checkout = folder / "repository"
        archive = subprocess.run(["git", "archive", "HEAD", *names], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self.checkout, filter="data")

    def ingested(self, name: str, base: Version | None = None, *, packed: bool = False) -> Version:
        out, source = self._folder / name, Source(self.checkout, "repository")
        if packed:  # as it is uploaded
            source = Source(self._folder / ARCHIVE, ARCHIVE)
            source.path.write_bytes(self.packed())
        ingest(
            [source],
            out,
            kind="repo",
            tokenizer_file=default_tokenizer_file(),
            base_manifest=None if base is None else base.manifest,
        )
        return Version(out)

    def change(self, path: str) -> None:
        """Of the repository's `path` as a manifest names it."""
        file = next(file for file in (self.checkout / path, self.checkout.parent / path) if file.exists())
        with file.open("a", encoding="utf-8") as text:
            text.write("\n# One more line.\n")

    def packed(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            tar.add(self.checkout, "repository")
        return buffer.getvalue()


def reused(prompts: PromptFormat, before: Version, after: Version) -> tuple[int, int]:
    """Leading tokens of the later version's prefix whose segments the earlier one has stored; of how many."""
    old, new = (prompts.document_prefix([version.tokens]) for version in (before, after))
    stored = {segment.key for segment in segment_chain(old, salt=b"s", digest="d")}
    end = 0
    for segment in segment_chain(new, salt=b"s", digest="d"):
        if segment.key not in stored:
            break
        end = segment.end
    return end, len(new)


def measure(prompts: PromptFormat, names: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="reupload-") as scratch:
        repository = Repository(Path(scratch), names)
        first = repository.ingested("first")
        paths = first.paths
        repository.change(paths[-1])
        late = repository.ingested("late", first)
        late_tokens, num_tokens = reused(prompts, first, late)
        repository.change(paths[0])
        early = repository.ingested("early", late)
        early_tokens, _ = reused(prompts, late, early)
        without = repository.ingested("without")
        without_tokens, _ = reused(prompts, late, without)
        repository.change(paths[0])
        again = repository.ingested("again", early)
        again_tokens, again_of = reused(prompts, early, again)
        again_without = repository.ingested("again without")
        without_again_tokens, _ = reused(prompts, without, again_without)
    return {
        "tokens": num_tokens,
        "files": len(paths),
        "late_share": late_tokens / num_tokens,
        "first_file_share": early_tokens / num_tokens,
        "first_file_without_base_share": without_tokens / num_tokens,
        "first_file_again_share": again_tokens / again_of,
        "first_file_again_without_base_share": without_again_tokens / again_of,
    }


def end_to_end(prompts: PromptFormat) -> None:
    """Two uploads to a real server: what the second's prefill took from the store, and what its first answer says."""
    with tempfile.TemporaryDirectory(prefix="reupload-") as scratch:
        folder = Path(scratch)
        repository = Repository(folder, SMALL_FOLDERS)
        first = repository.ingested("first", packed=True)
        with LocalServer(folder / "server") as server, httpx.Client(base_url=server.url, timeout=600) as client:
            base = _upload(client, repository.packed())
            repository.change(first.paths[-1])
            expected, of = reused(prompts, first, repository.ingested("late", first, packed=True))
            changed = _upload(client, repository.packed(), base=base["id"])
            print(f"base: {base['prefix_tokens']} tokens, {base['cached_tokens']} from the store")
            print(f"changed: {changed['prefix_tokens']} tokens, {changed['cached_tokens']} from the store")
            print(f"the chain says: {expected} of {of}")
            if changed["cached_tokens"] != expected or changed["prefix_tokens"] != of:
                raise RuntimeError("the server reused something else than the chain says")


def _upload(client: httpx.Client, data: bytes, *, base: str | None = None) -> dict[str, Any]:
    fields = {"purpose": "user_data", "kind": "repo"} | ({} if base is None else {"base": base})
    file = client.post("/v1/files", data=fields, files={"file": (ARCHIVE, data)}).raise_for_status().json()
    question = {
        "role": "user",
        "content": [
            {"type": "file", "file": {"file_id": file["id"]}},
            {"type": "text", "text": "What is this?"},
        ],
    }
    answer = client.post("/v1/chat/completions", json={"messages": [question], "max_tokens": 4, "model": "default"})
    print(f"usage of the first answer: {answer.raise_for_status().json()['usage']}")
    document: dict[str, Any] = client.get(f"/v1/documents/{file['id']}").raise_for_status().json()
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", nargs="+", default=["engine", "foreword"])
    parser.add_argument("--end-to-end", action="store_true", help="also upload to a real server, at a small scale")
    parser.add_argument("--no-summary", action="store_true", help="print only")
    arguments = parser.parse_args()
    if shutil.which("git") is None:
        print("needs git", file=sys.stderr)
        return 2
    prompts = PromptFormat.load(resolve_model("default", cache_dir=Settings().resolved().cache_dir))
    shares = measure(prompts, tuple(arguments.folders))
    print(json.dumps(shares, indent=2))
    if arguments.end_to_end:
        end_to_end(prompts)
    if not arguments.no_summary:
        for name, share in (
            ("reupload_reuse_late_share", "late_share"),
            ("reupload_reuse_base_share", "first_file_share"),
            ("reupload_reuse_base_again_share", "first_file_again_share"),
        ):
            value = round(shares[share], 4)
            write_entry(name, value, "share", better="higher", samples=[], command=COMMAND, shares=shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
