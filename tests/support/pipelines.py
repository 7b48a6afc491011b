"""Pipelines of `pipeline_train.py`: undisturbed runs, what must be equal to them, and random kills."""

from __future__ import annotations

import itertools
import random
import re
import time
from pathlib import Path
from typing import Any

import psutil

from swift_agent.wire.injected import Fault, Phase
from tests.support.agent_forks import ForkServer
from tests.support.injected import killed, node_killed
from tests.support.job import ROOT, Agents, Outcome

SCRIPT = ROOT / "tests" / "support" / "pipeline_train.py"
ITERATIONS = 12
# Of `swiftctl inject`; the others the script strikes at itself.
INJECTED: dict[str, tuple[Phase, int]] = {
    "forward": ("forward", 3), "backward": ("backward", 3), "agreed": ("step", 1), "after_step": ("after-step", 1),
}  # fmt: skip


def at(place: str, iteration: int, rank: int, scope: str = "worker") -> dict[str, Any] | Fault:
    """A fault at a place of `fault_train`, in the third micro-batch of what has several."""
    if place not in INJECTED:
        return {"at": place, "iteration": iteration, "rank": rank, "scope": scope}
    phase, micro_batch = INJECTED[place]
    return (node_killed if scope == "node" else killed)(rank, iteration, phase, micro_batch=micro_batch)


class References:
    """Runs without failures, each made once, below *directory*."""

    def __init__(self, directory: Path, etcd: str, forks: ForkServer) -> None:
        self._directory, self._etcd, self._forks = directory, etcd, forks
        self._known: dict[tuple[str, ...], Outcome] = {}
        self._numbers = itertools.count()  # a run that has failed does not stand in the way of the next one

    def __call__(self, schedule: str, num_nodes: int = 4, **orders: object) -> Outcome:
        key = (schedule, *(f"{name}={value}" for name, value in sorted(orders.items())))
        key += (f"{num_nodes} nodes",) * (num_nodes != 4)
        if key not in self._known:
            number = next(self._numbers)
            directory = self._directory / f"{number}"
            directory.mkdir()
            agents = Agents(
                directory, self._etcd, num_nodes=num_nodes, num_workers=1,
                job_id="-".join((self._directory.name, f"{number}", *key)).replace(" ", "-"), script=SCRIPT,
                orders={"schedule": schedule, **orders}, forks=self._forks,
                start_method="spawn" if key == ("Schedule1F1B",) else "forkserver",
            )  # fmt: skip
            self._known[key] = agents.run("abcdef"[:num_nodes])
            assert len(self._known[key].results) == num_nodes, self._known[key].text()
        return self._known[key]


def losses(directory: Path, iterations: int = ITERATIONS) -> list[str]:
    """By iteration, those of the last stage; one that was repeated gave the same again."""
    found: dict[int, str] = {}
    for path in directory.glob("losses.*"):
        for line in path.read_text().splitlines():
            number, *values = line.split()
            if values:
                assert found.setdefault(int(number), line) == line
    return [found[number] for number in range(iterations)]


def repeated(directory: Path) -> dict[int, list[int]]:
    """By rank, iterations that a process has begun more than once, or after later ones."""
    found: dict[int, list[int]] = {}
    for path in directory.glob("calls.*"):
        last: dict[str, int] = {}
        for line in path.read_text().splitlines():
            number, pid = line.split()
            if int(number) <= last.get(pid, -1):
                found.setdefault(int(path.suffix[1:]), []).append(int(number))
            last[pid] = int(number)
    return found


def assert_same(outcome: Outcome, expected: Outcome, lost: set[int], again: bool = False) -> None:
    """*again*: survivors have begun an iteration again; else they stayed in it."""
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, text
    assert_equal(outcome, expected)
    assert "all workers restart" not in text
    assert bool(repeated(outcome.directory)) == again, f"{repeated(outcome.directory)}\n{text}"


def assert_equal(outcome: Outcome, expected: Outcome, iterations: int = ITERATIONS) -> None:
    text = outcome.text()
    assert outcome.results.keys() == expected.results.keys(), text
    for rank, result in outcome.results.items():
        assert result["hash"] == expected.results[rank]["hash"], f"rank {rank}\n{text}"
    assert losses(outcome.directory, iterations) == losses(expected.directory, iterations), text


def kill_at_random(
    agents: Agents, num_kills: int, choose: random.Random, *, nodes: bool = False, begin: int = 0
) -> list[int]:
    """Workers, or their *nodes*, in whose place others come, of a job that is paced: at any time from iteration *begin*
    on, the second one in the recovery from the first, but never the last one that has its state; then let it go on
    freely. How many by rank."""
    deadline_s = time.monotonic() + 60.0
    num_in_recoveries = 0
    # A loss while all of them set up restarts all, and costs nothing.
    while min(begun(agents.directory)) < begin:
        assert time.monotonic() < deadline_s, agents.outcome(0).text()
        time.sleep(0.01)
    killed, lost, cut_at = [0] * 4, set[int](), 0  # lost since all were last live together, before that iteration
    while sum(killed) < num_kills:
        if sum(killed) != 1:
            time.sleep(choose.choice([choose.uniform(0.0, 0.4), choose.uniform(0.4, 1.0)]))
        assert time.monotonic() < deadline_s and not list(agents.directory.glob("result.*")), agents.outcome(0).text()
        rank = choose.randrange(4)
        if min(begun(agents.directory)) > cut_at:
            lost.clear()
        process = started(agents.directory, rank)
        if process is not None and len(lost | {rank}) < 4:
            if nodes:
                agents.kill_node(node_of(agents, process))
                agents.start(f"{num_kills - sum(killed)}")
            else:
                process.kill()
            psutil.wait_procs([process], timeout=10.0)
            num_in_recoveries += bool(lost)
            killed[rank] += 1
            lost.add(rank)
            cut_at = max(begun(agents.directory))
    (agents.directory / "free").touch()
    assert num_in_recoveries
    print(f"killed by rank: {killed}, {num_in_recoveries} of them while another was being recovered")
    return killed


def node_of(agents: Agents, worker: psutil.Process) -> str:
    above = {process.pid for process in worker.parents()}
    (node,) = (node for node, agent in agents.running.items() if agent.pid in above)
    return node


def assert_only_the_killed_ended(outcome: Outcome, killed: list[int]) -> None:
    """*killed*: how many by rank. No process ended that was not killed, unless it had itself replaced (who is about to
    may be killed in that moment), and none began an iteration twice."""
    text = outcome.text()
    for rank, num_kills in enumerate(killed):
        num_ended = len(outcome.pids[rank]) - 1
        num_replaced = len(re.findall(rf"\] rank {rank}: .*itself replaced", text))
        assert num_kills <= num_ended <= num_kills + num_replaced, f"rank {rank}: {num_ended} of {killed}\n{text}"
    assert "all workers restart" not in text
    assert not repeated(outcome.directory) and "again:" not in text, text


def begun(directory: Path, num_ranks: int = 4) -> list[int]:
    """By rank, the newest iteration that its newest process with one has begun; -1: none has."""
    paths = [directory / f"calls.{rank}" for rank in range(num_ranks)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
    return [int(of_rank[-1].split()[0]) if of_rank else -1 for of_rank in lines]


def started(directory: Path, rank: int) -> psutil.Process | None:
    """The living process of that rank whose script has begun."""
    path = directory / f"pids.{rank}"
    pids = path.read_text().split() if path.exists() else []
    try:
        process = psutil.Process(int(pids[-1])) if pids else None
        return None if process is None or process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None
