"""Collectives outside of iterations and sections, in a process of its own: methods of torch's groups are replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from swift_agent.worker.loop.outside import told
from tests.support.job import ROOT

SCRIPT = """
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.algorithms import join

import swift_agent
from swift_agent.worker.checks import meetings
from swift_agent.worker.loop.outside import Outside

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.ProcessGroup.size = lambda group: 2

class NotArrived(Exception):
    pass

def unfit(why):
    raise NotArrived(why)

place = SimpleNamespace(inside="", has_points=True, target=object(), rank=0, is_behind=True, is_past_section=False,
                        local_result="", begun_by_others=("iteration", 1, 0), has_recovered=False, replays=False)
notes = []
class Calls:
    compares = True

    def before(self, ranks, what, where):
        print("said", ranks, what, where)

# Asked from a file of ours, as the real ones do.
lines = "def meet(self, what, where, *, waits): print('met', what(), where(), waits)"
ours = {}
exec(compile(lines, meetings.__file__, "exec"), ours)
Meetings = type("Meetings", (), {"meet": ours["meet"]})

class Running:
    checks = SimpleNamespace(sections=Calls(), meetings=Meetings(), look_in_section=lambda: None)

Outside(place, Running(), notes.append, "the newest checkpoint", unfit).watch()

def sum_up():
    dist.all_reduce(torch.ones(1))

for where in ("", "iteration"):
    place.inside = where
    try:
        sum_up()
    except NotArrived as error:
        print(error)
place.inside, place.target = "", None
for _ in range(3):
    try:
        sum_up()
    except NotArrived as error:
        print(error)
    if place.begun_by_others[0] != "iteration":
        place.is_behind = False
    place.begun_by_others = ("barrier main:3", 1, 0)
print(*notes)
place.has_recovered, dist.get_world_size = True, lambda group=None: 2
sum_up()
dist.broadcast(torch.ones(3), 0)
dist.all_reduce(torch.ones(2), async_op=True).wait()
of_join = {}
exec(compile("def run(call): call()", join.__file__, "exec"), of_join)
of_join["run"](sum_up)  # not said
place.replays = True
try:
    sum_up()
except NotArrived as error:
    print(error)
place.replays = place.has_recovered = False
place.has_points, place.is_past_section = False, True  # as in a section that the others have finished
dist.barrier()
assert not place.local_result
sum_up()
print(place.local_result)
place.inside, place.is_past_section = "section", False
sum_up()
dist.barrier()
dist.destroy_process_group()  # else a thread of gloo may still hold a tensor when the interpreter ends: SIGABRT
"""


def test_what_is_cut_over_nccl_is_not_said_to_be_found_out() -> None:
    assert "all workers start again, with the checkpoint." in told("x", "y", "the checkpoint", is_nccl=False)
    text = told("x", "y", "the checkpoint", is_nccl=True)
    assert "may be wrong without an error" in text and "start again" not in text and "@job.resilient" in text


def test_a_replacement_makes_none_that_the_others_have_behind_them(tmp_path: Path) -> None:
    """Its groups are connected to theirs when the loop begins, and it comes to where they are with its first batch: in
    between, a collective of the script would meet another one of theirs, which aborts the process in gloo."""
    script = tmp_path / "outside_train.py"
    script.write_text(SCRIPT)
    path = ":".join(str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store"))
    run = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    said = lines[-2:]
    del lines[-2:]
    met = [line for line in lines if line.startswith("met ")]
    assert [re.sub(r":\d+", "", line) for line in met] == [
        "met all_reduce of 1 float32 sum_up, outside_train.py True",
        "met broadcast of 3 float32 <module>, outside_train.py False",
        "met all_reduce of 2 float32 <module>, outside_train.py False",
    ]
    lines = [line for line in lines if line not in met]
    assert "comes between iterations that a replacement repeats from logs" in lines.pop(-2)
    assert len(lines) == 5, lines
    assert said[0].startswith("said (0,) allreduce of 1 float32 sum_up, outside_train.py:")
    assert said[1].startswith("said (0,) barrier ")
    assert "comes between a batch and its iteration in a replacement" in lines.pop(1)
    line = lines.pop(1)  # the others wait in a validation: no iteration could make it
    assert "comes before a barrier in a replacement" in line and line.endswith("with @job.resilient")
    assert lines[0].startswith("all_reduce (sum_up, outside_train.py:") and "comes before the first batch" in lines[0]
    assert "is outside of iterations and sections" in lines[1]
    assert lines[2].startswith("all_reduce (sum_up, outside_train.py:")
