"""A worker without a model, a KV store without KV, and a real server around them on a free port."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from openai import OpenAI

from engine.kv_store import VerifyReport
from service.app import create_app
from service.auth import KeyRing
from service.database import Database
from service.documents.sqlite import SqliteDocuments
from service.limits.sqlite import SqliteLimits
from service.metrics import Metrics
from service.objects.sqlite import SqliteObjects
from service.queue.base import Effects, Job, JobKind, LeaseLost, NewJob, RecordChange
from service.queue.sqlite_queue import SqliteQueue
from service.served_model import ServedModel
from service.settings import Settings
from tests.service.prompt_models import save_folder

DIGEST = "digest-1"


@dataclass
class FakeKV:
    """Remembers which holders have KV, and what it was told."""

    stored: dict[str, int] = field(default_factory=dict)
    policies: dict[str, tuple[float | None, bool]] = field(default_factory=dict)

    def describe(self, holders: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        return {holder: {"disk": self.stored.get(holder, 0), "host": 0} for holder in holders}

    def usage(self) -> Mapping[str, int]:
        return {"disk": sum(self.stored.values()), "host": 0}

    def verify(self, holder: str | None = None) -> VerifyReport:
        return VerifyReport(num_segments=1, num_blocks=2, size_bytes=self.stored.get(holder or "", 0))

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        self.policies[holder] = (ttl_s, pinned)


class FakeWorker(threading.Thread):
    """Claims jobs as the real worker does, and makes up what an engine would compute."""

    def __init__(self, server: "Server") -> None:
        super().__init__(name="fake-worker", daemon=True)
        self.server = server
        self.stopping = threading.Event()
        self.prefill_gate = threading.Event()  # closed: prefills stay at a third
        self.prefill_gate.set()
        self.answer_gate = threading.Event()  # closed: answers stop before their third word
        self.answer_gate.set()
        self.hold_ingest = False  # claim no more ingests
        self.silent = False  # renew no leases
        self.steady = True
        self.words: list[str] = []  # what to answer instead
        self.answer_error: dict[str, str] | None = None
        self.answered: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.prefilled: list[str] = []

    def run(self) -> None:
        queue = self.server.queue
        # Whoever held these died with the last server: nobody waits for their leases to end.
        with self.server.database.write(durable=False) as connection:
            connection.execute("UPDATE jobs SET lease_until = 0 WHERE state = 'running'")
        queue.reclaim()
        while not self.stopping.is_set():
            kinds: list[JobKind] = ["answer", "prefill"] if self.hold_ingest else ["answer", "prefill", "ingest"]
            job = queue.claim("fake", kinds, lease_s=30)
            if job is None:
                queue.wait(0.05)
                continue
            # A held prefill must not keep answers waiting.
            threading.Thread(target=self._do, args=(job,), daemon=True).start()

    def _do(self, job: Job) -> None:
        try:
            getattr(self, f"_{job.kind}")(job)
        except LeaseLost:
            self.cancelled.append(job.id)

    def _ingest(self, job: Job) -> None:
        server = self.server
        file = server.documents.file(job.tenant, job.payload["file_id"])
        data = b"".join((server.data_dir / source["path"]).read_bytes() for source in file.sources)
        if data.startswith(b"BAD"):
            server.queue.fail(job, {"code": "document_corrupt", "message": "it is damaged"}, retry=False)
            return
        text = data.decode()
        document_id = f"doc-{abs(hash((job.tenant, text))):024x}"[:28]
        folder = server.data_dir / "documents" / document_id
        folder.mkdir(parents=True, exist_ok=True)
        tokens = server.model.prompts.tokenizer.encode(text)
        np.save(folder / "tokens.npy", tokens)
        (folder / "document.txt").write_text(text)
        # One token a byte, each source a file of its own.
        np.save(folder / "offsets.npy", np.arange(len(tokens) + 1, dtype=np.uint64))
        files, end = [], 0
        for source in file.sources:
            start, end = end, end + (server.data_dir / source["path"]).stat().st_size
            row = {"path": source["filename"], "status": "included", "token_start": start, "token_end": end}
            files.append({**row, "pages": []})
        (folder / "manifest.json").write_text(json.dumps({"num_tokens": len(tokens), "files": files}))
        document = {
            "tenant": job.tenant,
            "content_hash": "c",
            "stream_hash": "s",
            "tokenizer_digest": server.model.prompts.tokenizer.digest,
            "num_tokens": len(tokens),
            "folder": f"documents/{document_id}",
            "created_at": time.time(),
            "stage_seconds": {"upload": job.payload["upload_seconds"], "ingest": 0.01},
        }
        prefill_id = f"{document_id}:{file.fidelity}"
        prefill = {"document_id": document_id, "tenant": job.tenant, "fidelity": file.fidelity}
        changes = [
            RecordChange("documents", document_id, document),
            RecordChange("prefills", prefill_id, prefill),
            RecordChange("files", file.id, {"document_id": document_id}),
        ]
        payload = {"document_id": document_id, "fidelity": file.fidelity}
        try:
            ready = server.documents.prefill(prefill_id).state == "ready"
        except Exception:
            ready = False
        put = [] if ready else [NewJob("prefill", job.tenant, payload, single_flight=prefill_id)]
        server.queue.finish(job, {}, Effects(changes=changes, put=put))

    def _extend(self, job: Job) -> None:
        if not self.silent:
            self.server.queue.extend(job, lease_s=30)

    def _prefill(self, job: Job) -> None:
        queue, holder = self.server.queue, f"{job.payload['document_id']}:{job.payload['fidelity']}"
        queue.progress(job, 0.33, {"stage": "prefill", "eta_s": 2.0})
        while not self.prefill_gate.wait(0.02):
            self._extend(job)
        if self.stopping.is_set():
            return
        self.prefilled.append(holder)
        self.server.kv.stored[holder] = 4096
        done = {
            "state": "ready",
            "digest": DIGEST,
            "density": 0.4,
            "recall": {"target": 0.95, "mean": 0.97, "p5": 0.9, "worst": 0.8, "below_target": False},
            "heads": {"dense": 1},
            "head_map": ["d"],
            "cold_ttft_s": 0.5,
            "seconds": 0.4,
        }
        queue.finish(job, {}, Effects(changes=[RecordChange("prefills", holder, done)]))

    def _answer(self, job: Job) -> None:
        queue, prompts = self.server.queue, self.server.model.prompts
        self.answered.append(dict(job.payload))
        if (error := self.answer_error) is not None:
            queue.fail(job, error, retry=False)
            return
        lengths = [self.server.documents.document(name).num_tokens for name in job.payload["documents"]]
        cached = prompts.prefix_length(lengths)
        # A sound engine says the same at each attempt, since the seed is the job's.
        first = "Answer" if job.attempts == 1 or self.steady else "Other"
        words = (self.words or [first, " about", f" {len(lengths)}", " documents"])[
            : job.payload["sampling"]["max_tokens"]
        ]
        for number, word in enumerate(words):
            if number == 2:
                while not self.answer_gate.wait(0.02):
                    self._extend(job)
            queue.emit(job, [("token", {"text": word})])
        queue.finish(
            job,
            {
                "text": "".join(words),
                "finish_reason": "length" if len(words) == job.payload["sampling"]["max_tokens"] else "stop",
                "prompt_tokens": cached + len(job.payload["question"]),
                "completion_tokens": len(words),
                "cached_tokens": cached,
                "cache_state": "warm_disk",
                "ttft_s": 0.1,
            },
        )

    def stop(self) -> None:
        self.stopping.set()
        self.prefill_gate.set()
        self.answer_gate.set()
        self.join()


class Server:
    """The real application under uvicorn, in a thread, with the real SQLite store."""

    def __init__(
        self, data_dir: Path, *, keys: KeyRing | None = None, max_positions: int = 4096, **settings: Any
    ) -> None:
        self.data_dir = data_dir
        self.settings = Settings(data_dir=data_dir, disk_floor_bytes=0).model_copy(update=settings)
        self.model = ServedModel.load(
            "default", save_folder(data_dir.parent / "model", "chatml", max_positions=max_positions)
        )
        self.database = Database(data_dir / "foreword.sqlite3")
        self.queue = SqliteQueue(self.database)
        self.documents = SqliteDocuments(self.database)
        self.objects = SqliteObjects(self.database)
        self.kv = FakeKV()
        self._clients: dict[str, OpenAI] = {}
        self.worker = FakeWorker(self)
        self.worker_seen = True
        self.digest: str | None = DIGEST
        app = create_app(
            self.settings,
            queue=self.queue,
            documents=self.documents,
            objects=self.objects,
            limits=SqliteLimits(self.database),
            kv_store=self.kv,
            model=self.model,
            metrics=Metrics(),
            worker_seen=lambda: self.worker_seen,
            engine_digest=lambda fidelity: self.digest,
            worker_names=lambda: ["idle"],
            keys=keys,
        )
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)

    def start(self) -> "Server":
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server ended while starting")
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.worker.start()
        return self

    def stop(self) -> None:
        self.worker.stop()
        self.http.close()
        for client in self._clients.values():
            client.close()
        self._uvicorn.should_exit = True
        self._thread.join(10)
        self.queue.close()
        self.database.close()

    def client(self, api_key: str = "none") -> OpenAI:
        """One for each key: making one costs more than most requests."""
        if api_key not in self._clients:
            url = f"{self.url}/v1"
            self._clients[api_key] = OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=60)
        return self._clients[api_key]


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Server]:
    server = Server(folder / "data", **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
