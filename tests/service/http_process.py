"""The test server as a process that can be killed: prints its address, then serves until it dies.

With the argument `hold-prefills` its worker never ends a prefill, with `hold-answers` no answer; with
`private-webhooks` it sends to this machine.
"""

import sys
import threading
from pathlib import Path

from tests.service.http_fakes import Server

if __name__ == "__main__":
    server = Server(Path(sys.argv[1]), webhook_allow_private="private-webhooks" in sys.argv)
    if "hold-prefills" in sys.argv:
        server.worker.prefill_gate.clear()
    if "hold-answers" in sys.argv:
        server.worker.answer_gate.clear()
    print(server.start().url, flush=True)
    threading.Event().wait()
