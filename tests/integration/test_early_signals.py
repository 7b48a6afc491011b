"""A node that is told to end before it has a job to end: nothing of it may remain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.etcd_cluster import etcd_binary, wait_for


def has(prefix: str) -> Callable[[Path, str], bool]:
    return lambda directory, log: any(path.name.startswith(prefix) for path in directory.iterdir())


def says(what: str) -> Callable[[Path, str], bool]:
    return lambda directory, log: what in log


# In the order in which they come.
MOMENTS = {
    "logs directory": has("torchelastic_"),
    "agent's directory": has("swift-agent-"),
    "etcd's directory": has("swift-etcd-"),
    "joined": says("joined job"),
    "workers start": says("starts ranks"),
}


def default_signals() -> None:
    """What a shell gives its foreground jobs; those of a background job would stay ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("moment", "signum"), [*((moment, signal.SIGTERM) for moment in MOMENTS), ("etcd's directory", signal.SIGINT)]
)
def test_nothing_remains(moment: str, signum: signal.Signals, tmp_path: Path) -> None:
    # Not in tmp_path, whose name may be too long for the sockets of an agent: it would take another directory.
    temporary, log, script = Path(tempfile.mkdtemp()), tmp_path / "log", tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "swift_agent.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "SWIFT_ETCD_BINARY": etcd_binary(), "TMPDIR": str(temporary)}
    with log.open("wb") as output:
        agent = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=default_signals
        )
    family: set[psutil.Process] = set()
    try:
        while not MOMENTS[moment](temporary, log.read_text()):
            assert agent.poll() is None, log.read_text()
            time.sleep(0.005)
        family = set(psutil.Process(agent.pid).children(recursive=True))
        agent.send_signal(signum)
        assert agent.wait(30) == (75 if signum == signal.SIGTERM else 3), log.read_text()
        assert f"got signal: {int(signum)}" in log.read_text() or f"got {signum.name}" in log.read_text()
        assert list(temporary.iterdir()) == []
        wait_for(lambda: not any(process.is_running() for process in family), 5, "all processes end")
    finally:
        for process in (agent, *family):
            if process is agent or process.is_running():
                process.kill()
        agent.wait()
