"""`make demo`: a real server reads a part of this repository, answers from it cold and warm, and shows what that cost.

Everything goes over HTTP with the official OpenAI client, as a user's program would. Exits with 1 on a wrong answer.
"""

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import httpx
from openai import OpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# Files that seldom change: what a small model answers depends on all that it reads.
FILES = (
    "engine/chain.py",
    "engine/digest.py",
    "engine/errors.py",
    "engine/forward.py",
    "engine/rope.py",
    "engine/sampling.py",
    "engine/text_stream.py",
    "engine/kv_store/buffers.py",
    "engine/kv_store/copies.py",
    "engine/kv_store/layout.py",
    "engine/kv_store/sessions.py",
    "engine/kv_store/host_cache.py",
    "engine/kv_store/group_file.py",
    "engine/kv_format.py",
    "engine/spec.py",
)
# What is asked, and what a right answer must hold; both are read off the uploaded source by eye.
QUESTIONS = (
    ("What are the parameters of the function segment_chain?", ("tokens", "salt", "digest")),
    ("What are the parameters of the function frequencies?", ("rope", "rotary_dim", "device")),
)
console = Console()


def repository_zip() -> tuple[bytes, int]:
    buffer, size = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            text = (ROOT / name).read_text()
            archive.writestr(name, text)
            size += len(text)
    return buffer.getvalue(), size


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    with console.status("starting the server (the first time it converts the default model)"):
        while True:
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}:\n{log.read_text()[-2000:]}")
            try:
                if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)


def watch(url: str, file_id: str) -> dict:
    """Show the document's progress until its KV is made."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(40), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("ingest", total=1.0)
        while True:
            document = httpx.get(f"{url}/v1/documents/{file_id}", timeout=30).json()
            bars.update(bar, description=document["state"], completed=document["progress"])
            if document["state"] in ("ready", "error"):
                return document
            time.sleep(0.2)


def ask(client: OpenAI, model: str, file_id: str, question: str) -> tuple[str, float, dict]:
    """Stream one answer; returns its text, the seconds to its first token, and its last chunk's extras."""
    content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
    started, first, text, extras = time.perf_counter(), 0.0, "", {}
    console.print(f"\n[bold]{question}[/bold]")
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=48,
        temperature=0,
    ):
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            first = first or time.perf_counter() - started
            text += piece
            console.print(piece, end="", style="green", highlight=False, markup=False)
        extras = (chunk.model_extra or {}).get("foreword") or extras
        if chunk.usage and chunk.usage.prompt_tokens_details:
            extras = {**extras, "cached_tokens": chunk.usage.prompt_tokens_details.cached_tokens}
    console.print()
    return text, first, extras


def main() -> int:
    payload, size_chars = repository_zip()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="foreword-demo-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "foreword", "serve", "--port", str(port)],
                env={**os.environ, "FOREWORD_DATA_DIR": str(Path(folder) / "data")},
                stdout=output,
                stderr=output,
            )
        try:
            wait_until_ready(url, server, log)
            client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
            model = client.models.list().data[0].id
            console.print(f"uploading {size_chars:,} characters of this repository's source to {model}")
            uploaded = client.files.create(file=("foreword.zip", payload), purpose="user_data")
            document = watch(url, uploaded.id)
            if document["state"] == "error":
                sys.exit(f"the document failed: {document['error']}")
            wrong, first_tokens = 0, []
            for question, expected in QUESTIONS:
                text, first_s, extras = ask(client, model, uploaded.id, question)
                right = all(word in text for word in expected)
                wrong += not right
                first_tokens.append(first_s)
                console.print(
                    f"{'right' if right else 'WRONG'} · {extras.get('cached_tokens')} prompt tokens from stored KV"
                    f" · {extras.get('cache_state')}"
                )
            recall = document["recall"] or {}
            table = Table(title="what it cost")
            for column in ("tokens", "cold TTFT", "warm TTFT", "density", "recall mean", "recall p5", "recall worst"):
                table.add_column(column, justify="right")
            table.add_row(
                f"{document['num_tokens']:,}",
                f"{document['cold_ttft_s']:.1f} s",
                " / ".join(f"{seconds:.2f} s" for seconds in first_tokens),
                f"{document['density']:.3f}",
                *(f"{recall[key]:.3f}" if recall else "–" for key in ("mean", "p5", "worst")),
            )
            console.print(table)
            return int(wrong > 0)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    sys.exit(main())
