"""/v1/admin: for keys with the right alone; queues, workers, dead letters, and what can be done about them."""

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from service.auth import Key, KeyRing
from tests.service.bench import until
from tests.service.http_fakes import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = [
        Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name, admin=name == "root")
        for name in ("root", "ann", "bob")
    ]
    with serving(tmp_path_factory.mktemp("admin"), keys=KeyRing(keys)) as server:
        yield server


def call(server: Server, method: str, path: str, key: str = "root") -> httpx.Response:
    return server.http.request(method, f"/v1/admin{path}", headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/queues"),
        ("GET", "/workers"),
        ("GET", "/jobs"),
        ("POST", "/jobs/job-1/requeue"),
        ("POST", "/jobs/job-1/cancel"),
    ],
)
def test_only_with_the_right(server: Server, method: str, path: str) -> None:
    answer = call(server, method, path, "ann")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
    assert server.http.request(method, f"/v1/admin{path}").status_code == 401


def test_queues_and_workers(server: Server) -> None:
    server.worker.prefill_gate.clear()
    server.worker.hold_ingest = True
    for name in ("ann", "bob", "bob"):
        server.client(name).files.create(file=("a.txt", f"of {name}".encode()), purpose="user_data")
    queues = call(server, "GET", "/queues").json()
    waiting = {(lane["kind"], lane["tenant"]): lane["queued"] for lane in queues["data"]}
    assert waiting == {("ingest", "ann"): 1, ("ingest", "bob"): 2}
    assert queues["jobs"]["queued"] == 3
    assert queues["due"]["delivery"] == 0
    server.worker.hold_ingest = False

    def running() -> dict[str, list[dict[str, object]]]:
        return {worker["id"]: worker["jobs"] for worker in call(server, "GET", "/workers").json()["data"]}

    until(lambda: [job for job in running().get("fake", []) if job["kind"] == "prefill"])
    workers = running()
    assert workers["idle"] == []
    assert {job["tenant"] for job in workers["fake"]} <= {"ann", "bob"}
    assert all("payload" not in job for job in workers["fake"])
    server.worker.prefill_gate.set()
    until(lambda: call(server, "GET", "/queues").json()["data"] == [])


def test_dead_letter_is_queued_again(server: Server) -> None:
    client = server.client("ann")
    file = client.files.create(file=("bad", b"BAD at first"), purpose="user_data")
    until(lambda: client.files.retrieve(file.id).status == "error")
    (job,) = call(server, "GET", "/jobs?state=failed").json()["data"]
    assert (job["kind"], job["tenant"], job["error"]["code"]) == ("ingest", "ann", "document_corrupt")
    assert call(server, "GET", "/jobs").json()["data"] == [], "dead ones, without `state`"
    path = server.data_dir / server.documents.file("ann", file.id).sources[0]["path"]
    path.write_bytes(b"mended")
    again = call(server, "POST", f"/jobs/{job['id']}/requeue").json()
    assert (again["state"], again["attempts"], again["error"]) == ("queued", 0, None)
    assert client.files.wait_for_processing(file.id, poll_interval=0.02).status == "processed"
    refused = call(server, "POST", f"/jobs/{job['id']}/requeue")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_requeued")


def test_cancel_and_unknown_jobs(server: Server) -> None:
    server.worker.hold_ingest = True
    client = server.client("bob")
    file = client.files.create(file=("a", b"cancel me"), purpose="user_data")
    (job,) = call(server, "GET", "/jobs?state=queued").json()["data"]
    assert call(server, "POST", f"/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert client.files.retrieve(file.id).status == "error"
    server.worker.hold_ingest = False
    for action in ("requeue", "cancel"):
        answer = call(server, "POST", f"/jobs/job-none/{action}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    assert call(server, "GET", "/jobs?state=strange").status_code == 400


def test_without_keys_this_machine_is_the_admin(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("local")) as server:
        assert server.http.get("/v1/admin/queues").status_code == 200
