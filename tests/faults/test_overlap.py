"""Kills between any two buckets of an update that overlaps the backward (`job.track(overlap_update=True)`).

Where survivors have updated different buckets, or all of them, no update is undone and the weights at the end are bit
for bit those of an undisturbed run of plain DDP. Where all have updated the same ones these are undone: with exact=True
from copies, bit for bit too; else the iteration begins again within the bound of `swift_recovery.undo.undo`.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_forks import ForkServer
from tests.support.job import ROOT, Agents, Outcome
from tests.tiers import in_soak

SCRIPT = ROOT / "tests" / "support" / "overlap_train.py"
OPTIMIZERS = ["sgd", "adam", "adamw", "lamb", "muon"]
ITERATIONS = 10

# All survivors have updated bucket 0; then bucket 0, and two of them bucket 1 as well, with the one that has it
# untouched lost in the recovery.
UNDONE = [
    {"iteration": 3, "victim": 1, "bucket": 1},
    {"iteration": 6, "victim": 3, "bucket": 2, "refused": {"0": [1]}, "then": 0},
]
# One survivor has updated nothing; each lacks another bucket, and together they have all, with the one that gets the
# rest lost when it has it; one lacks the last bucket.
NOT_UNDONE = [
    {"iteration": 3, "victim": 1, "bucket": 2, "refused": {"0": [0, 1]}},
    {"iteration": 5, "victim": 0, "bucket": 3, "refused": {"1": [0], "2": [1], "3": [2]}, "then": 2},
    {"iteration": 7, "victim": 3, "bucket": 3, "refused": {"0": [2]}},
]

Run = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Run:
    def train(directory: Path | None = None, **orders: Any) -> Outcome:
        options = ("--recovery", orders.pop("recovery", "exact"))
        agents = make_agents(
            directory, orders={"iterations": ITERATIONS, **orders}, script=SCRIPT, max_restarts=6, options=options
        )
        outcome = agents.run()
        assert set(outcome.exit_codes.values()) == {0}, outcome.text()
        assert len(outcome.results) == 4 and len(outcome.hashes) == (2 if orders.get("sets") else 1), outcome.results
        return outcome

    return train


@pytest.fixture(scope="session")
def of_plain_ddp(tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer) -> Callable[..., str]:
    """The hash of the state after an undisturbed run without overlap; with *sets* those of all ranks."""

    @functools.cache
    def train(optimizer: str, sets: bool = False) -> str:
        orders = {"iterations": ITERATIONS, "optimizer": optimizer, "overlap": False, "sets": sets}
        agents = Agents(
            tmp_path_factory.mktemp(optimizer), etcd, job_id=f"plain-{optimizer}-{sets}", orders=orders, script=SCRIPT,
            forks=forks,
        )  # fmt: skip
        for node in ("a", "b"):
            agents.start(node)
        outcome = agents.wait()
        assert set(outcome.exit_codes.values()) == {0}, outcome.text()
        return " ".join(outcome.results[rank]["hash"] for rank in range(4)) if sets else outcome.hashes.pop()

    return train


# All survivors have updated bucket 0; then bucket 0, and two of them bucket 1 as well.
INEXACT = [
    {"iteration": 3, "victim": 1, "bucket": 1},
    {"iteration": 6, "victim": 3, "bucket": 2, "refused": {"0": [1]}},
]


def lost(outcome: Outcome) -> set[int]:
    return {rank for rank, pids in outcome.pids.items() if len(pids) > 1}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exact(optimizer: str, run: Run, of_plain_ddp: Callable[[str], str]) -> None:
    outcome = run(optimizer=optimizer, overlap=True, exact=True, faults=UNDONE)
    assert lost(outcome) == {0, 1, 3}, outcome.text()
    assert "put back from copies, bit for bit: model.6.weight" in outcome.text()
    assert outcome.hashes == {of_plain_ddp(optimizer)}, outcome.text()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_undone_within_the_bound(optimizer: str, run: Run) -> None:
    outcome = run(optimizer=optimizer, overlap=True, faults=UNDONE)
    assert lost(outcome) == {0, 1, 3}, outcome.text()
    text = outcome.text()
    assert "undo update 3 of parameters" in text and "undone, within the rounding of a step: model.6.weight" in text
    # Rank 2 has lived through both.
    found = outcome.results[2]["found"]
    assert set(found) == {"3", "6"} and all(values["excess"] <= 0 for values in found.values()), found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_undone_that_a_survivor_has_untouched(
    optimizer: str, run: Run, of_plain_ddp: Callable[[str], str]
) -> None:
    outcome = run(optimizer=optimizer, overlap=True, faults=NOT_UNDONE)
    assert lost(outcome) == {0, 1, 2, 3}, outcome.text()
    text = outcome.text()
    assert "undo update" not in text and "undone" not in text, text
    assert "of iteration 3 from rank 0" in text, "parameters are copied from where they are untouched"
    assert "of iteration 6 from rank" in text, "one survivor gets the rest of the update from the others"
    assert outcome.hashes == {of_plain_ddp(optimizer)}, text


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", [0, *in_soak(*range(1, 10))])
def test_any_subset_of_ranks_has_updated_any_buckets(
    seed: int, optimizer: str, run: Run, of_plain_ddp: Callable[[str], str]
) -> None:
    """Four kills; in `make soak` forty for each optimizer."""
    choose, faults = random.Random(f"{optimizer} {seed}"), []
    for iteration in range(1, ITERATIONS - 1, 2):
        victim, bucket = choose.randrange(4), choose.randrange(4)
        survivors = set(range(4)) - {victim}
        refused = {rank: {b for b in range(bucket) if choose.random() < 0.5} for rank in survivors}
        lists = {str(rank): sorted(buckets) for rank, buckets in refused.items()}
        faults.append({"iteration": iteration, "victim": victim, "bucket": bucket, "refused": lists})
    print(faults)
    outcome = run(optimizer=optimizer, overlap=True, exact=True, faults=faults)
    assert lost(outcome) == {fault["victim"] for fault in faults}, outcome.text()
    assert outcome.hashes == {of_plain_ddp(optimizer)}, outcome.text()


def test_who_received_an_update_passes_it_on_with_what_is_small(run: Run, of_plain_ddp: Callable[[str], str]) -> None:
    """Ranks 0 and 1 get update 4 from rank 2, which is lost before they go on: what they then give to its successor
    has the learning rate of after it, too, which changes there."""
    fault = {"iteration": 4, "victim": 3, "bucket": 3, "refused": {"0": [2], "1": [2]}, "verify": 2}
    outcome = run(optimizer="sgd", overlap=True, faults=[fault])
    text = outcome.text()
    assert lost(outcome) == {2, 3}, text
    assert "ranks [0, 1] take over the state of iteration 5 from ranks [2]" in text
    # Rank 3, too, where rank 2 was lost before that had all of it.
    assert re.search(r"ranks \[2(, 3)?\] are new and get the state of iteration 5 from ranks \[0", text), text
    assert outcome.hashes == {of_plain_ddp("sgd")}, text


# Ranks 0 and 2 have made the whole update 3, and rank 3 a part of it; then 1 and 3 all of update 5, and rank 0 a part,
# with rank 3 lost in the recovery; of update 7 all have all, and so they have when update 8 is agreed on.
OF_TWO_SETS = [
    {"iteration": 3, "victim": 1, "bucket": 1},
    {"iteration": 5, "victim": 2, "bucket": 2, "then": 3},
    {"iteration": 7, "victim": 3, "bucket": 3},
    {"iteration": 8, "victim": 0, "bucket": 4},
]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_of_two_replica_sets_one_is_through(optimizer: str, run: Run, of_plain_ddp: Callable[..., str]) -> None:
    """And goes back with the other, which cannot be; or both go forward."""
    outcome = run(optimizer=optimizer, overlap=True, exact=True, sets=True, faults=OF_TWO_SETS)
    text = outcome.text()
    assert lost(outcome) == {0, 1, 2, 3}, text
    assert "ranks [0, 2] undo update 3 of parameters 0-2, which all have made" in text, text
    assert "ranks [3] undo update 3 of parameters 2, which all have made" in text, text
    assert "undo update 5" in text and "undo update 7" not in text and "undo update 8" not in text, text
    hashes = " ".join(outcome.results[rank]["hash"] for rank in range(4))
    assert hashes == of_plain_ddp(optimizer, sets=True), text


def test_of_two_replica_sets_one_undoes_its_whole_update(run: Run) -> None:
    outcome = run(optimizer="adamw", overlap=True, sets=True, faults=OF_TWO_SETS[:1])
    text = outcome.text()
    assert lost(outcome) == {1}, text
    assert "undone, within the rounding of a step: model.0.layer.weight, model.2.layer.weight, model.4" in text, text
    for rank in (0, 2, 3):
        assert outcome.results[rank]["found"]["3"]["excess"] <= 0, outcome.results


def test_immediate_rollback(run: Run, of_plain_ddp: Callable[[str], str]) -> None:
    """A survivor's half-done update stays as it is, and is made again: parameters of bucket 0 move twice."""
    outcome = run(optimizer="adamw", overlap=True, recovery="immediate-rollback", faults=INEXACT)
    text = outcome.text()
    assert lost(outcome) == {1, 3} and "undo" not in text and "from copies" not in text, text
    assert "ranks [0] keep half of update 3 as it is, and it is made again" in text, text
    for values in outcome.results[2]["found"].values():  # it has lived through both
        assert values["changed"] and values["made"] == list(range(10)), outcome.results
    assert outcome.hashes != {of_plain_ddp("adamw")}


def test_lossy_forward(run: Run, of_plain_ddp: Callable[[str], str], tmp_path: Path) -> None:
    """What anybody has updated stays; the rest is made without the gradients of who was lost, whatever they are."""
    hashes = set()
    for noise in (False, True):
        (directory := tmp_path / str(noise)).mkdir()
        outcome = run(
            directory, optimizer="adamw", overlap=True, recovery="lossy-forward", faults=INEXACT, noise=noise
        )  # fmt: skip
        text = outcome.text()
        assert lost(outcome) == {1, 3} and "undo" not in text and "from copies" not in text, text
        assert "the gradients of ranks [1] do not count in iteration 3" in text, text
        found = outcome.results[2]["found"]
        for values in found.values():
            assert values["changed"] and sorted(values["changed"] + values["made"]) == list(range(10)), found
        assert len(found["6"]["changed"]) > len(found["3"]["changed"])
        hashes |= outcome.hashes
    assert len(hashes) == 1 and hashes != {of_plain_ddp("adamw")}, hashes
