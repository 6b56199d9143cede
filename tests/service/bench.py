"""A worker's parts on one data folder, around the fake engine, for tests that run them in this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.interfaces import SamplingParams
from service.admission import Admission
from service.database import Database, database_path
from service.documents.sqlite import SqliteDocuments
from service.leases import LeaseKeeper
from service.metrics import Metrics
from service.payloads import AnswerPayload
from service.queue.base import FINAL_STATES, Effects, Job, NewJob, RecordChange
from service.queue.sqlite_queue import SqliteQueue
from service.scheduler import Scheduler
from service.settings import Settings
from service.stages.context import StageContext
from tests.service.fake_engine import FakeEngine, FakeKV, open_fake_parts
from tests.service.prompt_models import save_folder


class Bench:
    def __init__(
        self,
        folder: Path,
        *,
        prefill_bytes: Callable[[int], int] = lambda num_tokens: 0,
        free_bytes: int = 1 << 40,
        **settings: Any,
    ) -> None:
        model = save_folder(folder / "model", "chatml")
        values: dict[str, Any] = {"data_dir": folder / "data", "model": str(model), "lease_s": 5.0, **settings}
        self.settings = Settings(**values).resolved()
        self.database = Database(database_path(self.settings.data_dir))
        self.queue = SqliteQueue(self.database)
        self.documents = SqliteDocuments(self.database)
        self.metrics = Metrics()
        self.parts = open_fake_parts(self.settings, self.metrics)
        self.leases = LeaseKeeper(self.queue, lease_s=self.settings.lease_s)
        self.context = StageContext(
            settings=self.settings,
            queue=self.queue,
            documents=self.documents,
            engine=self.parts.engine,
            kv=self.parts.kv,
            prompts=self.parts.model.prompts,
            model_id="fake",
            leases=self.leases,
            metrics=self.metrics,
            secret=b"s" * 32,
            clock=time.time,
            admission=Admission(prefill_bytes, lambda: free_bytes),
        )

    @property
    def engine(self) -> FakeEngine:
        assert isinstance(self.parts.engine, FakeEngine)
        return self.parts.engine

    @property
    def kv(self) -> FakeKV:
        assert isinstance(self.parts.kv, FakeKV)
        return self.parts.kv

    def add_document(self, name: str, text: str, *, tenant: str = "t", prefill: bool = True, **job: Any) -> Job | None:
        """An ingested document `doc-<name>` with one handle `file-<name>`, and its prefill job if wanted."""
        document_id, folder = f"doc-{name}", f"documents/ingest-{name}.1/document"
        path = self.settings.data_dir / folder
        path.mkdir(parents=True)
        tokens = self.parts.model.prompts.tokenizer.encode(text)
        np.save(path / "tokens.npy", tokens)
        fields = {
            "files": {
                "tenant": tenant,
                "filename": name,
                "purpose": "user_data",
                "size_bytes": len(text),
                "created_at": time.time(),
                "document_id": document_id,
            },
            "documents": {
                "tenant": tenant,
                "content_hash": name,
                "stream_hash": name,
                "tokenizer_digest": self.parts.model.prompts.tokenizer.digest,
                "num_tokens": len(tokens),
                "folder": folder,
                "created_at": time.time(),
            },
            "prefills": {"document_id": document_id, "tenant": tenant, "fidelity": "default"},
        }
        changes = [
            RecordChange("documents", document_id, fields["documents"]),
            RecordChange("prefills", f"{document_id}:default", fields["prefills"]),
            RecordChange("files", f"file-{name}", fields["files"]),
        ]
        if not prefill:
            for change in changes:
                self.documents._change(change)
            return None
        payload = {"document_id": document_id, "fidelity": "default", "uploaded_at": time.time()}
        new = NewJob("prefill", tenant, payload, single_flight=f"{document_id}:default", job_id=f"job-{name}", **job)
        return self.queue.put(new, Effects(changes))

    def ask(self, *names: str, question: str = "how long?", tenant: str = "t", waited: bool = False, **job: Any) -> str:
        sampling = SamplingParams(max_tokens=job.pop("max_tokens", 4000))
        payload: AnswerPayload = {
            "documents": [f"doc-{name}" for name in names],
            "question": self.parts.model.prompts.tokenizer.encode(question).tolist(),
            "fidelity": job.pop("fidelity", "default"),
            "sampling": vars(sampling),
            "received_at": time.time(),
            "waited": waited,
        }
        return self.queue.put(NewJob("answer", tenant, payload, priority=10, **job)).id

    @contextmanager
    def working(self) -> Iterator[Scheduler]:
        """A scheduler in a thread; stopped as SIGTERM does at the end of the block."""
        scheduler = Scheduler(self.context, "bench")
        errors: list[BaseException] = []

        def run() -> None:
            try:
                scheduler.run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield scheduler
        finally:
            scheduler.stop()
            thread.join(20)
            assert not thread.is_alive()
        if errors:
            raise errors[0]

    def ended(self, job_id: str, timeout_s: float = 20) -> Job:
        until(lambda: self.queue.get(job_id).state in FINAL_STATES, timeout_s)
        return self.queue.get(job_id)

    def text(self, job_id: str) -> str:
        """What readers of an answer have seen."""
        return "".join(event.data["text"] for event in self.queue.events(job_id) if event.type == "token")

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        self.leases.close()
        self.queue.close()
        self.database.close()


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)
