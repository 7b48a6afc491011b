"""A replacement on a machine that computes otherwise: what nothing else would notice is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.faults.conftest import assert_recovered
from tests.faults.test_drain import wait_until
from tests.support.job import ROOT, Agents, Outcome

PIPELINE = ROOT / "tests" / "support" / "pipeline_train.py"

# Libraries choose kernels by such variables, as by the model of a processor; this one has no part in these models.
HERE, ELSEWHERE = {"DNNL_MAX_CPU_ISA": "AVX2"}, {"DNNL_MAX_CPU_ISA": "SSE41"}
LOST = {"at": "forward", "iteration": 5, "rank": 2, "scope": "node"}


several_kinds = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has one kind of kernels only"
)


def lines(outcome: Outcome) -> list[str]:
    told = ("not all ranks compute", "this machine computes")
    return [line for line in outcome.text().splitlines() if any(words in line for words in told)]


def run(agents: Agents, nodes: str, elsewhere: str, variables: dict[str, str] | None = None) -> Outcome:
    """The first of *nodes* have the first places. *elsewhere*: those that compute otherwise."""
    for node in nodes:
        agents.environment = (variables or ELSEWHERE) if node in elsewhere else HERE
        agents.start(node)
        log, joined = agents.directory / f"agent.{node}.log", f"node {node} joined"
        wait_until(agents, lambda log=log, joined=joined: joined in log.read_text())
    return agents.wait()


def test_a_spare_that_computes_otherwise_says_so_when_it_has_taken_a_place(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    later = {**LOST, "iteration": 8, "scope": "worker", "after": 0}  # of the process that has told
    agents = make_agents(orders={"faults": [LOST, later]}, options=("--spares", "1"))
    outcome = run(agents, "abc", "c")
    (line,) = lines(outcome)
    assert "] rank 2: this machine computes" in line or "] rank 3: this machine computes" in line, "one for the node"
    assert "DNNL_MAX_CPU_ISA=SSE41, that on which this rank began with DNNL_MAX_CPU_ISA=AVX2: the result may" in line
    assert_recovered(outcome, undisturbed(), {2, 3}, num_faults=2)  # nothing has rounded here
    assert sorted(outcome.exit_codes.values()) == [-9, 0, 0], outcome.text()


def test_nothing_is_told_where_all_compute_alike(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    outcome = make_agents(orders={"faults": [LOST]}, options=("--spares", "1")).run("abc")
    assert lines(outcome) == []
    assert_recovered(outcome, undisturbed(), {2, 3}, num_faults=1)


def test_ranks_that_do_not_compute_alike_are_named_at_the_start_by_one(make_agents: Callable[..., Agents]) -> None:
    outcome = run(make_agents(orders={"faults": [{**LOST, "scope": "worker"}]}), "ab", "b")
    (line,) = lines(outcome)
    named = "ranks 0, 1 with DNNL_MAX_CPU_ISA=AVX2; ranks 2, 3 with DNNL_MAX_CPU_ISA=SSE41. A rank that is lost"
    assert f"] rank 0: not all ranks compute alike: {named}" in line
    assert "recovered: " in outcome.text(), "replaced on the same machine: that is not told"
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


def test_who_begins_again_on_another_machine_says_so(make_agents: Callable[..., Agents]) -> None:
    """All workers are started again, as the lost stage cannot be repeated; what was told first counts."""
    agents = make_agents(
        num_nodes=4, num_workers=1, script=PIPELINE, orders={"faults": [LOST], "seedless": True},
        options=("--spares", "1"),
    )  # fmt: skip
    outcome = run(agents, "abcde", "e")
    assert "all workers restart" in outcome.text() and len(outcome.results) == 4, outcome.text()
    (told,) = (line.partition("] ")[2] for line in lines(outcome))
    assert told.startswith("rank 2: this machine computes with DNNL_MAX_CPU_ISA=SSE41, that on which "), told
    assert "gives another state than when the job began" in outcome.text()
    assert ". This machine computes otherwise than that of its predecessor, which may be why; all" in outcome.text()


def test_a_loss_before_all_have_begun_leaves_nothing_untold(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """Nobody knows what the lost ranks computed with: what differs now is told."""
    agents = make_agents(
        orders={"faults": [{"at": "begin", "rank": 2, "scope": "node"}]}, options=("--spares", "1")
    )  # fmt: skip
    outcome = run(agents, "abc", "c")
    (line,) = lines(outcome)
    assert "] rank 0: not all ranks compute alike: ranks 0, 1 with DNNL_MAX_CPU_ISA=AVX2; ranks 2, 3 with " in line
    assert len(outcome.results) == 4 and outcome.hashes == {undisturbed()}, outcome.text()


def test_a_helper_is_compared_with_whom_it_helps(make_agents: Callable[..., Agents]) -> None:
    """Both spares are of the other kind."""
    agents = make_agents(
        num_nodes=4, num_workers=1, script=PIPELINE, orders={"faults": [LOST], "schedule": "Schedule1F1B"},
        options=("--strategy", "log+parallel", "--helpers", "1", "--spares", "2"),
    )  # fmt: skip
    outcome = run(agents, "abcdef", "ef")
    assert "2 processes repeat iterations together" in outcome.text(), outcome.text()
    assert "has done its share" in outcome.text() and "Traceback" not in outcome.text(), outcome.text()
    (line,) = lines(outcome)
    assert "] rank 2: this machine computes with DNNL_MAX_CPU_ISA=SSE41, that on which " in line


@several_kinds
@pytest.mark.parametrize("lost", ["a worker", "nobody"])
def test_replicas_that_round_otherwise_train_on_and_are_told(make_agents: Callable[..., Agents], lost: str) -> None:
    """Torch takes the kernels of a processor without AVX; an update is rounded otherwise with them."""
    faults = [{**LOST, "scope": "worker"}] if lost == "a worker" else []
    outcome = run(make_agents(orders={"faults": faults}), "ab", "b", {"ATEN_CPU_CAPABILITY": "default"})
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert len(outcome.hashes) > 1, "else nothing differs that could be told"
    assert ("recovered: " in outcome.text()) == bool(faults), outcome.text()
    assert "all workers restart" not in outcome.text(), outcome.text()
    (told,) = (line for line in outcome.text().splitlines() if "rounded otherwise: " in line)
    assert "rank 0: replicas do not compute alike, and have rounded otherwise: ranks 0, 1 with " in told, told
    assert "ATEN_CPU_CAPABILITY=default. Training goes on, each rank with its own values; " in told, told
    assert "reached their end; replicas 0-3 have " in outcome.text(), outcome.text()


@several_kinds
def test_drifted_replicas_go_on_when_the_other_kind_has_left(make_agents: Callable[..., Agents]) -> None:
    """Rank 1 gets the values of rank 0, on another kind of machine, which is then lost to a spare of rank 1's kind."""
    faults = [
        {"at": "forward", "iteration": 5, "rank": 1, "scope": "worker"},
        {"at": "forward", "iteration": 8, "rank": 0, "scope": "node"},
    ]
    agents = make_agents(num_nodes=3, num_workers=1, orders={"faults": faults}, options=("--spares", "1"))
    outcome = run(agents, "abcd", "a", {"MKL_CBWR": "COMPATIBLE"})  # the data is the same with it
    assert outcome.text().count("recovered: ") >= 2 and "all workers restart" not in outcome.text(), outcome.text()
    has_drifted = len(outcome.hashes) > 1
    assert sum("rounded otherwise: " in line for line in outcome.text().splitlines()) == has_drifted, outcome.text()
    assert len(outcome.results) == 3 and ("have 2 checksums" in outcome.text()) == has_drifted, outcome.text()
