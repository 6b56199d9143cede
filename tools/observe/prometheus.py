"""A Prometheus on a free loopback port, with the scrape config, rules and alerts of deploy/prometheus."""

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy/prometheus"
START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """Started at once; `stop` ends it. `folder` keeps its data and its log."""

    def __init__(self, folder: Path, targets: Sequence[str], *, interval_s: int, port: int | None = None) -> None:
        """Raises RuntimeError where it can't be started."""
        program = shutil.which("prometheus")
        if program is None:
            raise RuntimeError("prometheus is not installed (Debian: apt-get install prometheus)")
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(local_config(targets, interval_s)), encoding="utf-8")
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "prometheus.log"
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._client = httpx.Client(base_url=self.url, timeout=30)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query, each {"metric", "value"}. Raises ValueError with what is wrong with it."""
        return self._ask("query", {"query": expr})

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """The series of a range query, each {"metric", "values"}, in unix seconds."""
        return self._ask("query_range", {"query": expr, "start": start_s, "end": end_s, "step": step_s})

    def get(self, path: str) -> Any:
        """`data` of another endpoint under /api/v1/."""
        return self._client.get(f"/api/v1/{path}").json()["data"]

    def stop(self) -> None:
        self._client.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, kind: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._client.post(f"/api/v1/{kind}", data=parameters).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {parameters['query']}")
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"prometheus did not start:\n{self.log.read_text(errors='replace')[-2000:]}")


def local_config(targets: Sequence[str], interval_s: int) -> dict[str, Any]:
    """The deployed configuration with other targets and another interval; its rule files by their full paths."""
    config: dict[str, Any] = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"}
    config["rule_files"] = [str(DEPLOYED / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    return config
