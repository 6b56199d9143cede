"""The metrics of a worker that runs by itself, on a port of its own. Beside a server the API shows them all."""

import logging
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.metrics import CONTENT_TYPE, Metrics
from service.metrics_state import room
from service.metrics_vllm import vllm_names
from service.settings import Settings

log = logging.getLogger(__name__)


class WorkerPage(Collector):
    """What a worker shows: its counts and, between `opened` and `closed`, its stored KV and the disk under that."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self._metrics = metrics
        self._settings = settings
        self._kv_usage: Callable[[], Mapping[str, int]] | None = None
        self._rename: Callable[[list[Metric]], list[Metric]] = lambda found: []

    def opened(self, kv_usage: Callable[[], Mapping[str, int]], model: str) -> None:
        """`kv_usage` returns bytes by tier."""
        self._kv_usage = kv_usage
        if self._settings.metrics_vllm_names:
            self._rename = vllm_names(model)

    def closed(self) -> None:
        self._kv_usage = None

    def collect(self) -> Iterable[Metric]:
        kv_usage = self._kv_usage
        if kv_usage is not None:
            yield from room(self._settings, self._settings.data_dir, kv_usage())

    def text(self) -> bytes:
        return self._metrics.render(self, rename=self._rename)


def show_metrics(text: Callable[[], bytes], host: str, port: int) -> Callable[[], None]:
    """Serve /metrics from a thread; returns what ends that. A port that is taken costs the metrics, not the worker."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                body = text()
            except Exception:  # the KV store's index, say, on a disk that fails
                log.exception("a scrape failed")
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """A line a scrape is worth nobody's while."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        log.error("no metrics on %s port %d: %s", host, port, error.strerror)
        return lambda: None
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    log.info("metrics on http://%s:%d/metrics", host, server.server_port)

    def close() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return close
