"""Several API and worker processes over a real Redis. The engine is fake, everything else is real."""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.cluster import Client, Cluster, Member, until
from loadtests.redis_server import RedisServer
from tests.service.prompt_models import save_folder

FAKE = ("-m", "tests.service.fake_worker")
LEASE_S = 2.0


class Fleet:
    """Two APIs, two workers with a KV folder each, and the Redis between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_folder(folder / "model", "chatml")
        self.redis = RedisServer(folder / "redis").start()
        settings = {"model": self.model, "lease_s": LEASE_S, "ingest_timeout_s": 60, "max_attempts": 3}
        self.cluster = Cluster(folder, self.redis.url, worker=FAKE, **settings)
        self.apis = [self.cluster.api(name) for name in ("api-1", "api-2")]
        self.workers = [self.cluster.worker(name) for name in ("worker-1", "worker-2")]
        self.client = Client()
        self.settled()

    def settled(self) -> None:
        """All processes live."""
        for member in self.cluster.members:
            if member in (*self.apis, *self.workers) and (member.process is None or member.process.poll() is not None):
                member.start()
        until(lambda: all(api.answers("/readyz") == 200 for api in self.apis), 90)
        until(lambda: self.redis.client.zcard("{foreword}:worker_seen") >= 2, 90)

    def jobs(self, kind: str, state: str = "succeeded") -> list[dict[str, str]]:
        found = []
        for key in self.redis.client.scan_iter("{foreword}:job:*"):
            job = {name.decode(): value.decode() for name, value in self.redis.client.hgetall(key).items()}
            if job["kind"] == kind and job["state"] == state:
                found.append(job)
        return found

    def runner(self, kind: str) -> Member | None:
        """The worker that runs a job of this kind now."""
        for job in self.jobs(kind, "running"):
            for worker in self.workers:
                if job.get("worker", "").endswith(f"-{worker.pid}"):
                    return worker
        return None

    def close(self) -> None:
        self.client.close()
        self.cluster.__exit__(None, None, None)
        self.redis.__exit__(None, None, None)


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    shared_fleet.settled()
    return shared_fleet


def test_upload_at_one_ask_at_the_other_delete_at_either(fleet: Fleet) -> None:
    one, other = fleet.apis
    file_id = fleet.client.upload(one, "some text that both see\n" * 40)
    document = fleet.client.processed(other, file_id)
    assert (document["state"], document["kv"], document["kv_bytes"]) == ("ready", "stored", {"disk": 1000})
    made_by = fleet.jobs("prefill")[-1]["site"]
    answer = fleet.client.ask(other, file_id, "how long?")
    assert answer["choices"][0]["message"]["content"].startswith("It is ")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [job["site"] for job in fleet.jobs("answer")] == [made_by], "its worker holds the KV"
    assert len(fleet.jobs("prefill")) == 1
    folder = fleet.folder / "shared" / "documents"
    assert len(list(folder.iterdir())) == 1
    assert fleet.client.http.delete(f"{one.url}/v1/files/{file_id}").status_code == 200
    assert fleet.client.http.get(f"{other.url}/v1/files/{file_id}").status_code == 404
    until(lambda: not list(folder.iterdir()), 30)
    assert [path.name for path in (fleet.folder / "shared" / "uploads").iterdir()] == [".incoming"]


def test_identical_uploads_prefill_once_and_the_others_follow(fleet: Fleet) -> None:
    before = len(fleet.jobs("prefill"))
    text = "PATIENT the same everywhere " * 60
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda number: fleet.client.upload(fleet.apis[number % 2], text), range(4)))
    follower = fleet.apis[1]
    events = []
    until(lambda: fleet.client.document(follower, ids[3])["state"] == "prefill", 60)
    with httpx.stream("GET", f"{follower.url}/v1/documents/{ids[3]}/events", timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data:"):
                events.append(json.loads(line[5:]))
    assert any(event.get("stage") == "prefill" and 0 < event.get("progress", 0) < 1 for event in events)
    for file_id in ids:
        assert fleet.client.processed(follower, file_id)["state"] == "ready"
    assert len(fleet.jobs("prefill")) == before + 1


def test_killed_worker_is_taken_over_within_its_lease(fleet: Fleet) -> None:
    file_id = fleet.client.upload(fleet.apis[0], "PATIENT a worker dies " * 60)
    victim = until(lambda: fleet.runner("prefill"), 60)
    victim.kill()
    killed_at = time.monotonic()
    until(lambda: (heir := fleet.runner("prefill")) is not None and heir is not victim, 30)
    assert time.monotonic() - killed_at < LEASE_S + 3.0
    assert fleet.client.processed(fleet.apis[1], file_id)["state"] == "ready"
    (job,) = [job for job in fleet.jobs("prefill") if job["attempts"] == "2"]
    assert done_events(fleet, job["id"]) == 1


def done_events(fleet: Fleet, job_id: str) -> int:
    return sum(fields[b"t"] == b"done" for _, fields in fleet.redis.client.xrange(f"{{foreword}}:events:{job_id}"))


def test_killed_api_loses_no_upload_and_leaves_no_orphan(fleet: Fleet) -> None:
    doomed, other = fleet.apis
    ids = [fleet.client.upload(other, text) for text in ("a question about this", "LONG and about that " * 200)]
    until(lambda: fleet.client.document(other, ids[1])["state"] == "prefill", 60)
    body = fleet.client.body(doomed, ids[0], "how long?")
    body["messages"][0]["content"].insert(1, {"type": "file", "file": {"file_id": ids[1]}})

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{doomed.url}/v1/chat/completions", json=body, timeout=60)

    reader = threading.Thread(target=ask)
    reader.start()
    (orphan,) = until(lambda: fleet.jobs("answer", "running"), 30)  # it makes the KV of both: nobody waits for so long
    file_id = fleet.client.upload(doomed, "SLOW uploaded and left alone " * 30)
    doomed.kill()
    reader.join(30)
    assert fleet.client.processed(other, file_id)["state"] == "ready"
    until(lambda: not fleet.jobs("answer", "running"), 40)
    ended = fleet.redis.client.hmget(f"{{foreword}}:job:{orphan['id']}", "state", "error")
    assert ended[0] == b"cancelled"
    assert json.loads(ended[1])["code"] == "abandoned"
    assert fleet.client.http.delete(f"{other.url}/v1/files/{ids[1]}").status_code == 200


def test_redis_killed_in_the_middle(fleet: Fleet) -> None:
    file_id = fleet.client.upload(fleet.apis[0], "PATIENT while Redis restarts " * 60)
    done = fleet.client.upload(fleet.apis[0], "nothing special")
    fleet.client.processed(fleet.apis[0], done)
    body = fleet.client.body(fleet.apis[1], done, "tell a STORY", stream=True, max_tokens=400)
    until(lambda: fleet.runner("prefill"), 60)
    text, broken = "", False
    with httpx.stream("POST", f"{fleet.apis[1].url}/v1/chat/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if not broken and len(text) > 100:
                broken = True
                fleet.redis.kill()
                threading.Timer(0.7, fleet.redis.start).start()
    assert text.split() == [str(number) for number in range(400)]
    assert fleet.client.processed(fleet.apis[1], file_id)["state"] == "ready"
    assert all(done_events(fleet, job["id"]) == 1 for job in fleet.jobs("prefill"))


def test_cancel_stops_a_running_prefill_at_once(fleet: Fleet) -> None:
    file_id = fleet.client.upload(fleet.apis[0], "LONG nobody waits for this " * 60)
    until(lambda: fleet.runner("prefill"), 60)
    (job,) = fleet.jobs("prefill", "running")
    assert fleet.client.http.delete(f"{fleet.apis[1].url}/v1/files/{file_id}").status_code == 200
    logs = [worker.log for worker in fleet.workers]
    said = f"job {job['id']} was cancelled or taken over"
    until(lambda: any(said in log.read_text() for log in logs), 10)


def test_poison_is_a_dead_letter_and_others_go_on(fleet: Fleet) -> None:
    poison = fleet.client.upload(fleet.apis[0], "KILL whoever reads this")
    innocent = fleet.client.upload(fleet.apis[1], "SLOW but harmless " * 40)

    def dead() -> Any:
        fleet.settled()  # whoever starts workers starts them again
        found = fleet.client.document(fleet.apis[0], poison)
        return found if found["status"] == "error" else None

    found = until(dead, 120)
    assert found["error"]["code"] == "worker_lost"
    assert "each of 3 attempts" in found["error"]["message"]
    assert fleet.client.processed(fleet.apis[0], innocent)["state"] == "ready"
    (letter,) = fleet.redis.client.zrange("{foreword}:ended:dead", 0, -1)
    assert letter.decode() in {job["id"] for job in fleet.jobs("prefill", "dead")}


def test_a_full_redis_is_a_503_and_nothing_is_lost(fleet: Fleet) -> None:
    fleet.redis.client.config_set("maxmemory", "1mb")
    try:
        refused = fleet.client.http.post(
            f"{fleet.apis[0].url}/v1/files", files={"file": ("a.txt", b"no room")}, data={"purpose": "user_data"}
        )
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "full" in refused.json()["error"]["message"]
    finally:
        fleet.redis.client.config_set("maxmemory", "0")
    file_id = fleet.client.upload(fleet.apis[0], "there is room again")
    assert fleet.client.processed(fleet.apis[1], file_id)["state"] == "ready"


def test_paused_worker_finds_its_job_gone(fleet: Fleet) -> None:
    file_id = fleet.client.upload(fleet.apis[0], "PATIENT while a worker is paused " * 60)
    paused = until(lambda: fleet.runner("prefill"), 60)
    paused.kill(signal.SIGSTOP)
    try:
        assert fleet.client.processed(fleet.apis[1], file_id)["state"] == "ready"
    finally:
        paused.kill(signal.SIGCONT)
    until(lambda: re.search(r"was cancelled or taken over|lease lost", paused.log.read_text()), 30)
    assert fleet.client.document(fleet.apis[0], file_id)["state"] == "ready"
    assert all(done_events(fleet, job["id"]) == 1 for job in fleet.jobs("prefill"))


# --- refused ---------------------------------------------------------------------------------------------------------


def test_worker_with_another_model_is_refused_by_name(fleet: Fleet, tmp_path: Path) -> None:
    other = save_folder(tmp_path / "another-model", "llama3")
    stranger = fleet.cluster.worker("stranger", model=other)
    assert stranger.wait() == 2
    text = stranger.log.read_text()
    assert "another-model" in text
    assert "model is another-model here and model there" in text
    # By name: one of these, or one that an earlier test killed and whose attendance has not run out.
    assert re.search(r"\w-\d+", text)


def test_settings_that_do_not_fit_together_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    elsewhere = fleet.cluster.api("elsewhere", shared_dir=tmp_path / "elsewhere")
    password = fleet.cluster.api("password", redis_url=fleet.redis.url.replace("redis://", "redis://who:pa55@"))
    alone = fleet.cluster.api("alone", shared_dir="")
    other = fleet.cluster.api("other", model=save_folder(tmp_path / "another-model", "llama3"))
    said = {
        elsewhere: ("cluster_refused", "is not the folder that the other processes"),
        password: ("redis_refused", "WRONGPASS|invalid username-password pair"),
        alone: ("shared_dir_missing", "FOREWORD_SHARED_DIR"),
        other: ("fleet_differs", "model is another-model here and model there"),
    }
    for member, (code, message) in said.items():
        assert member.wait() == 2
        error = json.loads(member.log.read_text().splitlines()[-1])["error"]
        assert error["code"] == code
        assert re.search(message, error["message"]), error
        assert "pa55" not in member.log.read_text()


def test_redis_away_at_start_is_waited_for(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "model", "chatml")
    redis = RedisServer(tmp_path / "redis")
    with Cluster(tmp_path, redis.url, worker=FAKE, model=model) as cluster:
        api, worker = cluster.api("api"), cluster.worker("worker")
        elsewhere = cluster.api("elsewhere", shared_dir=tmp_path / "elsewhere")
        until(lambda: api.answers("/livez") == 200, 60)
        assert api.answers("/readyz") == 503
        assert api.answers("/v1/files") == 503
        until(lambda: "can't be reached" in worker.log.read_text(), 60)
        until(lambda: elsewhere.answers("/livez") == 200, 60)
        elsewhere.kill(signal.SIGSTOP)  # so that the others are first
        for member in (api, worker):
            assert "it is tried again" in member.log.read_text()
            assert "Traceback" not in member.log.read_text()
        with redis:
            until(lambda: api.answers("/readyz") == 200, 60)
            assert worker.process is not None
            assert worker.process.poll() is None
            elsewhere.kill(signal.SIGCONT)
            elsewhere.wait(60)
            assert "is not the folder that the other processes" in elsewhere.log.read_text()
