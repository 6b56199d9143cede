"""`make observe`: a server, Prometheus and, where it is installed, Grafana, with real work to see; until Ctrl-C.

Everything listens on loopback and is kept in a folder that goes when it ends. Default ports where they are free.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console

from tools.dashboard.picture import draw
from tools.observe.prometheus import Prometheus, free_port
from tools.observe.work import Work

ROOT = Path(__file__).resolve().parents[2]
INTERVAL_S = 2
START_S = 300.0  # the first start converts the default model
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.observe")
    parser.add_argument("--minutes", type=float, default=0, help="go on reading and asking for so long")
    parser.add_argument("--picture", type=Path, help="draw the dashboard to this PNG when the work is done, and end")
    options = parser.parse_args()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with tempfile.TemporaryDirectory(prefix="foreword-observe-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(server(folder))
        try:
            prometheus = Prometheus(
                folder / "prometheus", [url.removeprefix("http://")], interval_s=INTERVAL_S, port=port_or_free(9090)
            )
        except RuntimeError as error:
            console.print(f"[red]{error}")
            return 1
        stack.callback(prometheus.stop)
        grafana_url = stack.enter_context(grafana(folder, prometheus.url))
        console.print(f"Foreword    {url}  (metrics: {url}/metrics)")
        console.print(f"Prometheus  {prometheus.url}/alerts")
        if grafana_url:
            console.print(f"Grafana     {grafana_url}/d/foreword")
        else:
            console.print("Grafana     not installed: the dashboard is drawn to a picture instead")
        work(url, options.minutes, stopped)
        picture = options.picture or (None if grafana_url else ROOT / "build/dashboard.png")
        if picture is not None and not stopped.is_set():
            picture.parent.mkdir(parents=True, exist_ok=True)
            draw(prometheus, picture)
            console.print(f"dashboard   {picture}")
        if options.picture is None and not stopped.is_set():
            console.print("Ctrl-C ends everything")
            stopped.wait()
    console.print("ended")
    return 0


def work(url: str, minutes: float, stopped: threading.Event) -> None:
    """A part of this repository is read and asked about; what goes wrong on the way is part of the picture."""
    with Work(url) as doing:
        try:
            for line in itertools.chain(doing.steps(), doing.more(minutes)):
                console.print(f"  {line}")
                if stopped.is_set():
                    return
        except httpx.HTTPStatusError as error:  # what was seen so far stays to be looked at
            console.print(f"[red]{error.response.status_code}: {error.response.text}")


def port_or_free(wanted: int) -> int:
    """`wanted` where nobody listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
    return wanted


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`foreword serve`; its address once it can answer."""
    port = port_or_free(8000)
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "foreword", "serve", "--port", str(port)],
            env={**os.environ, "FOREWORD_DATA_DIR": str(folder / "data")},
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    try:
        with console.status("starting the server (the first time it converts the default model)"):
            wait_for(f"{url}/readyz", process, log)
        yield url
    finally:
        end(process)


@contextlib.contextmanager
def grafana(folder: Path, prometheus_url: str) -> Iterator[str | None]:
    """`grafana-server` with the dashboard in it; None where it isn't installed."""
    program = shutil.which("grafana-server")
    if program is None:
        yield None
        return
    port = port_or_free(3000)
    url = f"http://127.0.0.1:{port}"
    log = folder / "grafana.log"
    deployed = ROOT / "deploy/grafana"
    environment = {
        "FOREWORD_PROMETHEUS_URL": prometheus_url,
        "FOREWORD_SCRAPE_INTERVAL": f"{INTERVAL_S}s",
        "FOREWORD_DASHBOARDS": str(deployed / "dashboards"),
        "GF_PATHS_PROVISIONING": str(deployed / "provisioning"),
        "GF_PATHS_DATA": str(folder / "grafana"),
        "GF_PATHS_LOGS": str(folder / "grafana"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    home = os.environ.get("GRAFANA_HOME", "/usr/share/grafana")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "--homepath", home],
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(f"{url}/api/health", process, log)
        yield url
    finally:
        end(process)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"{process.args} ended with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    sys.exit(f"{url} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
