"""A worker stops itself at the moment that was ordered: in which call of a model's modules that is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Each micro-batch leaves a word before its forward, after it, and after its backward.
SCRIPT = """
import sys, torch
from torch import nn
from swift_agent.worker.injection import Injection

model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
injection = Injection(sys.argv[1], "0", [model], [torch.optim.SGD(model.parameters(), lr=0.1)])
injection.begins(4)
for number in (1, 2, 3):
    print("begun", number, flush=True)
    loss = model(torch.ones(1, 2)).sum()
    print("forward", number, flush=True)
    loss.backward()
    print("backward", number, flush=True)
"""


@pytest.mark.parametrize(
    ("phase", "part", "micro_batch", "last"),
    [
        ("forward", 1.0, 1, "begun 1"), ("forward", 0.5, 3, "begun 3"), ("backward", 0.0, 1, "forward 1"),
        ("backward", 1.0, 2, "forward 2"), ("backward", 0.5, 3, "forward 3"), ("begin", 0.0, 1, ""),
    ],
)  # fmt: skip
def test_it_stops_in_that_micro_batch(
    phase: str, part: float, micro_batch: int, last: str, tmp_path: Path
) -> None:
    order = {"id": "a1", "iteration": 4, "phase": phase, "part": part, "micro_batch": micro_batch}
    (tmp_path / "inject-0").write_text(json.dumps(order))
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            _, status = os.waitpid(worker.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
            assert (tmp_path / "injected-0").read_text() == "a1 here"
        finally:
            worker.kill()
        assert worker.stdout is not None
        assert worker.stdout.read().splitlines()[-1:] == ([last] if last else [])
