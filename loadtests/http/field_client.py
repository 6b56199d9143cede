"""aiperf of NVIDIA against the OpenAI API, as it comes from PyPI, in an environment of its own (without torch).

Two runs: prompts that it makes up itself, and questions about an uploaded document, whose payloads it sends verbatim.
It gets the model's own tokeniser, and no network is asked for it. Offline, aiperf takes a folder's path for the name of
a repository, so the folder is shown to it as a snapshot in a Hugging Face cache of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from engine.model_folder import resolve_model
from loadtests.http.client import Client
from loadtests.http.texts import Texts
from service.settings import Settings

NAME = "aiperf"
TOKENIZER = "foreword/default"
REQUIREMENT = "aiperf==0.13.0"
ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-clients"
TIMEOUT_S = 900.0
REQUESTS = 20
RATE_PER_S = 0.5
DOCUMENT_TOKENS = 2000
PROMPT_TOKENS = 512
FIGURES = ("time_to_first_token", "request_latency", "inter_token_latency")


def program() -> Path:
    """Installs it where it isn't yet. Raises subprocess.CalledProcessError."""
    path = VENV / "bin" / NAME
    if not path.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", REQUIREMENT], check=True)
    return path


def run_aiperf(url: str, key: str | None, folder: Path, *, seed: int) -> dict[str, Any]:
    """Its own figures of both runs, and what went wrong in words."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    model = httpx.get(f"{url}/v1/models", headers=headers, timeout=60).raise_for_status().json()["data"][0]["id"]
    folder.mkdir(parents=True, exist_ok=True)
    payloads, cache = folder / "payloads.jsonl", folder / "huggingface"
    _write_cache(cache)
    _write_payloads(url, key, model, payloads, seed)
    runs = {
        "prompts": ["--isl", str(PROMPT_TOKENS), "--isl-stddev", "100", "--osl", "16"],
        "documents": ["--input-file", str(payloads), "--custom-dataset-type", "raw_payload"],
    }
    result: dict[str, Any] = {"client": REQUIREMENT, "runs": {}, "faults": []}
    for name, options in runs.items():
        command = [str(program()), "profile", "--url", url, "--model", model, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", TOKENIZER, "--request-rate", str(RATE_PER_S)]
        command += ["--arrival-pattern", "poisson", "--request-count", str(REQUESTS), "--random-seed", str(seed)]
        command += ["--ui", "none", "--no-gpu-telemetry", "--workers-max", "2"]
        command += ["--request-timeout-seconds", str(TIMEOUT_S), "--output-artifact-dir", str(folder / name), *options]
        command += [f"--api-key={key}"] if key else []
        figures, fault = _run(command, folder / name, cache)
        result["runs"][name] = figures
        if fault:
            result["faults"].append(f"{name}: {fault}")
    return result


def _write_cache(home: Path) -> None:
    """The default model's tokeniser folder as the one revision of TOKENIZER."""
    revision = "0" * 40
    repository = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision, encoding="ascii")
    folder = resolve_model("default", cache_dir=Settings().resolved().cache_dir, weights=False)
    shutil.copytree(folder, repository / "snapshots" / revision)


def _run(command: list[str], folder: Path, cache: Path) -> tuple[dict[str, Any], str | None]:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )
    exported = sorted(folder.rglob("profile_export_aiperf.json"))
    if done.returncode or not exported:
        return {}, f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    figures = read_export(json.loads(exported[0].read_text(encoding="utf-8")))
    failed = figures["requests"] != REQUESTS or figures["errors"]
    return figures, f"{figures['requests']} of {REQUESTS} requests, errors: {figures['errors']}" if failed else None


def read_export(export: dict[str, Any]) -> dict[str, Any]:
    """Of its JSON: requests that ended well, errors, and percentiles in seconds."""
    found: dict[str, Any] = {
        "requests": int(export["request_count"]["avg"]),
        "errors": [str(error) for error in export.get("error_summary") or []],
    }
    for name in FIGURES:
        if figure := export.get(name):
            found[f"{name}_s"] = {key: round(figure[key] / 1000, 4) for key in ("avg", "p50", "p95", "p99")}
    if goodput := export.get("output_token_throughput"):
        found["output_tokens_per_s"] = round(goodput["avg"], 2)
    return found


def _write_payloads(url: str, key: str | None, model: str, path: Path, seed: int) -> None:
    """Questions about one document, which is read first. Raises RuntimeError where it can't be."""
    client, text = Client(url, key), Texts(seed + 1000).draw(DOCUMENT_TOKENS)
    file_id, code = client.upload(text)
    if file_id:
        code = client.wait(file_id)[1]
    client.close()
    if code != "ok":
        raise RuntimeError(f"the document for {NAME} was not read: {code}")
    with path.open("w", encoding="utf-8") as lines:
        for number in range(REQUESTS):
            question = list(text.numbers)[number % len(text.numbers)]
            content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
            body = {"model": model, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 16}
            options = {"include_usage": True}
            lines.write(json.dumps({**body, "temperature": 0, "stream": True, "stream_options": options}) + "\n")
