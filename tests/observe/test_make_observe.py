"""What `make observe` starts, as far as that is not seen by trying it: ports, and Grafana, which can't be had here."""

import json
import os
import socket
import stat
import sys
import textwrap
from pathlib import Path

import httpx
import pytest

from tools.observe.__main__ import grafana, port_or_free
from tools.observe.prometheus import DEPLOYED, local_config
from tools.observe.work import CODE_CHARS, source

ROOT = Path(__file__).resolve().parents[2]


def test_the_wanted_port_where_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = port_or_free(port)
        assert other != port
    assert port_or_free(port) == port


def test_prometheus_gets_the_deployed_rules(tmp_path: Path) -> None:
    config = local_config(["127.0.0.1:8123"], 2)
    assert config["rule_files"] == [str(DEPLOYED / "rules.yml"), str(DEPLOYED / "alerts.yml")]
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    assert config["global"]["scrape_interval"] == "2s"


def test_what_is_uploaded_is_this_repository_and_long_enough_to_be_sparse() -> None:
    files = source()
    size = sum(len(text) for text in files.values())
    assert 0.9 * CODE_CHARS < size <= CODE_CHARS
    assert all((ROOT / name).is_file() for name in files)


def test_without_grafana_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with grafana(tmp_path, "http://127.0.0.1:9090") as url:
        assert url is None


def test_grafana_is_told_where_data_and_dashboard_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for grafana-server: answers as it does, and shows what it was given."""
    program = tmp_path / "grafana-server"
    program.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(
            """
            import http.server, json, os, sys
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    text = json.dumps({"arguments": sys.argv[1:], **os.environ}).encode()
                    self.send_response(200)
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                def log_message(self, *arguments): pass
            address = (os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"]))
            http.server.HTTPServer(address, Handler).serve_forever()
            """
        )
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with grafana(tmp_path, "http://127.0.0.1:9191") as url:
        assert url is not None
        given = json.loads(httpx.get(url).text)
        assert given["FOREWORD_PROMETHEUS_URL"] == "http://127.0.0.1:9191"
        assert (Path(given["FOREWORD_DASHBOARDS"]) / "foreword.json").is_file()
        provisioning = Path(given["GF_PATHS_PROVISIONING"])
        names = {path.relative_to(provisioning).as_posix() for path in provisioning.rglob("*.yml")}
        assert names == {"datasources/prometheus.yml", "dashboards/foreword.yml"}
    with pytest.raises(httpx.TransportError):
        httpx.get(url)
