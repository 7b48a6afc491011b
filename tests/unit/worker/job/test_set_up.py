"""Objects from other ranks in the set-up, in a process of its own: names of torch are replaced for its whole life."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_agent.worker.job import set_up
from tests.support.job import ROOT

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import HashStore, broadcast_object_list  # imported before

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.get_process_group_ranks = lambda group: [0, 1]

import swift_agent
from swift_agent.worker.job.set_up import SetUp

notes, unfit, is_over, later = [], [], [], []
made = SetUp(rank=0, is_replacement="replacement" in sys.argv, is_over=lambda: bool(is_over), note=notes.append,
             unfit=unfit.append, later=lambda name, call, args, named: later.append(name))
for name in ("broadcast_object_list", "scatter_object_list", "all_gather_object"):
    setattr(dist, name, lambda *args, **named: None)
broadcast_object_list = dist.broadcast_object_list
made.watch()

def prepare():
    for _ in range(2):
        broadcast_object_list([None], src=1)

prepare()
dist.broadcast_object_list([1], 0)
dist.broadcast_object_list([1], group_src=0)
dist.scatter_object_list([None], [1, 2], 0)
assert len(notes + unfit) == (2 if unfit else 1), (notes, unfit)
dist.scatter_object_list([None], None, 1)
dist.all_gather_object([None, None], 1)

def _init_optim_state():  # as torch does to load a snapshot
    made._before_step(None, (), {})

def train():
    made._before_step(None, (), {})

_init_optim_state()
train()
is_over.append(True)
dist.broadcast_object_list([None], 1)
dist.all_gather_object([None, None], 1)
assert later == ["broadcast_object_list", "all_gather_object"]
print(*notes, sep="\\n")
print(*unfit, sep="\\n")
dist.destroy_process_group()  # else a thread of gloo may still hold a tensor when the interpreter ends: SIGABRT
"""


TENSORS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, all_reduce  # imported before

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
dist.get_process_group_ranks = lambda group: [0, 1]

import swift_agent
from swift_agent.worker.job.set_up import SetUp

notes, is_over = [], []
originals = dist.all_reduce, dist.broadcast
made = SetUp(rank=0, is_replacement="replacement" in sys.argv, is_over=lambda: bool(is_over), note=notes.append,
             unfit=notes.append, later=None)
made.watch()
from torch.distributed import _functional_collectives

model = nn.Linear(2, 2)

def count_tokens():
    for _ in range(2):
        all_reduce(torch.ones(1))

count_tokens()
dist.barrier()
dist.broadcast(model.weight.data, 0)  # a replica gives it to a replacement
for parameter in model.parameters():
    dist.broadcast(parameter.detach(), src=0)
dist.all_gather([torch.zeros(1)], torch.ones(1))
dist.all_gather_object([None], 1)
is_over.append(True)
made.ends(model.parameters())
dist.all_reduce(torch.ones(1))
assert (dist.all_reduce, dist.broadcast) == originals and all_reduce is originals[0]
assert _functional_collectives.legacy_allreduce is originals[0], "whoever compiles it knows it"
print(*notes, sep="\\n")
dist.destroy_process_group()  # else a thread of gloo may still hold a tensor when the interpreter ends: SIGABRT
"""

GROUPS = """
import torch
import torch.distributed as dist
from torch.distributed import HashStore

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
mine, other = dist.new_group([0]), dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to who is in none
ranks_of = dist.get_process_group_ranks
dist.get_process_group_ranks = lambda group: [0, 1] if group is dist.group.WORLD else ranks_of(group)

import swift_agent
from swift_agent.worker.job.set_up import SetUp

notes = []
made = SetUp(rank=0, is_replacement=False, is_over=lambda: False, note=notes.append, unfit=notes.append, later=None)
made.watch()
one = torch.ones(1)
dist.all_reduce(one, group=other)
dist.all_gather_object([None], 1, other)
dist.all_reduce(one, dist.ReduceOp.SUM, mine)
dist.all_gather([torch.zeros(1)], one, mine)
dist.all_gather_object([None], 1, mine)
made.ends([])
print(*notes, sep="\\n")
dist.destroy_process_group()  # else a thread of gloo may still hold a tensor when the interpreter ends: SIGABRT
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[str]]:
    script = tmp_path / "prepare_train.py"
    path = ":".join(str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store"))

    def start(*args: str, text: str = SCRIPT) -> list[str]:
        script.write_text(text)
        run = subprocess.run(
            [sys.executable, str(script), *args], env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return [line for line in run.stdout.splitlines() if line]

    return start


def test_what_a_replacement_would_lack_is_told_at_the_start(run: Callable[..., list[str]]) -> None:
    lines = run()
    assert len(lines) == 4, lines  # each line of the script once
    steps = lines.pop()
    assert steps.startswith("an optimizer makes a step, and the job's loop has not begun (train, prepare_train.py:")
    assert lines[0].startswith("broadcast_object_list (prepare, prepare_train.py:")
    assert "would lack rank 1's objects" in lines[0]
    assert all(line.endswith("Until then a lost worker restarts all workers.") for line in lines)


def test_a_replacement_that_lacks_it_has_all_workers_start_again(run: Callable[..., list[str]]) -> None:
    lines = run("replacement")
    assert len(lines) == 4, lines
    assert "would lack rank 1's objects. Have each rank work them out by itself" in lines[0]
    assert "would lack the others' objects" in lines[3]


@pytest.mark.parametrize("of_torch", [(1 << 63) + 12345, (1 << 53) + 1])
def test_what_the_script_has_not_seeded_draws_the_same_in_a_replacement(of_torch: int) -> None:
    with torch.random.fork_rng():
        drawn = []
        for run, rank in (("job e7", 1), ("job e7", 1), ("job e7", 0), ("job e8", 1)):
            torch.default_generator.manual_seed(of_torch + len(drawn))  # as torch itself does
            set_up.seed(run, rank)
            drawn.append(torch.rand(1).item())
        assert drawn[0] == drawn[1] and len(set(drawn)) == 3


@pytest.mark.parametrize("given", [0, 42, (1 << 32) - 1, -1, -(1 << 63), 1 << 53, (1 << 60) + 3, (1 << 64) - 1])
def test_what_the_script_has_seeded_stays(given: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(given)
        set_up.seed("job e7", 1)
        assert torch.initial_seed() == given % (1 << 64)


def test_what_torch_has_drawn_for_the_script_does_not() -> None:
    with torch.random.fork_rng():
        seeds = set()
        for _ in range(2):
            while torch.seed() < 1 << 53:
                pass
            set_up.seed("job e7", 1)
            seeds.add(torch.initial_seed())
        assert len(seeds) == 1


def test_tensors_that_a_replacement_has_by_itself_are_told_when_the_loop_begins(run: Callable[..., list[str]]) -> None:
    objects, *lines = run(text=TENSORS)  # what lacks objects is said at once
    assert objects.startswith("all_gather_object (<module>, prepare_train.py:"), objects
    assert len(lines) == 2 and lines[0].startswith("all_reduce (count_tokens, prepare_train.py:"), lines
    assert "has its own values only. If training depends on what it gives" in lines[0]
    assert lines[1].startswith("all_gather (<module>, prepare_train.py:")
    assert not [line for line in run("replacement", text=TENSORS) if line.startswith("all_reduce")]


def test_a_rank_outside_of_a_group_may_call_its_collectives(run: Callable[..., list[str]]) -> None:
    """torch does nothing there, or warns; and in a group of one rank there is nothing to tell."""
    assert run(text=GROUPS) == []
