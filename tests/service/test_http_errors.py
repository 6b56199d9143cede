"""Every error in the OpenAI shape, with a request id; models and health; and what the process must not load."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import NotFoundError

from service.queue.base import QueueError
from tests.service.http_fakes import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("errors")) as server:
        yield server


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return server.http


JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "/nowhere", {}, 404, "not_found"),
        ("GET", "/v1/nowhere", {}, 404, "not_found"),
        ("GET", CHAT, {}, 405, "method_not_allowed"),
        ("PUT", "/v1/files", {}, 405, "method_not_allowed"),
        ("POST", CHAT, {"content": b"{nonsense", "headers": JSON}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"[1]", "headers": JSON}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"[" * 100_000, "headers": JSON}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"\xff\xfe{", "headers": JSON}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"{}", "headers": JSON}, 400, "missing_required_parameter"),
        ("POST", CHAT, {}, 400, "missing_required_parameter"),
        ("POST", CHAT, {"content": b"a=b", "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ("GET", "/v1/files?limit=many", {}, 400, "invalid_value"),
        ("GET", "/v1/documents?order=sideways", {}, 400, "invalid_value"),
        ("GET", "/v1/models/gpt-4", {}, 404, "model_not_found"),
    ],
)
def test_shape(http: httpx.Client, method: str, path: str, options: dict, status: int, code: str) -> None:
    answer = http.request(method, path, **options)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["message"]
    assert answer.headers["x-request-id"]


def test_wrong_method_says_which_are_right(http: httpx.Client) -> None:
    assert http.get(CHAT).headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("given", "kept"), [("my-id.7", True), ("bad id", False), ("x" * 200, False), ("<script>", False)]
)
def test_request_id_is_taken_if_sane(http: httpx.Client, given: str, kept: bool) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is kept


def test_request_id_goes_with_the_jobs(http: httpx.Client, server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Q"}]}
    http.post(CHAT, json=body, headers={"x-request-id": "trace-1"})
    assert server.worker.answered[-1]["request_id"] == "trace-1"
    file = http.post(
        "/v1/files", data={"purpose": "user_data"}, files={"file": ("a", b"x")}, headers={"x-request-id": "trace-2"}
    ).json()
    ingest_job = server.documents.file("local", file["id"]).ingest_job
    assert server.queue.get(ingest_job or "").payload["request_id"] == "trace-2"


def test_models(server: Server) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert (model.object, model.owned_by) == ("model", "foreword")
    assert client.models.retrieve(model.id).id == client.models.retrieve("default").id == model.id
    with pytest.raises(NotFoundError) as error:
        client.models.retrieve("unknown/model")
    assert error.value.code == "model_not_found"


def test_ready_only_with_queue_and_worker(http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.get("/readyz").json()["status"] == "ok"
    server.worker_seen = False
    answer = http.get("/readyz")
    server.worker_seen = True
    assert (answer.status_code, answer.json()["checks"]["worker"]["ok"]) == (503, False)
    assert http.get("/livez").status_code == http.get("/startupz").status_code == 200

    def fail() -> None:
        raise QueueError("no connection")

    monkeypatch.setattr(server.queue, "counts", fail)
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["queue"]["reason"]) == (503, "no connection")


def test_queue_out_of_reach_is_503_and_may_be_tried_again(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise QueueError("no connection")

    monkeypatch.setattr(server.queue, "put", fail)
    answer = http.post(CHAT, json={"model": "default", "messages": [{"role": "user", "content": "Q"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"]
    assert "x-should-retry" not in answer.headers
    upload = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a", b"x")})
    assert upload.status_code == 503
    assert sorted(path.name for path in (server.data_dir / "uploads").iterdir() if path.name != ".incoming") == sorted(
        file.id for file in server.documents.files("local", limit=100, after=None, order="asc", purpose=None)
    )


def test_an_unforeseen_error_is_a_500_that_names_the_request(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.documents, "files", fail)
    answer = http.get("/v1/files", headers={"x-request-id": "crash-1"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "crash-1" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "crash-1"
    assert "ZeroDivisionError" in caplog.text


def test_requests_are_counted_by_route(http: httpx.Client) -> None:
    http.get("/v1/files/file-none")
    text = http.get("/metrics").text
    assert 'foreword_http_requests_total{method="GET",route="/v1/files/{file_id}",status="404"}' in text
    assert "file-none" not in text
    assert "foreword_jobs{" in text


def test_a_made_up_method_makes_no_series(http: httpx.Client) -> None:
    http.request("BREW", "/livez")
    assert "BREW" not in http.get("/metrics").text


def test_many_waiting_streams_hold_nobody_up(server: Server) -> None:
    """More streams than threads: none may cost one."""
    server.worker.prefill_gate.clear()
    client = server.client()
    file = client.files.create(file=("a.txt", b"waited for by many"), purpose="user_data")
    body = {
        "model": "default",
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}],
    }
    count, first_comments, answers = 80, threading.Semaphore(0), []
    many = httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=count))

    def follow() -> None:
        text = ""
        with many.stream("POST", CHAT, json=body) as response:
            for line in response.iter_lines():
                if line.startswith(":") and not text:
                    first_comments.release()
                text += line
        answers.append("[DONE]" in text)

    threads = [threading.Thread(target=follow) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        assert first_comments.acquire(timeout=20)
    started = time.monotonic()
    assert server.http.get(f"/v1/files/{file.id}").json()["status"] == "uploaded"
    assert time.monotonic() - started < 2
    server.worker.prefill_gate.set()
    for thread in threads:
        thread.join()
    many.close()
    assert answers == [True] * count


def test_the_api_process_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, service.app, service.served_model;"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
