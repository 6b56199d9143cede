"""`foreword ingest`: read a folder, archive or document into document.txt, tokens.npy and manifest.json.

Free of Typer, so that it can be called from the command line's entry, from tests, and as `python -m
foreword.ingest_command`. Errors: exit status 2 and, last on standard error, {"error": {"code": …, "message": …}}.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from service.ingest import KINDS, IngestError, IngestLimits, IngestOptions, IngestSummary, Kind, Source, ingest

EXIT_REFUSED = 2


def ingest_command(
    path: Path,
    out: Path,
    kind: Kind = "auto",
    base: Path | None = None,
    *,
    tokenizer_file: Path | None = None,
    limits: IngestLimits | None = None,
    options: IngestOptions | None = None,
) -> int:
    """Ingest `path` into the folder `out`; returns the exit status. Progress and the summary go to standard error.

    Without `tokenizer_file` the default model's is used, which is made in the cache folder when first needed.
    """
    try:
        with _progress(path.name or str(path)) as tell:
            summary = ingest(
                [Source(path, path.name or path.resolve().name or "input")],
                out,
                kind=kind,
                tokenizer_file=tokenizer_file or default_tokenizer_file(),
                limits=limits,
                options=options,
                base_manifest=base,
                progress=tell,
            )
    except IngestError as error:
        print(json.dumps({"error": {"code": error.code, "message": error.message}}), file=sys.stderr)
        return EXIT_REFUSED
    _print_summary(summary, out)
    return 0


def default_tokenizer_file(cache_dir: Path | None = None) -> Path:
    """tokenizer.json of the default model, made on first use; `cache_dir` as in the service's settings."""
    from engine.default_model.cache import tokenizer_folder

    chosen = cache_dir or Path(os.environ.get("FOREWORD_CACHE_DIR") or "~/.cache/foreword")
    return tokenizer_folder(chosen.expanduser().resolve()) / "tokenizer.json"


@contextmanager
def _progress(name: str) -> Iterator[Callable[[float, str], None]]:
    """A Rich bar with time left where standard error is a terminal; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda fraction, note: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("ingest"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(escape(name), total=1.0)
        yield lambda fraction, note: bar.update(task, completed=fraction, description=escape(note[-60:]))


def _print_summary(summary: IngestSummary, out: Path) -> None:
    line = (
        f"{summary.num_tokens:,} tokens from {summary.files_included} files ({summary.files_skipped} left out), "
        f"{summary.input_bytes:,} bytes in {summary.seconds:.1f} s → {out}"
    )
    print(line, file=sys.stderr)
    if summary.warnings:
        told = ", ".join(f"{code} × {count}" for code, count in sorted(summary.warnings.items())[:20])
        print(f"warnings: {told}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="foreword ingest", description="Read a folder, archive or document into tokens."
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--kind", choices=KINDS, default="auto")
    parser.add_argument("--base", type=Path, help="manifest.json of an earlier ingest whose order is kept")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; the default model's without it")
    for name, described in _SWITCHES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=described)
    parser.add_argument("--ocr", choices=("auto", "off"), default="auto")
    parser.add_argument("--office", choices=("auto", "off"), default="auto", help="LibreOffice for old Word files")
    args = parser.parse_args(arguments)
    options = IngestOptions(ocr=args.ocr, office=args.office, **{name: getattr(args, name) for name in _SWITCHES})
    return ingest_command(args.path, args.out, args.kind, args.base, tokenizer_file=args.tokenizer, options=options)


_SWITCHES = {
    "include_generated": "keep generated, minified and lock files of a repository",
    "include_vendored": "keep vendored folders of a repository",
    "include_ignored": "keep what .gitignore rules leave out",
    "include_data": "keep data files whole",
    "mask_secrets": "replace suspected secrets by a mark",
    "mark_deletions": "show tracked deletions of DOCX files",
}

if __name__ == "__main__":
    sys.exit(main())
