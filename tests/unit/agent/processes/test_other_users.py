"""A worker that has become a process of another user: an agent that may not signal it says so, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import ROOT

# The agent's part gives up root's rights, as an agent of an ordinary user has none.
SCRIPT = """
import logging, os, signal, subprocess, sys, time

from swift_agent.agent.processes import workers as workers_module
from swift_agent.agent.processes.workers import WorkerProcess, Workers
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import parse_args
from swift_agent.wire.log_counters import LogCounters
from swift_agent.wire.standing import Standings

logging.basicConfig(stream=sys.stdout, format="%(message)s")
workers_module.KILL_TIMEOUT_S = 0.2
config = AgentConfig.from_args(parse_args(["--standalone", "--nproc-per-node", "1", "--no-python", "/bin/true"]))
workers = Workers(config, "127.0.0.1", Standings(sys.argv[1], 1), LogCounters(sys.argv[1], 1))
popen = subprocess.Popen(["sleep", "600"], user=1, start_new_session=True, stdout=-3, stderr=-3)
print(popen.pid, flush=True)
process = WorkerProcess(0, 3, 1, popen.pid, os.pidfd_open(popen.pid), "", popen)
workers.processes[0] = process
os.setresuid(65534, 65534, 65534)
workers.signal_process(process, signal.SIGTERM)
workers.signal_process(process, signal.SIGKILL)
workers.end_all(0.1)
assert not workers.processes
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_worker_of_another_user_is_told_once_and_does_not_end_the_agent(tmp_path: Path) -> None:
    path = ":".join(str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store"))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.stdout, run.stderr
    pid, *lines = run.stdout.splitlines()
    os.kill(int(pid), signal.SIGKILL)
    assert run.returncode == 0, run.stderr
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"worker {pid} has become a process of another user"), lines
    assert lines[1] == f"local rank 0 (pid {pid}) does not end, even by SIGKILL"
