"""A server without keys and other people's web pages; with keys nothing is guarded that way."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.auth import Key, KeyRing
from tests.service.http_fakes import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("origins"), allowed_hosts="reader.example, proxy") as server:
        yield server


def upload(server: Server, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post(
        "/v1/files", files={"file": ("a.txt", b"text")}, data={"purpose": "user_data"}, headers=named
    )


def code(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert answer.status_code == 403
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    return str(error["code"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "a.localhost:80",
        "127.0.0.1",
        "127.9.9.9:8000",
        "[::1]:8000",
        "reader.example",
        "proxy:443",
    ],
)
def test_own_names_are_answered(server: Server, host: str) -> None:
    for path in ("/", "/v1/files"):
        assert server.http.get(path, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "192.0.2.7", "reader.example.evil", "[::", "a b"]
)
def test_a_rebound_name_reads_nothing(server: Server, host: str) -> None:
    for path in ("/", "/v1/files", "/console/settings", "/docs"):
        assert code(server.http.get(path, headers={"host": host})) == "forbidden_host"
    assert code(upload(server, host=host, sec_fetch_site="same-origin")) == "forbidden_host"


def test_probes_answer_under_any_name(server: Server) -> None:
    for path in ("/livez", "/readyz", "/startupz", "/metrics"):
        assert server.http.get(path, headers={"host": "foreword.monitoring.svc"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site", "origin": "https://evil.example"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"origin": "http://[::"},
    ],
)
def test_pages_of_other_origins_change_nothing(server: Server, headers: dict[str, str]) -> None:
    before = len(server.http.get("/v1/files").json()["data"])
    assert code(upload(server, **headers)) == "forbidden_origin"
    kept = server.http.get("/v1/files").json()["data"]
    assert len(kept) == before
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    assert code(server.http.delete("/v1/files/file-x", headers=named)) == "forbidden_origin"
    assert server.http.get("/v1/files", headers=named).status_code == 200  # the browser hides the answer from that page


def test_the_own_page_and_programs_are_let_through(server: Server) -> None:
    own = server.url
    assert upload(server).status_code == 200
    assert upload(server, origin=own).status_code == 200
    assert upload(server, origin=own, sec_fetch_site="same-origin").status_code == 200
    assert upload(server, sec_fetch_site="none").status_code == 200
    # Behind a proxy that ends TLS and hands on the name.
    assert upload(server, host="reader.example", origin="https://reader.example").status_code == 200
    file = server.client().files.create(file=("b.txt", b"of the client"), purpose="user_data")
    assert server.client().files.delete(file.id).deleted


def test_beyond_loopback_any_address_is_a_name(tmp_path: Path) -> None:
    with serving(tmp_path, insecure=True) as server:
        assert server.http.get("/", headers={"host": "192.0.2.7:8000"}).status_code == 200
        assert code(server.http.get("/", headers={"host": "evil.example"})) == "forbidden_host"


def test_with_keys_a_page_without_one_is_nobody(tmp_path: Path) -> None:
    keys = KeyRing([Key(sha256=hashlib.sha256(b"sk-a").hexdigest(), tenant="a")])
    with serving(tmp_path, keys=keys) as server:
        other = {"host": "foreword.internal", "origin": "https://app.example", "sec-fetch-site": "cross-site"}
        assert server.http.delete("/v1/files/file-x", headers=other).status_code == 401
        bearer = {**other, "authorization": "Bearer sk-a"}
        assert server.http.delete("/v1/files/file-x", headers=bearer).status_code == 404
