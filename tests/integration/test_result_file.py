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
    "says it": OF_RANK_1.format("os.write(2, b'NCCL WARN no device\\n'); os.abort()"),
    "silent": OF_RANK_1.format("os._exit(7)"),
}


# Of rank 1: exit code, signal, the line that says it, and how the details begin.
WORDS = {
    "raises": (1, None, "ValueError: no such column", "Traceback (most recent call last):\n"),
    "killed": (-9, "SIGKILL", "SIGKILL", ""),
    "says it": (-6, "SIGABRT", "NCCL WARN no device", "the last lines of its standard error:\nNCCL WARN"),
    "silent": (7, None, "exited with code 7, and wrote nothing to its standard error", "exited with code 7"),
}


@pytest.mark.parametrize(
    ("script", "args", "code", "cause"),
    [
        ("succeeds", (), 0, "succeeded"),
        ("raises", (), 1, "script"),
        ("killed", (), 1, "script"),
        ("says it", (), 1, "script"),
        ("says it", ("--redirects", "2", "--log-dir", "logs-${node_id}", "--node-id", "n7"), 1, "script"),
        ("silent", (), 1, "script"),
        ("succeeds", ("--spares", "-1"), 2, "usage"),
        ("succeeds", ("--local-addr", "192.0.2.77"), 69, "infrastructure"),
    ],
    ids=["succeeds", "raises", "killed", "says it", "says it to a file", "silent", "usage", "infrastructure"],
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
        [*command, *args, str(train)], env=environment, capture_output=True, text=True, timeout=100, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(result.read_text())
    assert (done.returncode, found["exit_code"], found["cause"]) == (code, code, cause), done.stderr
    assert (found["job"] == "none") == (code == 2)  # with --standalone a job has a name of its own
    assert [name for name in os.listdir(tmp_path) if "result" in name] == ["result.json"]
    if script == "succeeds":
        assert found["failures"] == [] and bool(found["why"]) == bool(code)
        return
    first = found["failures"][0]
    exit_code, number, message, details = WORDS[script]
    known = [first[name] for name in ("rank", "local_rank", "generation", "exit_code", "signal", "message")]
    assert known == [1, 1, 1, exit_code, number, message], found
    assert found["why"] == f"rank 1: {message}" and first["details"].startswith(details)
    # The script knows nothing of us, and records nothing: what people see says why all the same.
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "To enable traceback" not in summary and (message in summary or script == "killed")
    assert script == "killed" or "<N/A>" not in summary
    if "--redirects" in args:
        assert "NCCL WARN" in next((tmp_path / "logs-n7").rglob("1/stderr.log")).read_text()
    elif script == "says it":
        assert done.stderr.index("NCCL WARN") < done.stderr.index("(pid ")  # as it was written, and before its end


@pytest.mark.parametrize("how", ["exit(7)", "quit(7)", "sys.exit(7)"])
def test_a_rank_of_a_job_that_exits_has_failed(how: str, tmp_path: Path) -> None:
    """It is not taken to have come to the end of its run, where it would wait for the others."""
    result, train = tmp_path / "result.json", tmp_path / "train.py"
    train.write_text(
        f"import sys, time, swift_agent\njob = swift_agent.init()\nif job.rank == 1:\n    {how}\ntime.sleep(60)\n"
    )
    command = (
        sys.executable, "-m", "swift_agent.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0",
        "--result", str(result), str(train),
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "SWIFT_ETCD_BINARY": etcd_binary()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    found = json.loads(result.read_text())
    assert done.returncode == 1 and found["failures"][0]["exit_code"] == 7, done.stderr
