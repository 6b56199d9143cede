"""Wake-ups between processes of one machine: a datagram says that something about `key` is new in the database.

Each listener binds a Unix socket in a folder that all of them share; an announcer sends to every socket of its topic
there. A datagram may be lost (the kernel keeps few), so a listener also asks `missed` now and then while anybody
waits: a loss costs TICK_S, never an event.
"""

import contextlib
import hashlib
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from service.queue.waiters import Waiters

log = logging.getLogger(__name__)

TICK_S = 0.5
_MAX_SOCKET_PATH = 107  # bytes, the kernel's limit
_MAX_SOCKET_NAME = 28


def socket_folder(data_dir: Path) -> Path:
    """Where the sockets of this data folder lie: in it, or in the temporary folder where its path is too long."""
    folder = data_dir / "run"
    if len(os.fsencode(folder)) + 1 + _MAX_SOCKET_NAME > _MAX_SOCKET_PATH:
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"foreword-{os.getuid()}-{name}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class Announcer:
    """Tells all listeners of a topic. Never waits, never fails: the database already has the news."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def announce(self, topic: str, key: str) -> None:
        message = key.encode()
        for name in os.listdir(self._folder):
            if name.startswith(f"{topic}."):
                self._send(self._folder / name, message)

    def _send(self, path: Path, message: bytes) -> None:
        try:
            self._socket.sendto(message, str(path))
        except ConnectionRefusedError:  # its process was killed
            path.unlink(missing_ok=True)
        except OSError:
            pass  # full, or gone meanwhile: the listener's tick finds the news

    def close(self) -> None:
        self._socket.close()


class Listener:
    """One thread that wakes any number of waiters, of threads and of event loops."""

    def __init__(self, folder: Path, topic: str, missed: Callable[[], Iterable[str]]) -> None:
        """`missed` returns the keys with news since it was last asked; it is called from the listener's thread."""
        self._path = folder / f"{topic}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._missed = missed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self.waiters = Waiters(self._poke)  # the thread sleeps without a tick while nobody waits
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"listen-{topic}", daemon=True)
        self._thread.start()

    def _poke(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            with contextlib.suppress(OSError):  # full: then it is awake anyway
                sender.sendto(b"", str(self._path))

    def _run(self) -> None:
        tick_at = 0.0
        while not self._closed:
            left_s = max(0.001, tick_at - time.monotonic())
            self._socket.settimeout(left_s if self.waiters else None)
            with contextlib.suppress(TimeoutError):
                self.waiters.wake(self._socket.recv(256).decode())
            # By the clock and not by silence: where others' news never cease, a lost one must be found all the same.
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_S
                self._find_missed()

    def _find_missed(self) -> None:
        try:
            for key in self._missed():
                self.waiters.wake(key)
        except Exception:
            log.exception("lost wake-ups not looked for; it is tried again")

    def close(self) -> None:
        self._closed = True
        self._poke()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
