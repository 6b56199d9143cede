"""Keys, tenants, limits, and what everybody may see."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, NotFoundError, RateLimitError

from service.auth import AuthError, Key, KeyRing, Limits, Principal, check_binding
from service.errors import Unauthorized
from tests.service.bench import until
from tests.service.http_fakes import Server, serving


def key(secret: str, tenant: str, **limits: int) -> Key:
    return Key(sha256=hashlib.sha256(secret.encode()).hexdigest(), tenant=tenant, limits=Limits(**limits))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing(
        [
            key("sk-ann", "ann"),
            key("sk-ann-too", "ann"),
            key("sk-bob", "bob"),
            key("sk-slow", "slow", requests_per_minute=2),
            key("sk-one", "one", concurrent_requests=1),
        ]
    )
    with serving(tmp_path_factory.mktemp("auth"), keys=keys) as server:
        yield server


def test_wrong_and_missing_keys(server: Server) -> None:
    with pytest.raises(AuthenticationError) as error:
        server.client("sk-wrong").models.list()
    assert error.value.code == "invalid_api_key"
    for headers in ({}, {"authorization": "Basic sk-ann"}, {"authorization": "Bearer"}):
        answer = server.http.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
        assert answer.headers["x-request-id"]


def test_health_and_metrics_need_no_key(server: Server) -> None:
    for path in ("/livez", "/readyz", "/startupz", "/metrics"):
        assert server.http.get(path).status_code == 200


def test_tenants_do_not_see_each_other(server: Server) -> None:
    ann, bob = server.client("sk-ann"), server.client("sk-bob")
    file = ann.files.create(file=("a.txt", b"of ann"), purpose="user_data")
    ann.files.wait_for_processing(file.id, poll_interval=0.02)
    assert server.client("sk-ann-too").files.retrieve(file.id).id == file.id
    document = ann.get(f"/documents/{file.id}", cast_to=httpx.Response).json()
    messages: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}]
    bearer = {"authorization": "Bearer sk-bob"}
    for call in (
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.files.list(after=file.id),
        lambda: bob.chat.completions.create(model="default", messages=messages),
    ):
        with pytest.raises(NotFoundError):
            call()
    for any_id in (file.id, document["document_id"]):
        for method, path in [("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/verify")]:
            url = f"/v1/documents/{any_id}{path}"
            assert server.http.request(method, url, headers=bearer).status_code == 404
    assert bob.files.list().data == []
    same = bob.files.create(file=("a.txt", b"of ann"), purpose="user_data")
    bob.files.wait_for_processing(same.id, poll_interval=0.02)
    own = bob.get(f"/documents/{same.id}", cast_to=httpx.Response).json()
    assert own["document_id"] != document["document_id"]


def test_requests_a_minute(server: Server) -> None:
    client = server.client("sk-slow")
    first = client.models.with_raw_response.list()
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    client.models.list()
    with pytest.raises(RateLimitError) as error:
        client.models.list()
    assert error.value.code == "rate_limit_exceeded"
    headers = error.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in headers


def test_requests_at_once(server: Server) -> None:
    client = server.client("sk-one")
    server.worker.answer_gate.clear()
    messages: Any = [{"role": "user", "content": "Q"}]
    stream = client.chat.completions.create(model="default", messages=messages, stream=True)
    next(stream)
    with pytest.raises(RateLimitError):
        client.models.list()
    server.worker.answer_gate.set()
    list(stream)

    def let_in() -> bool:
        with contextlib.suppress(RateLimitError):
            return bool(client.models.list().data)
        return False

    until(let_in)  # the server notes the end of an answer just behind its last byte


def test_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    digest = hashlib.sha256(b"sk-1").hexdigest()
    path.write_text(json.dumps([{"sha256": digest, "tenant": "t", "limits": {"requests_per_minute": 5}}]))
    ring = KeyRing.load(path)
    assert ring
    assert ring.authenticate("Bearer sk-1") == Principal("t", Limits(requests_per_minute=5), digest)
    with pytest.raises(Unauthorized):
        ring.authenticate("Bearer sk-2")
    assert not KeyRing.load(None)
    assert KeyRing.load(None).authenticate(None).tenant == "local"


def test_an_expired_key_is_no_key() -> None:
    now = 1_800_000_000.0
    ring = KeyRing([key("sk-1", "t").model_copy(update={"expires_at": now + 60})], clock=lambda: now)
    assert ring.authenticate("Bearer sk-1").tenant == "t"
    now += 60
    with pytest.raises(Unauthorized, match="expired") as refused:
        ring.authenticate("Bearer sk-1")
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '[{"sha256": "abc", "tenant": "t"}]', '[{"tenant": "t"}]', '[{"sha256": "%s", "tenant": ""}]'],
)
def test_damaged_keys_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text.replace("%s", "0" * 64))
    with pytest.raises(AuthError, match=r"keys\.json"):
        KeyRing.load(path)
    with pytest.raises(AuthError):
        KeyRing.load(tmp_path / "missing.json")


def test_without_keys_only_this_machine_may_call() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        check_binding(host, KeyRing(), insecure=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(AuthError, match="API keys"):
            check_binding(host, KeyRing(), insecure=False)
        check_binding(host, KeyRing(), insecure=True)
        check_binding(host, KeyRing([key("k", "t")]), insecure=False)
