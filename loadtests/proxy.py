"""A TCP proxy between a program and its Redis, to do to the network what networks do."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards one port of this machine to another. Thread-safe."""

    def __init__(self, target_port: int, *, port: int = 0) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._refusing = False
        self._swallow: bytes | None = None
        self.swallowed = 0  # replies
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break every connection and take no new one."""
        with self._lock:
            self._refusing = True
            doomed, self._open = self._open, set()
        for end in doomed:
            _close(end)

    def mend(self) -> None:
        with self._lock:
            self._refusing = False

    def swallow_reply(self, word: bytes) -> None:
        """Break the connection on which the next command with `word` in it comes, when its reply is on its way."""
        with self._lock:
            self._swallow = word

    def close(self) -> None:
        _close(self._listener)
        self.cut()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refusing = self._refusing
            try:
                server = None if refusing else socket.create_connection(self._target, timeout=5)
            except OSError:  # Redis is away
                server = None
            if server is None:
                _close(client)
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._lock:
                self._open |= {client, server}
            for run in (pair.forward, pair.backward):
                threading.Thread(target=run, name="proxy-pipe", daemon=True).start()

    def _takes(self, data: bytes) -> bool:
        with self._lock:
            if self._swallow is None or self._swallow not in data:
                return False
            self._swallow = None
            self.swallowed += 1
            return True

    def _ended(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open -= set(ends)
        for end in ends:
            _close(end)


class _Pair:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._swallowing = False

    def forward(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(1 << 16):
                self._swallowing = self._swallowing or self._proxy._takes(data)
                self._server.sendall(data)
        self._proxy._ended(self._client, self._server)

    def backward(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._server.recv(1 << 16)) and not self._swallowing:
                self._client.sendall(data)
        self._proxy._ended(self._client, self._server)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
