"""The command line. Each command imports what it needs when it runs, so that none waits for torch in vain."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine.threads import share_cores
from foreword.errors import code_of, refuse

app = typer.Typer(
    help="Read a long document once, keep its KV, answer from it.", no_args_is_help=True, add_completion=False
)
cache_app = typer.Typer(help="The stored KV of this data folder.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

# Typer shows wrong usage by exceptions of click, which it may carry under another name.
_UsageError: Any = typer.BadParameter.__bases__[0]

Kind = Literal["auto", "repo", "bundle", "doc"]
FidelityName = Literal["default", "strict", "fast", "exact"]
PolicyName = Literal["adaptive", "dense", "a_shape", "vertical_slash", "block_sparse"]
KindOption = Annotated[Kind, typer.Option(help="What PATH is; auto looks")]
GpusOption = Annotated[int | None, typer.Option(min=1, help="GPUs that compute one document together (FOREWORD_GPUS)")]
FidelityOption = Annotated[
    FidelityName, typer.Option(help="Recall target: default 0.95, strict 0.99, fast 0.90, exact")
]


def main() -> None:
    """Entry point: runs a command; what the user can mend ends with exit status 2 and one line of JSON."""
    share_cores()
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        error.show()
        refuse("usage", error.format_message() or "expected a command")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        code = code_of(error)
        if code is None:
            raise
        refuse(code, str(error))


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (FOREWORD_HOST)")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any (FOREWORD_PORT)")] = None,
    insecure: Annotated[bool, typer.Option(help="Listen beyond loopback without API keys")] = False,
    gpus: GpusOption = None,
) -> None:
    """Serve the HTTP API with one worker, everything kept in FOREWORD_DATA_DIR."""
    from service.serve import serve as run
    from service.settings import Settings

    given: dict[str, object] = {"host": host, "port": port, "insecure": insecure or None, "gpus": gpus}
    run(Settings(**{name: value for name, value in given.items() if value is not None}))  # type: ignore[arg-type]


@app.command()
def worker(gpus: GpusOption = None) -> None:
    """Work on the jobs of FOREWORD_DATA_DIR (`serve` starts one by itself)."""
    from service.logs import configure_logging, log_uncaught
    from service.metrics_folder import join_metrics
    from service.settings import Settings
    from service.worker import run_worker

    settings = (Settings() if gpus is None else Settings(gpus=gpus)).resolved()
    configure_logging(settings.log_level)
    log_uncaught()
    join_metrics(settings.data_dir)

    raise SystemExit(run_worker(settings))


@app.command()
def ask(
    path: Annotated[Path, typer.Argument(help="A folder, archive or document")],
    question: str,
    kind: KindOption = "auto",
    fidelity: FidelityOption = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer")] = 256,
    policy: Annotated[PolicyName | None, typer.Option(help="FOREWORD_SPARSE_POLICY; adaptive if not set")] = None,
    head_config: Annotated[Path | None, typer.Option(help="FOREWORD_HEAD_CONFIG: patterns head by head")] = None,
) -> None:
    """Read PATH and answer QUESTION from it, without a server. Its KV is kept for the next question."""
    from foreword.ask import ask_command
    from service.settings import Settings

    given: dict[str, object] = {"sparse_policy": policy, "head_config": head_config}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    ask_command(path, question, kind=kind, fidelity=fidelity, max_tokens=max_tokens, settings=settings.resolved())


@app.command()
def ingest(
    path: Annotated[Path, typer.Argument(help="A folder, archive or document")],
    out: Annotated[Path, typer.Option(help="Folder for document.txt, tokens.npy and manifest.json")],
    kind: KindOption = "auto",
    base: Annotated[Path | None, typer.Option(help="manifest.json whose order is kept for unchanged files")] = None,
    include_generated: Annotated[bool, typer.Option(help="Keep generated, minified and lock files")] = False,
    include_vendored: Annotated[bool, typer.Option(help="Keep vendored folders")] = False,
    include_ignored: Annotated[bool, typer.Option(help="Keep what .gitignore rules leave out")] = False,
    include_data: Annotated[bool, typer.Option(help="Keep data files whole")] = False,
    mask_secrets: Annotated[bool, typer.Option(help="Replace suspected secrets by a mark")] = False,
    mark_deletions: Annotated[bool, typer.Option(help="Show tracked deletions of DOCX files")] = False,
    ocr: Annotated[
        Literal["auto", "off"], typer.Option(help="Read scanned pages with tesseract if it is there")
    ] = "auto",
) -> None:
    """Turn PATH into one exact token stream with a manifest."""
    from engine.model_folder import resolve_model
    from foreword.ingest_command import ingest_command
    from service.ingest import IngestLimits, IngestOptions
    from service.settings import Settings

    settings = Settings().resolved()
    options = IngestOptions(
        include_generated=include_generated,
        include_vendored=include_vendored,
        include_ignored=include_ignored,
        include_data=include_data,
        mask_secrets=mask_secrets,
        mark_deletions=mark_deletions,
        ocr=ocr,
    )
    limits = IngestLimits(memory_bytes=settings.ingest_memory_bytes, timeout_s=settings.ingest_timeout_s)
    tokenizer_file = resolve_model(settings.model, cache_dir=settings.cache_dir, weights=False) / "tokenizer.json"
    raise SystemExit(
        ingest_command(path, out, kind, base, tokenizer_file=tokenizer_file, limits=limits, options=options)
    )


@app.command()
def check() -> None:
    """Run each kernel against its reference on this machine; print which path it takes and why."""
    from foreword.check import check_command

    raise SystemExit(check_command())


@app.command()
def plan(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the document")],
    model: Annotated[str | None, typer.Option(help="'default', a Hugging Face folder or a hub id")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Memory of the GPU in GiB; without one: this CPU")] = None,
    fidelity: FidelityOption = "default",
) -> None:
    """What a document of so many tokens needs, where it fits, and about how long it takes."""
    from foreword.plan import plan_command
    from service.settings import Settings

    settings = Settings().resolved()
    plan_command(model or settings.model, tokens, gpu_memory_gib=gpu_memory, fidelity=fidelity, settings=settings)


@app.command()
def profile(
    text: Annotated[Path, typer.Option(help="A long text such as the model is to read")],
    out: Annotated[Path, typer.Option(help="The head config to write, for FOREWORD_HEAD_CONFIG")],
    model: Annotated[str | None, typer.Option(help="'default', a Hugging Face folder or a hub id")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Keys that each row may attend to")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="How much of the text is read")] = 32768,
) -> None:
    """Find each head's best sparse pattern on a text; write it in MInference's JSON format."""
    from foreword.profile import profile_command
    from service.settings import Settings

    settings = Settings().resolved()
    profile_command(model or settings.model, text, out=out, tokens=tokens, budget=budget, settings=settings)


@cache_app.command("ls")
def cache_ls() -> None:
    """List stored KV by the document's prefill that holds it."""
    from foreword.cache import list_entries

    list_entries()


@cache_app.command("verify")
def cache_verify(
    holder: Annotated[str | None, typer.Argument(help="A name of `cache ls`; all without")] = None,
) -> None:
    """Check every block against its checksum; remove what is bad. Exit status 1 if there was any."""
    from foreword.cache import verify

    raise SystemExit(verify(holder))


@cache_app.command("evict")
def cache_evict(
    holder: Annotated[str | None, typer.Argument(help="A name of `cache ls`")] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", min=1, help="Free so many bytes, oldest use first")] = None,
) -> None:
    """Remove stored KV of one holder, or of the least recently used ones. The documents stay."""
    from foreword.cache import evict

    if (holder is None) == (bytes_ is None):
        refuse("invalid_value", "expected either HOLDER or --bytes")
    evict(holder, bytes_)


@cache_app.command("pin")
def cache_pin(
    holder: Annotated[str, typer.Argument(help="A name of `cache ls`")],
    off: Annotated[bool, typer.Option("--off", help="Unpin")] = False,
) -> None:
    """Keep one holder's KV from being evicted."""
    from foreword.cache import pin

    pin(holder, pinned=not off)


def _version(wanted: bool) -> None:
    if wanted:
        from foreword import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it")] = False,
) -> None: ...
