"""What strangers, and neighbours that misbehave, do to a job: it goes on, or says in a line why not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import assert_recovered
from tests.support.job import SCRIPT, Agents

KILL_RANK_3 = {"at": "backward", "iteration": 4, "rank": 3, "scope": "process"}


@pytest.fixture
def scanner() -> Iterator[None]:
    """Connects once to each port on loopback that begins to listen, as long as the test runs, and says nothing."""
    stop = threading.Event()
    thread = threading.Thread(target=_scan, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join()


def _scan(stop: threading.Event) -> None:
    seen, held = _listening(), []
    while not stop.wait(0.002):
        for port in _listening() - seen:
            seen.add(port)
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(("127.0.0.1", port))
    for one in held:
        one.close()


def _listening() -> set[int]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}


def test_a_port_scan_during_a_recovery_does_no_harm(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], scanner: None
) -> None:
    outcome = make_agents(orders={"faults": [KILL_RANK_3]}, environment={"GLOO_SOCKET_IFNAME": "lo"}).run()
    assert_recovered(outcome, undisturbed(), {3})
    assert "cannot find" not in outcome.text() and "cannot be connected" not in outcome.text()


def test_groups_that_cannot_be_connected_once_are_connected_in_the_next_generation(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    """No peer has failed, and no process is replaced."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, sys\n"
        "from pathlib import Path\n"
        "from swift_agent import gloo_sockets\n"
        "find = gloo_sockets.connections\n"
        "def once(*args):\n"
        "    marker = Path(__file__).with_name('refused')\n"
        "    if os.environ['RANK'] == '0' and Path(__file__).with_name('fired.0').exists() and not marker.exists():\n"
        "        marker.touch()\n"
        "        raise ConnectionError('this is the first try')\n"
        "    return find(*args)\n"
        "gloo_sockets.connections = once\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    outcome = make_agents(orders={"faults": [KILL_RANK_3]}, script=script).run()
    assert (tmp_path / "refused").exists()
    assert_recovered(outcome, undisturbed(), {3})
    text = outcome.text()
    assert "rank 0 cannot be connected: this is the first try; all others go on" in text, text
    assert "@job.resilient" not in text and "restart" not in text.replace("restarts", ""), text
