"""What `swift-run --result FILE` leaves: one JSON file on each node, for whom no exit code reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd_cluster import etcd_binary
from tests.support.job import SOURCE_ROOTS

OF_RANK_1 = "import os, time\nif os.environ['RANK'] == '1':\n    {}\ntime.sleep(60)\n"
SCRIPTS = {
    "succeeds": "",
    "raises": OF_RANK_1.format("raise ValueError('no such column')"),
    "killed": OF_RANK_1.format("os.kill(os.getpid(), 9)"),
}


@pytest.mark.parametrize(
    ("script", "args", "code", "cause"),
    [
        ("succeeds", (), 0, "succeeded"),
        ("raises", (), 1, "script"),
        ("killed", (), 1, "script"),
        ("succeeds", ("--spares", "-1"), 2, "usage"),
        ("succeeds", ("--local-addr", "192.0.2.77"), 69, "infrastructure"),
    ],
    ids=["succeeds", "raises", "killed", "usage", "infrastructure"],
)
def test_how_it_ended(script: str, args: tuple[str, ...], code: int, cause: str, tmp_path: Path) -> None:
    result, train = tmp_path / "result.json", tmp_path / "train.py"
    train.write_text(SCRIPTS[script])
    command = [
        sys.executable,
        "-m",
        "swift_agent.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--result",
        str(result),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "SWIFT_ETCD_BINARY": etcd_binary()}
    done = subprocess.run(
        [*command, *args, str(train)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    found: dict[str, Any] = json.loads(result.read_text())
    assert (done.returncode, found["exit_code"], found["cause"]) == (code, code, cause), done.stderr
    assert [name for name in os.listdir(tmp_path) if "result" in name] == ["result.json"]
    if script == "succeeds":
        assert found["failures"] == [] and bool(found["why"]) == bool(code)
        return
    first = found["failures"][0]
    assert first["rank"] == 1 and first["exit_code"] == (1 if script == "raises" else -9), found
    assert found["why"].startswith("rank 1: ")
