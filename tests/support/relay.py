"""Between clients and a server on loopback: loses a connection in the middle of a call, or is silent, when it is told
to."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Relay:
    """To the server at *to_port*. A context manager."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._losing, self._num_before = "", 0
        self._sockets: list[socket.socket] = []
        self.num_lost = 0
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passes.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._sockets:
            _cut(one)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def lose(self, what: str, num_before: int = 0) -> None:
        """After so many that come whole: the next "request" before it has come to the server, or its "answer"."""
        with self._lock:
            self._losing, self._num_before = what, num_before

    def cut(self) -> None:
        """From now on nothing passes; who is connected, or connects, is not told."""
        self._passes.clear()

    def heal(self) -> None:
        """All connections that were there are broken; new ones pass."""
        with self._lock:
            open_ = list(self._sockets)
        for one in open_:
            _cut(one)
        self._passes.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(client)
            if not self._passes.is_set():
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._to_port))
            except OSError:
                _cut(client)
                continue
            with self._lock:
                self._sockets.append(server)
            for what, source, sink in (("request", client, server), ("answer", server, client)):
                self._threads.append(threading.Thread(target=self._pump, args=(what, source, sink)))
                self._threads[-1].start()

    def _pump(self, what: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not self._is_lost(what):
                self._passes.wait()
                sink.sendall(data)
        for one in (source, sink):
            _cut(one)  # not closed: the other thread may be about to read from it

    def _is_lost(self, what: str) -> bool:
        with self._lock:
            if self._losing != what:
                return False
            if self._num_before:
                self._num_before -= 1
                return False
            self._losing = ""
            self.num_lost += 1
            return True


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
