"""A long repository over REST: `python -m loadtests.rest_gpu --model FOLDER [--tokens 1048576]`.

A real `foreword serve` on the GPU with weights of Llama-3-8B's shapes (loadtests/shaped_model.py) and the default
tokeniser. A zip archive of installed Python sources is uploaded with the openai client; once it is processed two
questions are asked in a stream, the first with KV read back from the store, the second with KV that the device holds.

`rest_ttft_1m_s` is what a client sees: from the upload's request to the first text of the first answer. The server's
own cold TTFT (from upload complete until the last row's logits are there and its KV is kept) is compared with the
engine by itself: after the server has ended this process opens the engine with the same settings and an empty store of
the same kind, and prefills the same tokens. `rest_overhead_1m` is (cold TTFT − ingest − engine) ÷ engine.

`--device cpu --tokens 8000 --model default` runs the same small.
"""

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from tokenizers import Tokenizer

from engine.chain import TokenIds
from engine.model_folder import resolve_model
from loadtests.http.scrape import Scrape, scrape
from loadtests.http.server import LocalServer
from loadtests.results import commit, write_entry
from service.settings import GIB, Settings

COMMAND = "python -m loadtests.rest_gpu"
QUESTIONS = ("Which module of this repository parses command lines?", "What does this repository do?")
PACKAGES = ("torch", "transformers", "triton", "numpy")  # sources behind the standard library's
LARGEST_FILE = 300_000  # bytes: larger ones are tables, not code
SLACK = 2000  # tokens: a file that would add more than so many too much is passed over
POLL_S = 0.1
TOLD_S = 5.0
WAIT_S = 1500.0
STAGE_S = "foreword_time_to_first_token_stage_seconds_sum"
STAGES = ("ingest", "queue", "prefill", "kv_store")


@dataclass(frozen=True)
class Answered:
    """Seconds from the request to the first text and to the end; what the server says of it."""

    ttft_s: float
    seconds: float
    cache_state: str
    server_ttft_s: float
    prompt_tokens: int


@dataclass(frozen=True)
class EngineAlone:
    """Seconds from a prefill's start to the last row's logits, and until all KV was kept."""

    to_logits_s: float
    seconds: float
    density: float


def default_sources() -> list[Path]:
    """The standard library, then what packages are installed."""
    paths = sysconfig.get_paths()
    packages = [Path(paths["purelib"]) / name for name in PACKAGES]
    return [Path(paths["stdlib"]), *(folder for folder in packages if folder.is_dir())]


def build_archive(path: Path, sources: Sequence[Path], tokens: int, tokenizer: Tokenizer) -> int:
    """Write a zip of Python files below `sources`, in their order, of at least `tokens` tokens and hardly more; returns
    how many. What ingest says of each file comes on top. Raises ValueError where there are fewer.
    """
    total = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sources:
            for file in _python_files(source):
                text = file.read_text(encoding="utf-8", errors="replace")
                counted = len(tokenizer.encode(text, add_special_tokens=False).ids)
                if total + counted > tokens + SLACK:
                    continue
                archive.writestr(f"repository/{source.name}/{file.relative_to(source)}", text)
                total += counted
                if total >= tokens:
                    return total
    raise ValueError(f"only {total} tokens of Python in {', '.join(map(str, sources))}, expected {tokens}")


def _python_files(folder: Path) -> Iterator[Path]:
    """Without other packages below it, and caches."""
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" not in file.relative_to(folder).parts and 0 < file.stat().st_size <= LARGEST_FILE:
            yield file


class Client:
    """The openai client as it comes, and plain HTTP for what only this service has."""

    def __init__(self, url: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT_S, max_retries=0)
        self._url, self._model = url, self.openai.models.list().data[0].id

    def document(self, file_id: str) -> dict[str, Any]:
        answer = httpx.get(f"{self._url}/v1/documents/{file_id}", timeout=60).raise_for_status()
        document: dict[str, Any] = answer.json()
        return document

    def processed(self, file_id: str) -> float:
        """When the file was processed (time.monotonic). Raises RuntimeError where it can't be, TimeoutError."""
        deadline, told = time.monotonic() + WAIT_S, 0.0
        while (now := time.monotonic()) < deadline:
            file = self.openai.files.retrieve(file_id)
            if file.status == "processed":
                return time.monotonic()
            if file.status == "error":
                raise RuntimeError(f"{file_id} could not be read: {self.document(file_id)['error']}")
            if now - told >= TOLD_S:
                told, document = now, self.document(file_id)
                print(f"  {document['state']} {document['progress']:.0%}, {document['eta_s']} s left", flush=True)
            time.sleep(POLL_S)
        raise TimeoutError(f"{file_id} was not processed in {WAIT_S:.0f} s")

    def ask(self, file_id: str, question: str, *, max_tokens: int) -> Answered:
        """Raises RuntimeError where an answer has no text, openai.OpenAIError."""
        started, first, extras, prompt_tokens = time.monotonic(), None, dict[str, Any](), 0
        content: list[Any] = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
        with self.openai.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            for chunk in stream:
                if first is None and chunk.choices and chunk.choices[0].delta.content:
                    first = time.monotonic() - started
                extras = (chunk.model_extra or {}).get("foreword", extras)
                prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else prompt_tokens
        if first is None:
            raise RuntimeError("the answer has no text")
        seconds = time.monotonic() - started
        return Answered(first, seconds, extras["cache_state"], extras["ttft_s"], prompt_tokens)


def engine_alone(settings: Settings, prefix: TokenIds, folder: Path) -> EngineAlone:
    """The engine's own prefill of `prefix` [tokens] uint32 into an empty store in `folder`, in this process."""
    from engine.device import buffer_memory, device_type
    from engine.engine import open_engine
    from engine.interfaces import KVLayout, PrefillRequest
    from engine.kv_store import DiskLimits, LocalKVStore
    from engine.sparse.settings import chosen_settings

    def open_store(layout: KVLayout) -> LocalKVStore:
        return LocalKVStore(
            folder / "kv",
            layout,
            DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes),
            host_bytes=settings.kv_host_bytes,
            allocate=buffer_memory(settings.device),
        )

    engine = open_engine(
        resolve_model(settings.model, cache_dir=settings.cache_dir),
        open_store,
        device=settings.device,
        dtype=settings.dtype,
        linears=settings.linears,
        kv_dtype=settings.kv_dtype,
        sparse=chosen_settings(device_type=device_type(settings.device)),
    )
    try:
        # One that is short first: a kernel's first launch of a process loads it; the server had it compiled.
        for number, tokens in enumerate((prefix[:16_384], prefix)):
            request = PrefillRequest(tokens=tokens, salt=bytes([number]), owner=f"{number}", holder=f"{number}")
            prefill = engine.start_prefill(request)
            while prefill.step():
                pass
            to_logits_s, result = prefill.seconds_to_logits, prefill.result
        assert to_logits_s is not None
        return EngineAlone(to_logits_s, result.seconds, result.density)
    finally:
        engine.close()
        engine.store.close()  # type: ignore[attr-defined]


def cold_stages(counted: Scrape) -> dict[str, float]:
    """Seconds of each stage of the cold first token."""
    return {stage: round(counted.total(STAGE_S, cache_state="cold", stage=stage), 3) for stage in STAGES}


def figures(
    document: dict[str, Any], stages: dict[str, float], engine: EngineAlone | None, to_first_text_s: float
) -> dict[str, Any]:
    """What stands beside the TTFT: the record's density and recall, and the overhead over the engine, as shares of
    its seconds. `overhead_in_server` is over the engine's part of the server's own prefill; without `engine` all are.
    """
    tokens, cold_s = document["prefix_tokens"], document["cold_ttft_s"]
    own_s = document["stage_seconds"]["prefill"]
    alone_s = own_s if engine is None else engine.seconds
    return {
        "tokens": tokens,
        "density": round(document["density"], 4),
        "mean_keys": round(document["density"] * (tokens + 1) / 2),
        "recall": document["recall"],
        "heads": document["heads"],
        "stages": stages,
        "stage_seconds": document["stage_seconds"],
        "cold_ttft_s": round(cold_s, 3),
        "engine": "in the server" if engine is None else "by itself",
        "engine_s": round(alone_s, 3),
        "engine_to_logits_s": None if engine is None else round(engine.to_logits_s, 3),
        "overhead": round((cold_s - stages["ingest"] - alone_s) / alone_s, 4),
        "overhead_in_server": round((cold_s - stages["ingest"] - own_s) / own_s, 4),
        "overhead_with_ingest": round((cold_s - alone_s) / alone_s, 4),
        "overhead_to_first_text": round((to_first_text_s - alone_s) / alone_s, 4),
    }


def label(tokens: int) -> str:
    """1m, 128k, 8k: of the name of a figure."""
    return f"{tokens >> 20}m" if tokens >= 1 << 20 else f"{round(tokens / 1024)}k"


def warm_up(client: Client, archive: Path, tokens: int, tokenizer: Tokenizer) -> None:
    """Another repository, read, asked about and deleted: kernels are compiled and loaded for all positions before
    anything is timed."""
    build_archive(archive, default_sources()[1:], tokens, tokenizer)
    file = client.openai.files.create(file=archive, purpose="user_data")
    client.processed(file.id)
    client.ask(file.id, QUESTIONS[0], max_tokens=8)
    client.openai.files.delete(file.id)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; returns what was measured. Raises RuntimeError where the document has fewer tokens than asked for."""
    settings = {
        "model": options.model,
        "device": options.device,
        "linears": options.linears,
        "kv_dtype": options.kv_dtype,
        "kv_disk_bytes": int(options.kv_disk_gib * GIB),
        "kv_host_bytes": int(options.kv_host_gib * GIB),
        "resume_bytes": 0,
        "disk_floor_bytes": 0,
    }
    cache_dir = Settings().resolved().cache_dir
    tokenizer = Tokenizer.from_file(
        str(resolve_model(options.model, cache_dir=cache_dir, weights=False) / "tokenizer.json")
    )
    archive = folder / "repository.zip"
    sources = options.source or default_sources()
    counted = build_archive(archive, sources, options.tokens, tokenizer)
    print(f"{archive.stat().st_size / 1e6:.1f} MB of zip, about {counted} tokens", flush=True)
    started = time.monotonic()
    with LocalServer(folder / "server", start_s=options.start_s, **settings) as server:
        print(f"server ready after {time.monotonic() - started:.0f} s", flush=True)
        client = Client(server.url)
        if options.warm_up:
            warm_up(client, folder / "other.zip", options.warm_up, tokenizer)
            print(f"warmed up after {time.monotonic() - started:.0f} s", flush=True)
        before = scrape(server.url)
        asked = time.monotonic()
        file = client.openai.files.create(file=archive, purpose="user_data")
        uploaded_s = time.monotonic() - asked
        processed_s = client.processed(file.id) - asked
        document = client.document(file.id)
        if document["num_tokens"] < options.tokens:
            raise RuntimeError(f"the document has {document['num_tokens']} tokens, expected {options.tokens}")
        answers = [client.ask(file.id, question, max_tokens=options.max_tokens) for question in QUESTIONS]
        stages = cold_stages(scrape(server.url).since(before))
        ids = np.load(next(_tokens_of(server.data_dir, document["num_tokens"])))
    to_first_text_s = processed_s + answers[0].ttft_s
    engine = None
    if options.engine:
        from service.prompt import PromptFormat

        shutil.rmtree(server.data_dir / "kv")  # the room is needed
        prompts = PromptFormat.load(resolve_model(options.model, cache_dir=cache_dir))
        own = Settings(**settings, data_dir=folder).resolved()  # type: ignore[arg-type]
        engine = engine_alone(own, prompts.document_prefix([ids]), folder / "engine")
        print(f"engine: {engine}", flush=True)
    found = {
        "to_first_text_s": round(to_first_text_s, 3),
        "upload_s": round(uploaded_s, 3),
        "processed_s": round(processed_s, 3),
        "upload_bytes": document["bytes"],
        "document_tokens": document["num_tokens"],
        **figures(document, stages, engine, to_first_text_s),
    }
    for name, answer in zip(("first", "second"), answers, strict=True):
        found |= {f"{name}_answer_ttft_s": round(answer.ttft_s, 3), f"{name}_answer_from": answer.cache_state}
    return found


def _tokens_of(data_dir: Path, num_tokens: int) -> Iterator[Path]:
    """The streams of so many tokens among the server's documents."""
    for path in data_dir.glob("documents/*/document/tokens.npy"):
        if len(np.load(path, mmap_mode="r")) == num_tokens:
            yield path


def record(found: dict[str, Any], options: argparse.Namespace) -> None:
    device = None
    if options.device != "cpu":
        import torch

        device = torch.cuda.get_device_name()
    name = label(options.tokens)
    known = {"commit": commit(), "model": Path(options.model).name}
    for figure, key, unit in (("rest_ttft", "to_first_text_s", "s"), ("rest_overhead", "overhead", "share")):
        write_entry(
            f"{figure}_{name}_s" if unit == "s" else f"{figure}_{name}",
            found[key],
            unit,
            better="lower",
            samples=[found[key]],
            command=COMMAND,
            device=device,
            **known,
            **found,
        )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, or 'default'")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the document, at least")
    parser.add_argument("--source", type=Path, nargs="+", help="folders of Python sources; the standard library first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--linears", help="auto or float8; float8 on a GPU")
    parser.add_argument("--kv-dtype", help="auto or float8; float8 on a GPU")
    parser.add_argument("--folder", type=Path, help="where data lies, such as /dev/shm; 68 GiB at a million tokens")
    parser.add_argument("--kv-disk-gib", type=float, default=72.0)
    parser.add_argument("--kv-host-gib", type=float, default=1.0)
    parser.add_argument("--start-s", type=float, default=600.0, help="the server may take so long to be ready")
    parser.add_argument("--warm-up", type=int, metavar="TOKENS", help="read before; as many as --tokens; 0: none")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="don't run the engine by itself")
    parser.add_argument("--dry", action="store_true", help="write no figure into summary.json")
    return parser


def _show_log(path: Path) -> None:
    """What the server had to say: warnings and errors."""
    if path.is_file():
        print(path.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    fast = "auto" if options.device == "cpu" else "float8"
    options.warm_up = options.tokens if options.warm_up is None else options.warm_up
    options.linears, options.kv_dtype = options.linears or fast, options.kv_dtype or fast
    with tempfile.TemporaryDirectory(prefix="foreword-rest-", dir=options.folder) as folder:
        try:
            found = run(options, Path(folder))
        finally:
            _show_log(Path(folder) / "server" / "server.log")
    print(json.dumps(found, indent=2), flush=True)
    if not options.dry:
        record(found, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
