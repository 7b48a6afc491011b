"""Training scripts of many shapes, each with one or two workers killed at an exact place.

Every test asserts that its faults fired, that only the lost ranks have a second process, and that each rank ends with
the state that it has after a run without failure, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import ROOT, Agents, Outcome

pytestmark = pytest.mark.timeout(200)  # most tests run a job twice

SCRIPT = ROOT / "tests" / "support" / "varied_train.py"


OWN_VALUES = """
import sys
import torch
import swift_agent as swift

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * min(1.0, self.calls / 8)

class Trainer:
    def __init__(self, job):
        self.job, self.net, self.num_steps, self.loss = job, Net(), 0, None
        self.model = torch.nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        job.track(model=self.model, optimizer=self.optimizer)
        self.step = job.iteration(self.train)

    def train(self, number):
        self.optimizer.zero_grad()
        self.loss = self.model(torch.full((2, 4), float(number))).mean()
        self.loss.backward()
        self.optimizer.step()
        if sys.argv[1] == "counts":
            self.num_steps += 1

trainer = Trainer(swift.init())
for number in trainer.job.iterations(6):
    trainer.step(number)
"""


@pytest.fixture
def run_form(make_agents: Callable[..., Agents]) -> Callable[..., Outcome]:
    def run(directory: Path, faults: list[dict[str, Any]], **orders: Any) -> Outcome:
        directory.mkdir(exist_ok=True)
        orders["faults"] = [{"scope": "worker", **fault} for fault in faults]
        agents = make_agents(directory, orders=orders, script=SCRIPT)
        for node in ("a", "b"):
            agents.start(node)
        return agents.wait(90)

    return run


@pytest.fixture(scope="module")
def known() -> dict[str, dict[int, str]]:
    return {}


@pytest.fixture
def check(
    run_form: Callable[..., Outcome], known: dict[str, dict[int, str]], tmp_path: Path
) -> Callable[..., Outcome]:
    """Run a form without and with *faults* and compare; each form runs once without."""

    def compare(form: str, *faults: dict[str, Any], **orders: Any) -> Outcome:
        plain = {key: value for key, value in orders.items() if key != "hold"}
        key = repr((form, sorted(plain.items())))
        if key not in known:
            undisturbed = run_form(tmp_path / "undisturbed", [], form=form, **plain)
            assert set(undisturbed.exit_codes.values()) == {0}, undisturbed.text()
            known[key] = {rank: result["hash"] for rank, result in undisturbed.results.items()}
        outcome = run_form(tmp_path / "disturbed", list(faults), form=form, **orders)
        text = outcome.text()
        assert outcome.fired == set(range(len(faults))), f"faults that fired: {outcome.fired}\n{text}"
        assert set(outcome.exit_codes.values()) == {0}, text
        again = {rank for rank, pids in outcome.pids.items() if len(pids) > 1}
        assert again == {fault["rank"] for fault in faults}, f"ranks with a second process: {again}\n{text}"
        hashes = {rank: result["hash"] for rank, result in outcome.results.items()}
        assert len(hashes) == 4 and hashes == known[key], text
        return outcome

    return compare


def kill(rank: int, at: str, iteration: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "at": at, "iteration": iteration, **more}


CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "two replica sets of a device mesh": ("mesh", [kill(1, "forward", 4), kill(2, "forward", 8)], {}),
    "scaler, clipping, scheduler outside": ("scaler", [kill(1, "backward", 4), kill(0, "before_step", 8)], {}),
    "scaler, cut after the step": ("scaler", [kill(1, "after_step", 5), kill(2, "after_metric", 6)], {"metric": True}),
    "loader processes": ("loader_workers", [kill(1, "loaded", 2), kill(0, "backward", 6)], {}),
    "loader processes that stay": ("loader_workers", [kill(2, "loaded", 6)], {"persistent": True}),
    "shuffled by each rank": ("shuffled", [kill(1, "data", 2), kill(0, "forward", 7)], {}),
    "frozen from an epoch on": ("frozen_later", [kill(1, "backward", 9), kill(0, "before_step", 10)], {}),
    "job.run": ("run_form", [kill(0, "backward", 3), kill(3, "before_step", 9)], {}),
    "plain range, generators of the user": ("plain_range", [kill(1, "backward", 5), kill(2, "evaluate", 8)], {}),
    "between two steps": ("adversaries", [kill(1, "between_steps", 0), kill(0, "between_steps", 6)], {}),
    "evaluation among the batches": ("evaluation_inside", [kill(1, "evaluate", 4), kill(0, "backward", 9)], {}),
    "end of an evaluation among the batches": ("evaluation_inside", [kill(2, "evaluated", 6)], {}),
    "barriers between iterations": ("barrier", [kill(1, "barrier", 2), kill(0, "barrier", 6)], {}),
    "barrier after a section": ("barrier", [kill(2, "at epoch", 4), kill(3, "backward", 9)], {}),
    "first of two iterations with a batch": ("two_per_batch", [kill(2, "backward", 8)], {}),
    "numbered loop, then batches": ("loops_in_turn", [kill(1, "backward", 2), kill(0, "backward", 9)], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_form(case: str, check: Callable[..., Outcome]) -> None:
    form, faults, orders = CASES[case]
    check(form, *faults, **orders)


def losses(outcome: Outcome, rank: int) -> dict[int, float]:
    lines = (outcome.directory / f"losses.{rank}").read_text().splitlines()
    return {int(line.split()[0]): float(line.split()[1]) for line in lines}


@pytest.mark.parametrize("source_lost", [False, True], ids=["source stays", "source lost"])
def test_survivor_ahead(source_lost: bool, check: Callable[..., Outcome]) -> None:
    """Rank 3 dies when rank 0 has made the update and ranks 1 and 2, held back, have not: they skip the iteration.

    Then rank 0 dies before it has handed its state on: ranks 1 and 2 have to make the skipped update after all.
    """
    faults = [kill(3, "before_step", 4)]
    if source_lost:
        faults.append({"rank": 0, "at": "transfer", "after": 0})
    hold = {"iteration": 4, "ahead": 0, "behind": [1, 2], "victim": 3}
    outcome = check("ahead", *faults, hold=hold)
    text = outcome.text()
    assert "ranks [1, 2] take over the state of iteration 5 from ranks [0]" in text, text
    if source_lost:
        assert "get the state of iteration 4" in text, text
    for rank in (1, 2):
        # The script saw every iteration, the skipped one with a result of its own.
        assert sorted(losses(outcome, rank)) == list(range(12))


def test_collective_outside_an_iteration(run_form: Callable[..., Outcome], tmp_path: Path) -> None:
    """Nothing can be repeated in place: all workers are started again, one line says why, and the job ends well. That
    it would be so is said the first time."""
    outcome = run_form(tmp_path / "job", [kill(1, "barrier", 2)], form="reduced_outside")
    text = outcome.text()
    told = [line for line in text.splitlines() if "is outside of iterations and sections" in line]
    line = next(n for n, code in enumerate(SCRIPT.read_text().splitlines(), 1) if code.endswith("# outside"))
    assert all(f"all_reduce (reduced_outside, varied_train.py:{line})" in one for one in told), text
    assert len(told) == 2, text  # once in each run of the script
    output = next(one for one in outcome.output.values() if told[0] in one)
    assert output.index(told[0]) < output.index("generation 2"), text
    assert outcome.fired == {0} and set(outcome.exit_codes.values()) == {0}, text
    # Rank 1 may have been replaced once before it is clear that all have to begin again.
    assert all(len(pids) == 2 for rank, pids in outcome.pids.items() if rank != 1), f"{outcome.pids}\n{text}"
    assert len({result["hash"] for result in outcome.results.values()}) == 1 and len(outcome.results) == 4
    assert {result["iterations"] for result in outcome.results.values()} == {4}
    why = [line for line in text.splitlines() if "outside an iteration was cut" in line and "@job.resilient" in line]
    assert why, text


@pytest.mark.parametrize("what", ["counts", "plain"])
def test_values_that_nobody_restores_are_told_once(
    what: str, make_agents: Callable[..., Agents], tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_VALUES)
    agents = make_agents(num_nodes=1, script=script, script_args=(what,))
    agents.start("a")
    outcome = agents.wait()
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    (line,) = (line for line in outcome.text().splitlines() if "in a replacement that starts over" in line)
    names = {"counts": "Net.calls, self.num_steps", "plain": "Net.calls"}[what]
    assert f"] rank 0: train() changes {names}: in a replacement" in line, line
