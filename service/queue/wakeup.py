"""Wake-ups between processes of one machine: a datagram says that something about `key` is new in the database.

Each listener binds a Unix socket in a folder that all of them share; an announcer sends to every socket of its topic
there. A datagram may be lost (the kernel keeps few), so a listener also asks `missed` now and then while anybody
waits: a loss costs TICK_S, never an event.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
        self._lock = threading.Lock()
        self._waiters: dict[str, set[Callable[[], None]]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"listen-{topic}", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, key: str) -> Iterator[threading.Event]:
        """An event that is set at each news of `key` within the block."""
        event = threading.Event()
        with self._registered(key, event.set):
            yield event

    @contextmanager
    def watch_async(self, key: str) -> Iterator[asyncio.Event]:
        """The same for the running event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(event.set)

        with self._registered(key, wake):
            yield event

    @contextmanager
    def _registered(self, key: str, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            idle = not self._waiters
            self._waiters.setdefault(key, set()).add(wake)
        if idle:
            self._poke()  # the thread sleeps without a tick while nobody waits
        try:
            yield
        finally:
            with self._lock:
                group = self._waiters[key]
                group.discard(wake)
                if not group:
                    del self._waiters[key]

    def _poke(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            with contextlib.suppress(OSError):  # full: then it is awake anyway
                sender.sendto(b"", str(self._path))

    def _run(self) -> None:
        tick_at = 0.0
        while not self._closed:
            with self._lock:
                left_s = max(0.001, tick_at - time.monotonic())
                self._socket.settimeout(left_s if self._waiters else None)
            with contextlib.suppress(TimeoutError):
                self._wake(self._socket.recv(256).decode())
            # By the clock and not by silence: where others' news never cease, a lost one must be found all the same.
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_S
                self._find_missed()

    def _find_missed(self) -> None:
        try:
            for key in self._missed():
                self._wake(key)
        except Exception:
            log.exception("lost wake-ups not looked for; it is tried again")

    def _wake(self, key: str) -> None:
        with self._lock:
            wakes = list(self._waiters.get(key, ()))
        for wake in wakes:
            wake()

    def close(self) -> None:
        self._closed = True
        self._poke()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
