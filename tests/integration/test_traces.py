"""`swiftctl timeline --otlp`: to a file, and to a collector over HTTP."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from swift_agent.ctl.timeline.assemble import assemble
from swift_agent.ctl.timeline.command import write_traces
from tests.support.ports import free_ports
from tests.support.timelines import known
from tests.unit.ctl.timeline.test_traces import as_collector


def test_a_collector_gets_them_and_what_it_refuses_is_said(tmp_path: Path) -> None:
    got: list[tuple[str, str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], as_collector(json.loads(body))))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        write_traces(assemble(known()), f"{url}/v1/traces")
        ((path, kind, request),) = got
        assert (path, kind) == ("/v1/traces", "application/json")
        assert len(request.resource_spans[0].scope_spans[0].spans) == 6
        with pytest.raises(click.ClickException, match="the traces are not there: Not Found"):
            write_traces(assemble(known()), f"{url}/wrong")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    (port,) = free_ports(1)
    with pytest.raises(click.ClickException, match="Connection refused"):
        write_traces(assemble(known()), f"http://127.0.0.1:{port}/v1/traces")
    write_traces(assemble(known()), str(tmp_path / "traces.json"))
    assert len(as_collector(json.loads((tmp_path / "traces.json").read_text())).resource_spans) == 1
    with pytest.raises(click.ClickException, match="No such file"):
        write_traces(assemble(known()), str(tmp_path / "none" / "traces.json"))
