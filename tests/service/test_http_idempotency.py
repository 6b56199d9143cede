"""Idempotency-Key: the same request again is the same answer, another request under it is refused."""

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import UnprocessableEntityError

from service import idempotency
from service.auth import Key, KeyRing
from service.queue.base import QueueUnavailable
from tests.service.bench import until
from tests.service.http_fakes import Server, serving
from tests.service.test_http_durability import kill, process

QUESTION = {"model": "default", "messages": [{"role": "user", "content": "Q"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing([Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("ann", "bob")])
    with serving(tmp_path_factory.mktemp("idempotency"), keys=keys) as server:
        yield server


def multipart(boundary: str, content: bytes, purpose: bytes = b"user_data") -> tuple[bytes, dict[str, str]]:
    b = boundary.encode()
    body = b'--%s\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%s\r\n' % (b, purpose)
    body += b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n%s\r\n' % (b, content)
    return body + b"--%s--\r\n" % b, {"content-type": f"multipart/form-data; boundary={boundary}"}


def post(server: Server, path: str, key: str, *, tenant: str = "ann", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {tenant}", "idempotency-key": key, **options.pop("headers", {})}
    return server.http.post(path, headers=headers, **options)


def upload(server: Server, key: str, boundary: str, content: bytes, *, tenant: str = "ann") -> httpx.Response:
    body, headers = multipart(boundary, content)
    return post(server, "/v1/files", key, tenant=tenant, content=body, headers=headers)


def test_an_upload_sent_again_is_answered_as_before(server: Server) -> None:
    content = b"--almost the boundary " + b"x" * 200_000
    first = upload(server, "u1", "b" * 30, content)
    again = upload(server, "u1", "c" * 40, content)  # clients make a new boundary each time
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    other = upload(server, "u1", "b" * 30, content + b"y")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    assert len(list(server.client("ann").files.list())) == 1


def test_a_key_is_for_one_path(server: Server) -> None:
    assert upload(server, "u2", "b", b"x").status_code == 200
    answer = post(server, "/v1/chat/completions", "u2", json=QUESTION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert "/v1/files" in answer.json()["error"]["message"]


def test_keys_are_their_tenants_own(server: Server) -> None:
    mine = upload(server, "shared", "b", b"mine").json()
    yours = upload(server, "shared", "b", b"yours", tenant="bob").json()
    assert mine["id"] != yours["id"]
    assert server.client("bob").files.content(yours["id"]).read() == b"yours"


def test_a_failed_request_leaves_its_key_free(server: Server) -> None:
    body, headers = multipart("b", b"")
    assert post(server, "/v1/files", "f1", content=body, headers=headers).json()["error"]["code"] == "empty_input"
    assert upload(server, "f1", "b", b"better").status_code == 200
    broken = {**QUESTION, "temperature": 9}
    assert post(server, "/v1/chat/completions", "f2", json=broken).status_code == 400
    assert post(server, "/v1/chat/completions", "f2", json=QUESTION).status_code == 200


def test_a_question_sent_again_is_answered_once(server: Server) -> None:
    before = len(server.worker.answered)
    first, again = (post(server, "/v1/chat/completions", "q1", json=QUESTION).json() for _ in range(2))
    assert first["id"] == again["id"]
    assert first["choices"] == again["choices"]
    assert len(server.worker.answered) == before + 1


def test_the_same_question_at_once_waits_for_one_answer(server: Server) -> None:
    server.worker.answer_gate.clear()
    before, answers = len(server.worker.answered), []
    threads = [
        threading.Thread(target=lambda: answers.append(post(server, "/v1/chat/completions", "q2", json=QUESTION)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(server.worker.answered) > before)
    server.worker.answer_gate.set()
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert len(server.worker.answered) == before + 1


def test_an_upload_under_way_refuses_its_twin(server: Server) -> None:
    body, headers = multipart("b", b"x" * 1000)
    started, go = threading.Event(), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield body[:500]
        started.set()
        go.wait(30)
        yield body[500:]

    answers: list[httpx.Response] = []
    first = threading.Thread(
        target=lambda: answers.append(post(server, "/v1/files", "slow", content=slowly(), headers=headers))
    )
    first.start()
    assert started.wait(30)
    until(lambda: server.objects.find("idempotency", "ann", limit=1)[0].data["state"] == "open")
    twin = upload(server, "slow", "b", b"x" * 1000)
    assert (twin.status_code, twin.json()["error"]["code"]) == (409, "request_in_progress")
    assert twin.headers.get("x-should-retry") != "false", "the client may try again"
    go.set()
    first.join(30)
    assert upload(server, "slow", "b", b"x" * 1000).content == answers[0].content


def test_a_store_that_is_away_for_a_moment_frees_no_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of an upload under way goes on being renewed."""
    monkeypatch.setattr(idempotency, "LEASE_S", 1.5)
    replace, away = server.objects.replace, iter([True])

    def unsteady(*arguments: Any, **options: Any) -> Any:
        if next(away, False):
            raise QueueUnavailable("away")
        return replace(*arguments, **options)

    monkeypatch.setattr(server.objects, "replace", unsteady)
    body, headers = multipart("b", b"y" * 1000)
    leases = []

    def slowly() -> Iterator[bytes]:
        yield body[:500]
        time.sleep(3)  # twice a lease
        leases.append(server.objects.find("idempotency", "ann", limit=1)[0].data["until"] - time.time())
        yield body[500:]

    assert post(server, "/v1/files", "unsteady", content=slowly(), headers=headers).status_code == 200
    assert leases[0] > 0
    assert not next(away, False), "it was away"


def test_the_official_client_sends_again(server: Server) -> None:
    client = server.client("ann")
    options = {"extra_headers": {"Idempotency-Key": "official"}}
    first, again = (client.files.create(file=("a", b"1"), purpose="user_data", **options) for _ in range(2))
    assert first == again
    with pytest.raises(UnprocessableEntityError):
        client.files.create(file=("a", b"2"), purpose="user_data", **options)


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_impossible_keys(server: Server, key: str) -> None:
    answer = post(server, "/v1/chat/completions", key, json=QUESTION)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_key_is_forgotten_after_a_day(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = upload(server, "old", "b", b"x").json()
    monkeypatch.setattr(idempotency, "KEPT_S", 0.0)
    again = upload(server, "old", "b", b"other")
    assert again.status_code == 200
    assert "idempotent-replayed" not in again.headers
    assert first["bytes"] == 1


def test_keys_survive_kill_9(tmp_path: Path) -> None:
    """What was answered is answered again; what was under way when the server died is done anew, once."""
    body, headers = multipart("b", b"x" * 10)
    with process(tmp_path) as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        first = http.post("/v1/files", content=body, headers={**headers, "idempotency-key": "done"}).json()
        sending = threading.Event()

        def half() -> Iterator[bytes]:
            yield body[:100]
            sending.set()
            time.sleep(60)

        def send() -> None:
            with pytest.raises(httpx.TransportError):
                http.post("/v1/files", content=half(), headers={**headers, "idempotency-key": "half"})

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        assert sending.wait(30)
        until((tmp_path / "data" / "foreword.sqlite3").exists)
        kill(server)
    with serving(tmp_path) as again:

        def put(key: str) -> httpx.Response:
            return again.http.post("/v1/files", content=body, headers={**headers, "idempotency-key": key})

        assert put("done").json() == first
        for stored in again.objects.find("idempotency", "local", limit=9):
            if stored.data["state"] == "open":
                assert put("half").status_code == 409, "it might still live"
                again.objects.replace(stored, {**stored.data, "until": time.time()}, due_at=stored.due_at)
        assert put("half").status_code == 200
        assert put("half").headers["idempotent-replayed"] == "true"
        assert len(again.http.get("/v1/files").json()["data"]) == 2
