"""`foreword ask`: ingest, prefill and answer in this process, with progress bars; KV is kept in the data folder."""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from engine.chain import TokenIds
from engine.device import buffer_memory, device_type
from engine.engine import LocalEngine, open_engine
from engine.interfaces import AnswerRequest, Fidelity, KVLayout, PrefillRequest, PrefillResult, SamplingParams
from engine.kv_store import DiskLimits, Keyring, LocalKVStore
from engine.model_folder import length_warning, resolve_model, trained_tokens
from engine.sparse.settings import chosen_settings
from service.ingest import IngestLimits, IngestOptions, Kind, Source, ingest
from service.prompt import Message, PromptFormat
from service.salt import load_secret, tenant_salt
from service.settings import Settings

_TENANT = "default"
_console = Console(stderr=True)


def ask_command(
    path: Path, question: str, *, kind: Kind, fidelity: Fidelity, max_tokens: int, settings: Settings
) -> None:
    """Answer on standard output, progress and figures on standard error."""
    started = time.perf_counter()
    with _console.status("loading the model"):
        folder = resolve_model(settings.model, cache_dir=settings.cache_dir)
        prompts = PromptFormat.load(folder)
        stores: list[LocalKVStore] = []
        engine = _open(folder, settings, stores)
    try:
        name, document = _read(path, kind, folder / "tokenizer.json", settings)
        prompt = prompts.chat_prompt([Message("user", question)], [document])
        if warning := length_warning(len(prompt.prefix_ids), trained_tokens(settings.model)):
            _console.print(f"warning: {warning}", highlight=False)
        salt = tenant_salt(load_secret(settings.data_dir), _TENANT)
        read = _prefill(engine, prompt.prefix_ids, salt=salt, name=name, fidelity=fidelity)
        request = AnswerRequest(
            prompt.prefix_ids,
            prompt.question_ids,
            salt,
            SamplingParams(max_tokens=max_tokens, repetition_penalty=1.1),
            fidelity,
        )
        first_s = _answer(engine, request, started)
    finally:
        stores[0].close()
    _console.print(_summary(read, first_s), highlight=False)


def _open(folder: Path, settings: Settings, stores: list[LocalKVStore]) -> LocalEngine:
    def open_store(layout: KVLayout) -> LocalKVStore:
        limits = DiskLimits(settings.kv_disk_bytes, settings.disk_floor_bytes)
        keyring = None if settings.kv_key_file is None else Keyring.load(settings.kv_key_file)
        kv = settings.data_dir / "kv"
        stores.append(
            LocalKVStore(
                kv,
                layout,
                limits,
                host_bytes=settings.kv_host_bytes,
                keyring=keyring,
                allocate=buffer_memory(settings.device),
            )
        )
        return stores[0]

    return open_engine(
        folder,
        open_store,
        resume_dir=settings.data_dir / "resume",
        resume_bytes=settings.resume_bytes,
        checkpoint_s=settings.checkpoint_s,
        device=settings.device,
        dtype=settings.dtype,
        linears=settings.linears,
        kv_dtype=settings.kv_dtype,
        kv_way=settings.kv_way,
        threads=settings.threads,
        sparse=chosen_settings(settings.sparse_policy, settings.head_config, device_type=device_type(settings.device)),
    )


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(40),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=_console,
    )


def _read(path: Path, kind: Kind, tokenizer_file: Path, settings: Settings) -> tuple[str, TokenIds]:
    """(content hash, tokens) of what lies at `path`. Raises IngestError."""
    limits = IngestLimits(memory_bytes=settings.ingest_memory_bytes, timeout_s=settings.ingest_timeout_s)
    with tempfile.TemporaryDirectory(prefix="foreword-ask-") as out, _bars() as bars:
        bar = bars.add_task("ingest", total=1.0)
        summary = ingest(
            [Source(path, path.resolve().name)],
            Path(out),
            kind=kind,
            tokenizer_file=tokenizer_file,
            limits=limits,
            options=IngestOptions(),
            base_manifest=None,
            progress=lambda fraction, stage: bars.update(bar, completed=fraction),
        )
        bars.update(bar, completed=1.0)
        return summary.content_hash, np.load(Path(out) / "tokens.npy")


def _prefill(
    engine: LocalEngine, prefix: TokenIds, *, salt: bytes, name: str, fidelity: Fidelity
) -> PrefillResult | None:
    """None where all of its KV is stored already."""
    if engine.cached_tokens(prefix, salt=salt, fidelity=fidelity) == len(prefix):
        return None
    holder = f"ask:{name[:24]}:{fidelity}"
    prefill = engine.start_prefill(PrefillRequest(prefix, salt, owner=holder, holder=holder, fidelity=fidelity))
    try:
        with _bars() as bars:
            bar = bars.add_task("prefill", total=1.0)
            while prefill.step():
                bars.update(bar, completed=prefill.progress)
            bars.update(bar, completed=1.0)
    except KeyboardInterrupt:
        prefill.suspend()
        _console.print("interrupted; asked again it goes on from here")
        raise SystemExit(130) from None
    return prefill.result


def _answer(engine: LocalEngine, request: AnswerRequest, started: float) -> float:
    """Stream the answer to standard output; seconds from the command's start to the first token."""
    answer = engine.start_answer(request)
    first_s = None
    try:
        while True:
            delta = answer.step()
            first_s = first_s or time.perf_counter() - started
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.finish_reason is not None:
                print()
                return first_s
    finally:
        answer.close()


def _summary(read: PrefillResult | None, first_s: float) -> str:
    if read is None:
        return f"TTFT {first_s:.2f} s with loading the model, warm: all KV was stored"
    parts = [
        f"TTFT {first_s:.2f} s with loading the model, {'cold' if read.cached_tokens == 0 else 'partial'}",
        f"{read.num_tokens:,} tokens prefilled in {read.seconds:.2f} s, {read.cached_tokens:,} of them from stored KV",
        f"density {read.density:.3f}",
    ]
    if read.recall is not None:
        recall = read.recall
        parts.append(f"recall mean {recall.mean:.3f}, p5 {recall.p5:.3f}, worst {recall.worst:.3f}")
        if recall.below_target:
            parts.append(f"below the target of {recall.target:.2f} in places")
    return " · ".join(parts)
