"""The HTTP server of `--metrics-port`: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes.

It runs in threads of its own, reads what the agent's loop has left, and has no way to change anything. Without the
option there is none, and prometheus_client is not imported. Must never write to the log what a client sends.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from swift_agent.agent.metrics.exposition import Metrics, Snapshot

# Of a client that says nothing.
CLIENT_TIMEOUT_S = 5.0
# At a time; more are refused at once, so that they cannot take the agent's descriptors.
MOST_CLIENTS = 16
PATHS = ("/metrics", "/healthz", "/readyz")


class MetricsServer(socketserver.ThreadingTCPServer):
    """Listens once made, and raises `OSError` if that cannot be. *snapshot*: as of now, None before the agent has
    entered its job; *alive*, *ready*: why not, "" if it is. All three are called in threads of this server."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(
        self, address: str, port: int, job_id: str, snapshot: Callable[[], Snapshot | None], alive: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:  # fmt: skip
        self.job_id, self.snapshot, self.alive, self.ready = job_id, snapshot, alive, ready
        self._free = threading.Semaphore(MOST_CLIENTS)
        self.address_family, _, _, _, at = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        super().__init__(at, _Handler)  # type: ignore[arg-type]  # of IPv6 it is longer
        self._thread = threading.Thread(target=self.serve_forever, name="swift-metrics", args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # there was no thread for it: the caller hangs up
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Of the whole request: one byte now and then must not keep the place of others.
        deadline = threading.Timer(CLIENT_TIMEOUT_S, _hang_up, (request,))
        deadline.daemon = True
        try:
            deadline.start()
        except RuntimeError:  # no thread is left: who asks again may find one
            self.shutdown_request(request)
            self._free.release()
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""

    def close(self) -> None:
        """Listens no more. Requests that run end by themselves."""
        self.shutdown()
        self.server_close()
        self._thread.join()


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = CLIENT_TIMEOUT_S
    server_version, sys_version = "swift-agent", ""

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._metrics()
            case "/healthz":
                self._probe(self.server.alive())
            case "/readyz":
                self._probe(self.server.ready())
            case _:
                self._answer(404, "text/plain; charset=utf-8", f"here are {', '.join(PATHS)}\n".encode())

    do_HEAD = do_GET

    def _probe(self, why_not: str) -> None:
        self._answer(503 if why_not else 200, "text/plain; charset=utf-8", f"{why_not or 'ok'}\n".encode())

    def _metrics(self) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        seen = self.server.snapshot()
        if seen is not None:
            registry.register(Metrics(self.server.job_id, seen))
        encode, kind = choose_encoder(self.headers.get("Accept") or "")
        self._answer(200, kind, encode(registry))

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds."""
