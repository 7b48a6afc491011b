"""A real job measures its disk and its checkpoints, and says of neither any more that it was assumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift_recovery.strategy.measured import ASSUMED
from swift_recovery.strategy.profile import ProfileError, parse
from tests.support.job import ROOT, SOURCE_ROOTS

SCRIPT = ROOT / "benchmarks" / "train_pipeline.py"


@pytest.fixture
def environment(etcd: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "SWIFT_ETCD_ENDPOINTS": etcd}  # fmt: skip


def swift_run(*args: str) -> list[str]:
    return [sys.executable, "-m", "swift_agent.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "profiled",
            *args]  # fmt: skip


@pytest.mark.timeout(180)
def test_log_and_checkpoint_are_measured(tmp_path: Path, environment: dict[str, str]) -> None:
    file, store, output = tmp_path / "profile.json", tmp_path / "store", tmp_path / "output"
    store.mkdir()
    script = [str(SCRIPT), "--layers", "1", "--width", "128", "--length", "64", "--iterations", "1000000",
              "--checkpoint-every", "20", "--log-to", str(tmp_path), "--out", str(tmp_path / "weights.pt")]  # fmt: skip
    options = ["--profile", str(file), "--log-store", str(store)]
    with open(output, "wb") as stream:
        agents = [
            subprocess.Popen(swift_run(*options, "--node-id", f"node{number}", *script), env=environment,
                             stdout=stream, stderr=subprocess.STDOUT)
            for number in range(2)
        ]  # fmt: skip
    try:
        deadline_s = time.monotonic() + 100
        while not file.exists() or not is_final(file.read_text()):
            assert time.monotonic() < deadline_s and not any(agent.poll() for agent in agents), output.read_text()
            time.sleep(0.1)
        explained = subprocess.run(
            [sys.executable, "-m", "swift_agent.ctl", "explain", "profiled", "--strategy"], env=environment,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(60)
    text = output.read_text()
    profile = parse(file.read_text())
    state_bytes = max(machine.state_bytes for machine in profile.machines)
    assert profile.log_bytes_per_s not in (0, ASSUMED["log_bytes_per_s"]), text
    assert 0 < profile.checkpoint_s < 5 and profile.load_s != state_bytes / ASSUMED["state_bytes_per_s"], text
    first, second = dict.fromkeys(re.findall(r"measured: .*", text))
    assert "of standing still for one" not in first and "of standing still for one, copies of logs of" in second
    assert re.search(r", logs of \S+ \S+/s, checkpoints of \S+ \S+/s", second) and ", logs of" in first, text
    assert second.endswith("; assumed: a network of 1.16 GiB/s") and explained.stdout.startswith(second), explained


@pytest.mark.timeout(120)
def test_a_pipeline_on_one_node_is_said_to_take_its_logs(tmp_path: Path, environment: dict[str, str]) -> None:
    output = tmp_path / "output"
    script = [str(SCRIPT), "--layers", "1", "--width", "128", "--length", "64", "--iterations", "1000000",
              "--checkpoint-every", "20", "--micro-batches", "4", "--log-to", str(tmp_path), "--out",
              str(tmp_path / "weights.pt")]  # fmt: skip
    command = [sys.executable, "-m", "swift_agent.run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-id", "one",
               "--node-id", "node0", *script]  # fmt: skip
    with open(output, "wb") as stream:
        agent = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 60
        while "measured:" not in output.read_text():
            assert time.monotonic() < deadline_s and agent.poll() is None, output.read_text()
            time.sleep(0.1)
        explained = subprocess.run(
            [sys.executable, "-m", "swift_agent.ctl", "explain", "one", "--strategy", "--json"], env=environment,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        agent.terminate()
        agent.wait(60)
    found = json.loads(explained.stdout)
    (line,) = (line for line in found["lines"] if line.startswith("  log:"))
    assert found["way"] == "log" and "taken; not possible for a node" in line, explained
    measured = found["profile"]
    assert measured["machines"][0]["stages"] == 2 and measured["machines"][0]["inside_bytes"] > 0
    assert measured["micro_batches"] == 4


def is_final(text: str) -> bool:
    """Copies of logs come last."""
    try:
        return parse(text).store_bytes_per_s > 0
    except ProfileError:  # it is being written
        return False
