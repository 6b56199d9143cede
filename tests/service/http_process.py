"""The test server as a process that can be killed: prints its address, then serves until it dies."""

import sys
import threading
from pathlib import Path

from tests.service.http_fakes import Server

if __name__ == "__main__":
    print(Server(Path(sys.argv[1])).start().url, flush=True)
    threading.Event().wait()
