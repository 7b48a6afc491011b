"""The demo as a user runs it, and its end by Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("sklearn", reason="the demo trains on scikit-learn's digits")

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"


def start(directory: Path, *args: str) -> subprocess.Popen[str]:
    roots = [str(ROOT / room) for room in ("", "rendezvous", "recovery", "logging_store")]
    # A directory of its own for temporary files shows what is left of them.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "TMPDIR": str(directory)}
    return subprocess.Popen([sys.executable, str(DEMO), *args], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)


def left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """Sockets have short names; pytest's directories do not."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="demo-") as name:
        yield Path(name)


@pytest.mark.timeout(180)
def test_demo_shows_a_recovery_and_equal_results(short_tmp_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    with start(short_tmp_path, "--epochs", "8", "--html", str(page)) as demo:
        output, _ = demo.communicate(timeout=170)
    assert demo.returncode == 0, output
    story = r"== (node-.) \(agent and ranks \[2, 3\]\) was killed .* in the middle of iteration (\d+)"
    killed = re.search(story, output)
    assert killed, output
    assert int(killed[2]) > 0
    replaced = re.search(r"ok +(node-.) took slot 1", output)
    assert replaced and replaced[1] != killed[1]
    assert "ok  the survivors kept their processes" in output
    for phase in ("detect", "agree", "plan", "start", "regroup", "transfer", "verify", "iteration", "in all"):
        assert re.search(rf"│ {phase} +│ +\d+ │", output), f"no time for {phase!r}:\n{output}"
    accuracies = re.search(r"test accuracy: ([\d.]+)% with a node lost, ([\d.]+)% undisturbed", output)
    assert accuracies and accuracies[1] == accuracies[2] and float(accuracies[1]) > 90
    assert "ok  the final weights are identical bit for bit" in output
    assert "NOT TRUE" not in output
    shown = page.read_text()
    assert page.as_uri() in output and f"node {killed[1]} lost" in shown and "class=\"speed\"" in shown
    assert left_in(short_tmp_path) == []


@pytest.mark.timeout(90)
def test_interrupt_ends_the_demo_without_leftovers(short_tmp_path: Path) -> None:
    with start(short_tmp_path) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "epoch 2/" in line:  # all workers train
                break
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert left_in(short_tmp_path) == []  # processes are looked for by the fixture of all tests


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_under_test", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_demo_notices_one_different_bit(tmp_path: Path) -> None:
    demo = load_demo()
    weights = {"weight": torch.ones(3), "count": torch.tensor(4)}
    torch.save(weights, tmp_path / "one.pt")
    torch.save({name: value.clone() for name, value in weights.items()}, tmp_path / "same.pt")
    weights["weight"].view(torch.int32)[1] ^= 1
    torch.save(weights, tmp_path / "other.pt")
    assert demo.compare(tmp_path / "one.pt", tmp_path / "same.pt")
    assert not demo.compare(tmp_path / "one.pt", tmp_path / "other.pt")
    with pytest.raises(demo.Failed):
        demo.check("the weights are equal", demo.compare(tmp_path / "one.pt", tmp_path / "other.pt"))
