"""What a loop's body carries on, by its source; and what comes from the job, or is made in each turn."""

from __future__ import annotations

import textwrap

import pytest

from swift_agent.worker.job.loop_body import LoopBody

HEAD = """
def main():
    n, alpha, mean = 0, 0.0, 1.0
    for epoch in job.epochs(3):
"""


def body_of(text: str) -> LoopBody:
    """Of a loop in an epoch, which calls `train`."""
    source = HEAD + textwrap.indent(textwrap.dedent(text).strip(), " " * 8) + "\n"
    return LoopBody(source, next(n for n, line in enumerate(source.splitlines(), start=1) if "train(" in line))


CARRIED = [
    "for x in job.batches(loader):\n    n += 1\n    train(x, n)",
    "for x in job.batches(loader):\n    train(x, n)\n    n = n + 1",
    "for n, x in enumerate(job.batches(loader)):\n    train(x, n)",
    "for n, (x, y) in enumerate(tqdm(job.batches(loader))):\n    train(x, n, y)",
    "for n, x in tqdm(enumerate(job.batches(loader))):\n    train(x, n)",
    "for x, n in zip(job.batches(loader), itertools.count()):\n    train(x, n)",
    "for i, x in enumerate(job.batches(loader)):\n    p = i + epoch * 8\n    n = f(p)\n    train(x, n)",
    "for x in job.batches(loader):\n    mean = train(x, mean)",
    "total = 0\nfor x in job.batches(loader):\n    total += train(x, 2 * total)",
    "for x in job.batches(loader):\n    losses.append(train(x, n))\n    n += 1",
    "for x in job.batches(loader):\n    if x is not None:\n        n += 1\n    train(x, alpha=n)",
]
OF_THE_JOB = [
    "for number in job.iterations(9):\n    train(x, number / 9)",
    "for x in job.batches(loader):\n    alpha = f(job.iteration_number)\n    train(x, alpha)",
    "for i, x in enumerate(job.batches(loader), start=job.position.batch):\n    train(x, i)",
    "for i, x in enumerate(job.batches(loader), job.position.batch):\n    train(x, i + epoch)",
    "for x in job.batches(loader):\n    total = 0\n    for one in x:\n        total += one\n    train(x, total)",
    "for x in job.batches(loader):\n    x = x.to(device)\n    train(x, epoch)\n    n += 1",
    "for x in job.batches(loader):\n    loss = train(x, 1.0)\n    loss = loss.item()\n    n += loss",
    "for x in job.batches(loader):\n    with timer:\n        n = job.iteration_number\n        n += 1\n    train(x, n)",
    "for x in job.batches(loader):\n    train(*things(x, n))\n    n += 1",
]


@pytest.mark.parametrize("text", CARRIED)
def test_what_starts_over_in_a_replacement(text: str) -> None:
    assert body_of(text).given("train", 1, "alpha"), text


@pytest.mark.parametrize("text", OF_THE_JOB)
def test_what_the_job_says_or_each_turn_makes(text: str) -> None:
    assert not body_of(text).given("train", 1, "alpha"), text


SOURCE = """
step = 0


class Trainer:
    def log(self):
        global step
        step += 1
        self.calls += 1
        state["n"] = state["n"] + 1

    def run(self):
        for x in job.batches(loader):
            self.train(x)
            self.log()
            self.number = job.iteration_number
            state["epoch"] = 3


def other():
    own = 0
    own += 1
"""


def test_variables_attributes_and_keys() -> None:
    body = LoopBody(SOURCE, 14)
    assert body.advances("step") and body.advances("self.calls") and body.advances("state['n']")
    for name in ("own", "self.number", "state['epoch']", "x", "Linear hook", "state[0]"):
        assert not body.advances(name), name


def test_a_loop_of_a_module() -> None:
    body = LoopBody("n = 0\nfor x in job.batches(loader):\n    n += 1\n    train(n)\nk = 0\nk += 1\n", 4)
    assert body.given("train", 0, "number") and not body.given("train", 1, "number")
    assert body.carried == {"n"}
