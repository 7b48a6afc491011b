"""A second `init_process_group`, in a process of its own: names of torch are replaced for its whole life."""

from __future__ import annotations

import subprocess
import sys

from tests.support.job import ROOT

SCRIPT = """
from torch.distributed import init_process_group, destroy_process_group  # imported before
import torch.distributed as dist
import swift_agent as swift

job = swift.init("gloo")
group = dist.group.WORLD
init_process_group("gloo")
dist.init_process_group(backend="gloo", init_method="env://", world_size=1, rank=0)
dist.init_process_group()
assert dist.group.WORLD is group
for wrong in ({"backend": "nccl"}, {"world_size": 2}, {"rank": 1, "backend": "gloo"}):
    try:
        dist.init_process_group(**wrong)
    except swift.UsageError as error:
        print(error)
    else:
        raise AssertionError(wrong)
destroy_process_group()
assert not dist.is_initialized()
"""


def test_it_does_nothing_unless_it_asks_for_another_group() -> None:
    path = ":".join(str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store"))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3 and all(line.startswith("init_process_group() after swift_agent.init(): ") for line in lines)
    assert "asks for the backend nccl, and the group has cpu:gloo, cuda:gloo" in lines[0]
    assert "world_size=2, and this is 1" in lines[1] and "rank=1, and this is 0" in lines[2]
