"""One real run, watched by everything that watches Foreword: Prometheus, an OTLP receiver, its own logs.

Everything that the dashboard shows happens in it: cold and warm answers of two tenants, a worker killed in the middle
of a prefill, damaged and expired KV, uploads that fail, work that is withdrawn.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import Server
from tests.end_to_end.text import library_text
from tests.observe.otlp import OtlpReceiver, ReceivedSpan
from tools.observe.client import Client, zip_of
from tools.observe.prometheus import Prometheus, free_port

RATE = "5m"  # in place of Grafana's $__rate_interval
TENANTS = {"acme": "fw-key-acme-5c1f0d27e4", "globex": "fw-key-globex-91ab83f6c2"}
WRONG_KEY = "fw-key-nobody-7d20a1b9ee"
MARKERS = {
    "document": "zebrafinch4711",
    "hidden file": "quaggamussel1302",
    "bad upload": "okapipelican8080",
    "question": "narwhaltusk2718",
    "file name": "axolotlname3141",
    "path": "capybarapath1618",
}
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUEST_ID = "one-id-for-all-of-it"


@dataclass
class Observed:
    server: Server
    prometheus: Prometheus
    receiver: OtlpReceiver
    started_at: float
    ended_at: float = 0.0
    healthy_alerts: tuple[dict[str, Any], ...] = ()
    killed_pid: int = 0
    answer: str = ""
    metrics: str = ""

    @property
    def spans(self) -> list[ReceivedSpan]:
        return self.receiver.spans

    def log(self) -> str:
        return self.server.log.read_text(encoding="utf-8")

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines()]

    def evaluate(self, expr: str) -> list[dict[str, Any]]:
        """Series over the whole run."""
        filled = expr.replace("$__rate_interval", RATE).replace("$objective", "2.0").replace("$pause", "60")
        return self.prometheus.query_range(filled, self.started_at, self.ended_at, 1.0)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": name} for name, key in TENANTS.items()]
    (folder / "keys.json").write_text(json.dumps(keys))
    receiver = OtlpReceiver()
    server = Server(
        folder / "data",
        log_level="debug",
        api_keys_file=folder / "keys.json",
        otlp_endpoint=receiver.url,
        metrics_vllm_names=True,
        lease_s=2,
        checkpoint_s=0,
        kv_host_bytes=60_000_000,
        disk_floor_bytes=1_000_000,
    )
    prometheus = Prometheus(folder / "prometheus", [f"127.0.0.1:{server.port}"], interval_s=1, port=free_port())
    try:
        server.start()
        run = Observed(server, prometheus, receiver, time.time())
        acme, globex = (Client(server.url, api_key=key) for key in TENANTS.values())
        with acme, globex:
            _healthy(run, acme)
            _faulty(run, acme, globex)
        _settle(run)
        yield run
    finally:
        server.stop()
        prometheus.stop()
        receiver.close()


def _healthy(run: Observed, acme: Client) -> None:
    text = library_text(60_000, skip=3)
    files = {
        "src/first.py": f"# {MARKERS['document']}\n{text[:2500]}",
        f"src/{MARKERS['file name']}.py": text[2500:4000],
        "README.md": "A repository.",
    }
    traced = {"x-request-id": REQUEST_ID, "traceparent": CALLER}
    repository = acme.upload(f"{MARKERS['file name']}.zip", zip_of(files), headers=traced)
    assert acme.wait(repository)["state"] == "ready"
    question = f"What does the file say about {MARKERS['question']}? Repeat the word."
    for _ in range(2):
        completion = acme.ask(repository, question, headers=traced)
        run.answer = completion["choices"][0]["message"]["content"]
    run.healthy_alerts = tuple(run.prometheus.get("alerts")["alerts"])


def _faulty(run: Observed, acme: Client, globex: Client) -> None:
    text = library_text(60_000, skip=3)

    # A worker dies in the middle of a prefill long enough to have sparse parts.
    long = globex.upload("long.txt", f"{MARKERS['document']}\n{text[4000:37_500]}".encode())
    globex.wait(long, progress=0.4)
    run.killed_pid = run.server.worker_pid()
    run.server.kill(run.killed_pid)
    # Meanwhile uploads that fail, one of them broken, and callers who may not.
    broken = zip_of({f"{MARKERS['hidden file']}.txt": MARKERS["bad upload"] * 300})[:-40]
    bad = [acme.upload(f"{MARKERS['bad upload']}.zip", broken)]
    bad.append(acme.upload("movie.mkv", b"\x1aE\xdf\xa3" + MARKERS["bad upload"].encode() + os.urandom(2000)))
    nobody = httpx.get(f"{run.server.url}/v1/files", headers={"authorization": f"Bearer {WRONG_KEY}"})
    assert nobody.status_code == 401
    assert acme.http.get(f"/v1/{MARKERS['path']}", params={"text": MARKERS["question"]}).status_code == 404
    assert acme.http.post("/v1/chat/completions", json={"model": MARKERS["question"]}).status_code in (400, 404)
    contracts = {f"{number}.txt": f"Contract {number}. {text[number * 900 : number * 900 + 800]}" for number in (1, 2)}
    bundle = acme.upload("contracts.zip", zip_of(contracts), kv_ttl_s="1")
    assert globex.wait(long)["state"] == "ready"
    for file_id in bad:
        assert acme.wait(file_id)["state"] == "error"
    assert acme.wait(bundle)["state"] == "ready"

    # Work that is withdrawn, and an answer nobody waits for.
    withdrawn = globex.upload("withdrawn.txt", text[30_000:50_000].encode())
    globex.wait(withdrawn, progress=0.02)
    globex.delete(withdrawn)

    # Damage on disk is found by its checksum, and the question answered all the same; KV past its time is made again.
    damage(run.server.data_dir / "kv")
    verified = globex.http.post(f"/v1/documents/{long}/verify").json()
    assert not verified["ok"]
    deadline = time.monotonic() + 20
    while run.server.metric("foreword_kv_evictions_total", reason="expired") == 0:
        assert time.monotonic() < deadline, "expired KV was not evicted"
        time.sleep(0.2)
    completion = acme.ask(bundle, f"Which contract names {MARKERS['question']}?", max_tokens=4)
    assert completion["foreword"]["cache_state"] == "cold"


def _settle(run: Observed) -> None:
    """Until the last changes are scraped and exported."""
    metrics = httpx.get(f"{run.server.url}/metrics", timeout=10).text
    answers = run.server.metric("foreword_answer_seconds_count")
    deadline = time.monotonic() + 20
    while True:
        scraped = run.prometheus.query("sum(foreword_answer_seconds_count)")
        exported = sum(span.name == "answer" for span in run.receiver.spans)
        if scraped and float(scraped[0]["value"][1]) == answers == exported:
            break
        assert time.monotonic() < deadline, f"{scraped} scraped, {exported} exported, expected {answers}"
        time.sleep(0.2)
    run.metrics, run.ended_at = metrics, time.time()


def damage(folder: Path) -> None:
    """Flip a bit in the middle of each block file."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1_000_000:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x40]))
