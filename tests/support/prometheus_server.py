"""A real Prometheus on loopback, and promtool, as scripts/fetch_prometheus.sh puts them; else the machine's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.job import ROOT
from tests.support.ports import free_ports

FETCHED = Path(os.environ.get("SWIFT_PROMETHEUS", ROOT / ".cache" / "prometheus"))


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{FETCHED}/usr/bin:{os.environ['PATH']}")


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    missing = [name for name in ("prometheus", "promtool") if program(name) is None]
    return f"no {' and no '.join(missing)}: scripts/fetch_prometheus.sh .cache/prometheus" if missing else ""


def promtool(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What it prints. Fails the test if it fails."""
    tool = program("promtool")
    assert tool is not None
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, f"promtool {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class PrometheusServer:
    """Scrapes *targets* (host:port) once a second, with the rules of *rules*. Use as a context."""

    def __init__(self, directory: Path, targets: list[str], rules: Path) -> None:
        self._directory, self._targets, self._rules = directory, targets, rules
        (self._port,) = free_ports(1)

    def __enter__(self) -> PrometheusServer:
        self._directory.mkdir()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "swift-agent", "static_configs": [{"targets": self._targets}]}],
            "rule_files": [str(self._rules)],
        }
        (self._directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        server = program("prometheus")
        assert server is not None
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    server, f"--config.file={self._directory}/prometheus.yml",
                    f"--storage.tsdb.path={self._directory}/data", f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._directory,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait(10)

    def _wait(self) -> None:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
                    return
            except OSError:
                assert self._process.poll() is None, (self._directory / "log").read_text()
                assert time.monotonic() < deadline_s, "it is not ready"
                time.sleep(0.05)

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """As of now: labels -> value."""
        found = self._get("query", query=expression)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}

    def value(self, expression: str) -> float | None:
        """Of an expression with one result at most."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return next(iter(found.values()), None)

    def highest(self, expression: str, since_s: float) -> float | None:
        """The highest value of an expression with one result, within the last *since_s* seconds."""
        now_s = time.time()
        found = self._get("query_range", query=expression, start=str(now_s - since_s), end=str(now_s), step="1")
        return max((float(value) for one in found["result"] for _, value in one["values"]), default=None)

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
