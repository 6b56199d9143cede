"""What every store of files, documents and prefills must do. Backends subclass DocumentsContract, with `backend`."""

from collections.abc import Iterator

import pytest

from service.documents.base import CollectedDocuments, FileRecord, UnknownRecord
from service.documents.garbage import Garbage
from service.queue.base import Effects, Job, NewJob, Queue, RecordChange
from tests.contracts.queue_contract import Backend


def file_record(file_id: str, *, tenant: str = "t", created_at: float = 1.0, **fields: object) -> FileRecord:
    values: dict[str, object] = {
        "filename": "a.txt",
        "purpose": "user_data",
        "size_bytes": 5,
        "expires_at": None,
        "kind": "auto",
        "fidelity": "default",
        "priority": 0,
        "base": None,
        "pinned": False,
        "kv_ttl_s": None,
        "sources": [{"filename": "a.txt", "path": f"uploads/{file_id}"}],
        "status": "uploaded",
        "status_details": None,
        "error": None,
        "ingest_job": None,
        "document_id": None,
    }
    return FileRecord(id=file_id, tenant=tenant, created_at=created_at, **{**values, **fields})  # type: ignore[arg-type]


def ingest(queue: Queue, documents: CollectedDocuments, file_id: str, *, folder: str = "documents/x") -> None:
    """What the ingest stage commits, with a new handle."""
    documents.create_file(file_record(file_id))
    job = queue.put(NewJob("ingest", "t", {"file_id": file_id}))
    documents.update_file(file_id, {"ingest_job": job.id})
    claimed = queue.claim("w", ["ingest"], lease_s=10)
    assert claimed is not None
    queue.finish(claimed, {}, ingested(file_id, folder))


def ingested(file_id: str, folder: str) -> Effects:
    document = {
        "tenant": "t",
        "content_hash": "c",
        "stream_hash": "s",
        "tokenizer_digest": "d",
        "num_tokens": 7,
        "folder": folder,
        "created_at": 2.0,
        "stage_seconds": {"ingest": 0.5},
    }
    return Effects(
        [
            RecordChange("documents", "doc-1", document),
            RecordChange("prefills", "doc-1:default", {"document_id": "doc-1", "tenant": "t", "fidelity": "default"}),
            RecordChange("files", file_id, {"document_id": "doc-1"}),
        ],
        [NewJob("prefill", "t", {}, single_flight="doc-1:default", max_attempts=1)],
    )


def claim_prefill(queue: Queue) -> Job:
    job = queue.claim("w", ["prefill"], lease_s=10)
    assert job is not None
    return job


READY = Effects(
    [
        RecordChange(
            "prefills",
            "doc-1:default",
            {"state": "ready", "density": 0.3, "heads": {"dense": 9}, "head_map": ["dv", "-b"]},
        )
    ]
)


def collected(documents: CollectedDocuments) -> list[tuple[str, str]]:
    pieces: list[Garbage] = []
    documents.collect(pieces.append)
    return [(piece.kind, piece.name) for piece in pieces]


class DocumentsContract:
    @pytest.fixture
    def documents(self, backend: Backend) -> CollectedDocuments:
        return backend.documents()

    @pytest.fixture
    def queue(self, backend: Backend) -> Iterator[Queue]:
        queue = backend.queue()
        yield queue
        queue.close()

    def test_file_round_trip_and_isolation(self, documents: CollectedDocuments) -> None:
        record = file_record("file-1", pinned=True, kv_ttl_s=60.0, expires_at=9.0, error={"code": "x", "message": "y"})
        documents.create_file(record)
        assert documents.file("t", "file-1") == record
        with pytest.raises(UnknownRecord, match="file-1"):
            documents.file("someone else", "file-1")
        with pytest.raises(UnknownRecord):
            documents.delete_file("someone else", "file-1")

    def test_listing_pages_in_both_orders(self, documents: CollectedDocuments) -> None:
        for number in range(5):
            purpose = "batch" if number == 2 else "user_data"
            documents.create_file(file_record(f"file-{number}", created_at=float(number // 2), purpose=purpose))
        documents.create_file(file_record("file-other", tenant="u"))

        def ids(**options: object) -> list[str]:
            defaults: dict[str, object] = {"limit": 10, "after": None, "order": "asc", "purpose": None}
            return [record.id for record in documents.files("t", **{**defaults, **options})]  # type: ignore[arg-type]

        assert ids() == [f"file-{number}" for number in range(5)]
        assert ids(order="desc", limit=2) == ["file-4", "file-3"]
        assert ids(order="desc", limit=2, after="file-3") == ["file-2", "file-1"]
        assert ids(after="file-1", purpose="user_data") == ["file-3", "file-4"]
        with pytest.raises(UnknownRecord):
            ids(after="file-other")

    def test_update_of_a_missing_file_or_field(self, documents: CollectedDocuments) -> None:
        with pytest.raises(UnknownRecord, match="file-9"):
            documents.update_file("file-9", {"pinned": True})
        documents.create_file(file_record("file-1"))
        with pytest.raises(ValueError, match="files has no column colour"):
            documents.update_file("file-1", {"colour": "red"})
        documents.update_file("file-1", {"pinned": True, "tenant": "thief"})
        assert documents.file("t", "file-1") == file_record("file-1", pinned=True)  # the owner never changes

    def test_prefill_follows_its_job_and_files_follow_the_prefill(
        self, queue: Queue, documents: CollectedDocuments
    ) -> None:
        ingest(queue, documents, "file-1")
        assert documents.prefill("doc-1:default").state == "queued"
        job = claim_prefill(queue)
        assert (documents.prefill("doc-1:default").state, documents.prefill("doc-1:default").job_id) == (
            "running",
            job.id,
        )
        ingest(queue, documents, "file-2")  # joins the running prefill
        assert documents.prefill("doc-1:default").job_id == job.id
        assert documents.file("t", "file-2").status == "uploaded"
        queue.finish(job, {}, READY)
        assert [record.status for record in documents.handles("doc-1")] == ["processed", "processed"]
        assert documents.prefill("doc-1:default").heads == {"dense": 9}
        assert documents.prefill("doc-1:default").head_map == ["dv", "-b"]

    def test_handle_that_comes_after_the_prefill_is_processed_at_once(
        self, queue: Queue, documents: CollectedDocuments
    ) -> None:
        ingest(queue, documents, "file-1")
        queue.finish(claim_prefill(queue), {}, READY)
        documents.create_file(file_record("file-2"))
        documents.update_file("file-2", {"document_id": "doc-1"})
        assert documents.file("t", "file-2").status == "processed"

    @pytest.mark.parametrize("how", ["failed", "dead", "cancelled"])
    def test_failed_prefill_reaches_waiting_files_and_a_new_upload_tries_again(
        self, queue: Queue, documents: CollectedDocuments, how: str
    ) -> None:
        ingest(queue, documents, "file-1")
        job = claim_prefill(queue)
        if how == "cancelled":
            queue.cancel(job.id)
        else:
            queue.fail(job, {"code": "storage_full", "message": "no room"}, retry=how == "dead")
        assert queue.get(job.id).state == how
        record = documents.file("t", "file-1")
        assert record.status == "error"
        assert record.error == queue.get(job.id).error
        assert record.status_details == record.error["message"]

        ingest(queue, documents, "file-2")
        assert documents.file("t", "file-2").status == "uploaded"
        assert documents.prefill("doc-1:default").state == "queued"
        queue.finish(claim_prefill(queue), {}, READY)
        assert documents.file("t", "file-2").status == "processed"
        assert documents.file("t", "file-1").status == "error"  # final

    def test_lost_prefill_goes_back_to_queued(self, queue: Queue, documents: CollectedDocuments) -> None:
        ingest(queue, documents, "file-1")
        queue.release(claim_prefill(queue))
        assert documents.prefill("doc-1:default").state == "queued"
        assert documents.file("t", "file-1").status == "uploaded"

    def test_dead_ingest_is_the_files_error(self, queue: Queue, documents: CollectedDocuments) -> None:
        job = queue.put(NewJob("ingest", "t", {}, job_id="job-1", max_attempts=1))
        documents.create_file(file_record("file-1", ingest_job=job.id))
        claimed = queue.claim("w", ["ingest"], lease_s=-1)
        assert claimed is not None
        assert queue.reclaim() == 1
        record = documents.file("t", "file-1")
        assert record.status == "error"
        assert record.error is not None
        assert record.error["code"] == "worker_lost"

    def test_first_folder_of_a_document_stays(self, queue: Queue, documents: CollectedDocuments) -> None:
        ingest(queue, documents, "file-1", folder="documents/first")
        ingest(queue, documents, "file-2", folder="documents/second")
        assert documents.document("doc-1").folder == "documents/first"
        assert documents.folders() == {"documents/first"}

    def test_last_handle_takes_everything_along(self, queue: Queue, documents: CollectedDocuments) -> None:
        ingest(queue, documents, "file-1")
        ingest(queue, documents, "file-2")
        prefill = claim_prefill(queue)
        documents.share_holder("doc-1+doc-9:default", ["doc-1"])
        assert documents.delete_file("t", "file-1") is None
        assert queue.get(prefill.id).state == "running"
        assert collected(documents) == [("upload", "file-1")]
        gone = documents.delete_file("t", "file-2")
        assert gone is not None
        assert gone.id == "doc-1"
        assert queue.get(prefill.id).state == "cancelled"  # nobody waits for it any more
        with pytest.raises(UnknownRecord):
            documents.document("doc-1")
        with pytest.raises(UnknownRecord):
            documents.prefill("doc-1:default")
        assert collected(documents) == [
            ("upload", "file-2"),
            ("folder", "documents/x"),
            ("holder", "doc-1:default"),
            ("holder", "doc-1+doc-9:default"),
        ]
        assert collected(documents) == []

    def test_last_handle_of_a_fidelity_stops_its_prefill(self, queue: Queue, documents: CollectedDocuments) -> None:
        ingest(queue, documents, "file-1")
        ingest(queue, documents, "file-2")
        documents.update_file("file-2", {"fidelity": "strict"})
        prefill = claim_prefill(queue)
        assert documents.delete_file("t", "file-1") is None
        assert queue.get(prefill.id).state == "cancelled"
        assert documents.document("doc-1")

    def test_deleting_a_file_stops_its_ingest(self, queue: Queue, documents: CollectedDocuments) -> None:
        job = queue.put(NewJob("ingest", "t", {}))
        documents.create_file(file_record("file-1", ingest_job=job.id))
        documents.delete_file("t", "file-1")
        assert queue.get(job.id).state == "cancelled"

    def test_garbage_named_again_is_kept(self, queue: Queue, documents: CollectedDocuments) -> None:
        ingest(queue, documents, "file-1")
        documents.delete_file("t", "file-1")
        ingest(queue, documents, "file-2")  # the same content once more, into the same folder
        assert collected(documents) == [("upload", "file-1")]

    def test_garbage_that_cannot_be_removed_is_tried_again(self, documents: CollectedDocuments) -> None:
        documents.create_file(file_record("file-1"))
        documents.delete_file("t", "file-1")

        def refuse(piece: Garbage) -> None:
            raise PermissionError(piece.name)

        assert documents.collect(refuse) == 0
        assert collected(documents) == [("upload", "file-1")]

    def test_shared_holder_needs_its_documents(self, documents: CollectedDocuments) -> None:
        with pytest.raises(UnknownRecord, match="doc-9"):
            documents.share_holder("doc-9+doc-8:default", ["doc-9", "doc-8"])

    def test_expiry_and_bytes(self, documents: CollectedDocuments) -> None:
        documents.create_file(file_record("file-1", expires_at=10.0, size_bytes=7))
        documents.create_file(file_record("file-2", expires_at=20.0, size_bytes=8))
        documents.create_file(file_record("file-3", size_bytes=9))
        assert [record.id for record in documents.expired_files(15.0)] == ["file-1"]
        assert documents.uploaded_bytes() == 24
