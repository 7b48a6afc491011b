"""The commands that make faults, and what they need; those that can be run here are."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from swift_agent.agent.injection.strikes import CannotStrike, Place, command_of
from swift_agent.wire.injected import Fault

PLACE = Place(10, 2, {2: 12, 3: 13}, (14,), "eth0", {}, "/logs")


def test_the_agent_is_killed_first() -> None:
    assert command_of(Fault("a", "kill-node", 2), PLACE) == "kill -KILL 10 12 13 14"


def test_one_worker() -> None:
    assert command_of(Fault("a", "kill-worker", 3), PLACE) == "kill -KILL 13"
    with pytest.raises(CannotStrike, match="rank 4 has no process"):
        command_of(Fault("a", "kill-worker", 4), PLACE)
    with pytest.raises(CannotStrike, match="rank 3 has no process"):
        command_of(Fault("a", "kill-worker", 3), replace(PLACE, workers={3: 0}))


def test_what_lasts_is_taken_back() -> None:
    frozen = command_of(Fault("a", "freeze", 2, for_s=1.5), PLACE)
    assert frozen == "kill -STOP 10 12 13 14; sleep 1.5; kill -CONT 14 13 12 10"
    cut = command_of(Fault("a", "cut-network", 2, for_s=2), PLACE)
    assert cut == "ip link set dev eth0 down && sleep 2; ip link set dev eth0 up"
    assert command_of(Fault("a", "slow-link", 2), PLACE).endswith("; tc qdisc del dev eth0 root")


@pytest.mark.parametrize("kind", ["cut-network", "slow-link"])
@pytest.mark.parametrize("interface", ["", "lo"])
def test_a_machine_is_not_cut_from_itself(kind: str, interface: str) -> None:
    with pytest.raises(CannotStrike, match="on one machine"):
        command_of(Fault("a", kind, 2), replace(PLACE, interface=interface))  # type: ignore[arg-type]


def test_a_disk_is_filled_for_a_while(tmp_path: Path) -> None:
    command = command_of(
        Fault("a1", "fill-disk", 2, for_s=1.0, num_bytes=1 << 20), replace(PLACE, directory=str(tmp_path))
    )
    process = subprocess.Popen(["sh", "-c", command])
    deadline_s = time.monotonic() + 10
    # It is there before it has its size.
    while [path.stat().st_size for path in tmp_path.iterdir()] != [1 << 20]:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.wait(10)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("byte", [0, 7, 8, 9, 63, 64, 128, 200, 255])
def test_one_byte_of_a_log_is_another(byte: int, tmp_path: Path) -> None:
    segment = tmp_path / "job.rank2.swiftlog $x.seg"
    before = bytes([1, 2, byte, 3, 4])
    segment.write_bytes(before)
    place = replace(PLACE, log={2: (str(segment),)})
    subprocess.run(["sh", "-c", command_of(Fault("a", "corrupt-log", 2), place)], check=True)
    after = segment.read_bytes()
    assert after == bytes([1, 2, (byte + 1) % 256, 3, 4])
    with pytest.raises(CannotStrike, match="has logged no messages"):
        command_of(Fault("a", "corrupt-log", 3), place)
