"""Who asks over HTTP is answered again as soon as there is a thread to answer in."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator

import pytest

from swift_agent.agent.metrics.server import MOST_CLIENTS, MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with contextlib.closing(MetricsServer("127.0.0.1", 0, "job", lambda: None, lambda: "", lambda: "")) as one:
        yield one


def healthz(server: MetricsServer) -> int | None:
    """The status; None if the server hung up without a word."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return None


@pytest.mark.parametrize("missing", ["the request", "its deadline"])
def test_want_of_threads_takes_no_place_for_ever(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if isinstance(self, threading.Timer) == (missing == "its deadline"):
            raise RuntimeError("can't start new thread")
        start(self)

    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fails)
        assert [healthz(server) for _ in range(MOST_CLIENTS)] == [None] * MOST_CLIENTS
    assert healthz(server) == 200 and told == []
