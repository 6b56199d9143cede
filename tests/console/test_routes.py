"""The page and its assets as they are served: complete, from here alone, under a strict policy."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.routes.console import HEADERS, assets
from tests.service.http_fakes import Server, serving

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "service" / "console"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("routes"), max_upload_bytes=77) as server:
        yield server


def test_the_page_comes_with_its_policy(server: Server) -> None:
    page = server.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in ("/", "/console/main.js", "/console/base.css", "/console/icon.svg"):
        answer = server.http.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_an_unchanged_asset_is_not_sent_again(server: Server) -> None:
    first = server.http.get("/console/main.js")
    again = server.http.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.get("/console/main.js", headers={"if-none-match": '"other"'}).content == first.content


def test_no_page_brings_scripts_from_elsewhere(server: Server) -> None:
    """They would run in the console's origin, where its API key is."""
    assert [server.http.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]
    assert server.http.get("/openapi.json").json()["info"]["title"] == "Foreword"


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "index.html%00", "__init__.py"])
def test_nothing_else_is_served(server: Server, name: str) -> None:
    answer = server.http.get(f"/console/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_settings_need_no_key_and_tell_no_more_than_they_must(server: Server) -> None:
    told = server.http.get("/console/settings").json()
    assert told == {"version": told["version"], "model": server.model.id, "keys": False, "max_upload_bytes": 77}


def test_every_asset_is_packed_and_every_link_leads_to_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["service"]
    packed = {path for pattern in patterns for path in (ROOT / "service").glob(pattern)}
    assert set(CONSOLE.iterdir()) <= packed
    assert set(assets()) == {path.name for path in CONSOLE.iterdir()}
    linked = {"index.html"}
    for name, asset in assets().items():
        text = asset.data.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        linked |= set(re.findall(r'(?:/console/|from "\./)([\w.-]+\.\w+)"', text))
    assert linked == set(assets())
