"""The metrics of a worker that runs by itself, on a port of its own. Beside a server the API shows them all."""

import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from service.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)


def show_metrics(metrics: Metrics, host: str, port: int) -> Callable[[], None]:
    """Serve /metrics from a thread; returns what ends that. A port that is taken costs the metrics, not the worker."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            text = metrics.render()
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

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
