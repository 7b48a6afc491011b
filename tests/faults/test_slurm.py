"""Jobs on a real Slurm of four nodes, by deploy/slurm/train.sbatch and by `srun swift-run` alone.

What Slurm does in each (a requeue, a warning before the time limit, the end of a job) is done by its own commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd_cluster import etcd_binary
from tests.support.job import ROOT, SCRIPT, SOURCE_ROOTS
from tests.support.pages import calls, command, put_in, words
from tests.support.ports import free_ports
from tests.support.slurm_cluster import SlurmCluster, why_not
from tests.tiers import in_soak

ITERATIONS = 120
PAGE = "docs/slurm.md"
TEMPLATE = ROOT / "deploy" / "slurm" / "train.sbatch"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    directory = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with SlurmCluster(directory, 4) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Job:
    """One job of Slurm, with two workers on each node."""

    def __init__(self, slurm: SlurmCluster, directory: Path, **orders: Any) -> None:
        self.slurm, self.directory = slurm, directory
        self.number = ""
        bins = f"{Path(sys.executable).parent}:{Path(etcd_binary()).parent}"
        self._environment = {
            "PATH": f"{bins}:{slurm.environment['PATH']}", "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS),
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PET_START_METHOD": "forkserver",
            "SWIFT_SLURM_DIR": str(directory), "SWIFT_ETCD_PORT": str(consecutive_ports(6)),
            "SWIFT_SLURM_WATCH_S": "10",
            "FAULT_ORDERS": json.dumps({"dir": str(directory), "iterations": ITERATIONS, "pace_s": 0.4, **orders}),
        }  # fmt: skip

    def submit(self, *command: str, **environment: str) -> Job:
        output = str(self.directory / "out")
        told = self.slurm(
            "sbatch", "--parsable", f"--output={output}", f"--chdir={self.directory}", *command,
            **self._environment, **environment,
        )  # fmt: skip
        self.number = told.strip().partition(";")[0]
        return self

    def train(self, *options: str, nodes: int = 3, spares: int = 1, time: str = "24:00:00") -> Job:
        """By the template, with these options of sbatch, too; until all ranks have trained for a while."""
        line = put_in(command(PAGE, "SPARES=1 sbatch"), {
            "--nodes": str(nodes), "--time": time, "train.sbatch": str(TEMPLATE), "--nproc-per-node": "2",
            "train.py": str(SCRIPT),
        })  # fmt: skip
        self.submit(*options, *next(calls(line, "sbatch")), SPARES=str(spares))
        return self.wait_for_iteration(6)

    def order(self, text: str) -> None:
        """A line of the page, for this job."""
        self.slurm(*words(put_in(text, {"JOB": self.number})))

    def text(self) -> str:
        out = self.directory / "out"
        return out.read_text(errors="replace") if out.exists() else ""

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"timed out: {what}\n{self.text()}"
            time.sleep(0.1)

    def iterations(self, rank: int) -> list[int]:
        path = self.directory / f"calls.{rank}"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_iteration(self, number: int) -> Job:
        self.wait(lambda: all(number in self.iterations(rank) for rank in range(4)), f"iteration {number}")
        return self

    def node_of_slot(self, slot: int) -> str:
        """The node that the agents name as the one that starts these ranks."""
        return re.findall(rf"\[swift-run (n\d) [^]]*\] generation \d+: slot {slot} starts ranks", self.text())[-1]

    def start_at_once(self) -> None:
        """A job that is queued again: Slurm gives it a wait of two minutes."""
        self.wait(lambda: self.slurm.state_of(self.number) == "PENDING", "it is queued again")
        self.order(command(PAGE, "scontrol update jobid"))

    def end(self) -> str:
        """Train on at full speed; the state in which Slurm has the job at its end."""
        (self.directory / "free").touch()
        return self.ended()

    def ended(self) -> str:
        running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
        self.wait(lambda: self.slurm.state_of(self.number) not in running, "the end of the job")
        return self.slurm.state_of(self.number)

    def assert_result(self, expected: str) -> None:
        found = {json.loads(path.read_text())["hash"] for path in self.directory.glob("result.*.json")}
        assert found == {expected}, self.text()
        assert not list(self.directory.glob(".swift-*")), "the certificates are left"


def consecutive_ports(number: int) -> int:
    """The first of so many."""
    while True:
        ports = sorted(free_ports(10 * number))
        for first in ports:
            if set(range(first, first + number)) <= set(ports):
                return first


def test_a_node_is_recovered_long_before_slurm_notices(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """Not the first node, which has the batch script: with that Slurm queues the job again."""
    job = Job(slurm, tmp_path).train()
    slot = next(slot for slot in (0, 1) if job.node_of_slot(slot) != slurm.nodes[0])
    lost = job.node_of_slot(slot)
    slurm.crash(lost)
    job.wait(lambda: "recovered: generation 2" in job.text(), "the recovery")
    assert slurm("sinfo", "-h", "-n", lost, "-t", "alloc,mix", "-o", "%N").strip() == lost, "Slurm has noticed it"
    assert job.end() == "COMPLETED", job.text()
    assert "swift-run ended with 0" in job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


def test_the_time_is_nearly_up(slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """What `--signal=USR1@120` does: a last checkpoint, and the job goes on with the next iteration later."""
    job = Job(slurm, tmp_path, checkpoint=1000).train()
    slurm("scancel", "--signal=USR1", job.number)
    job.start_at_once()
    told = re.search(r"all that was trained is in the checkpoint of iteration (\d+)", job.text())
    assert told and "is queued again" in job.text(), job.text()
    assert job.end() == "COMPLETED", job.text()
    assert f"all ranks begin with the checkpoint of iteration {told[1]}" in job.text()
    assert ", start 2: node" in job.text()
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


def test_one_node_is_told_to_go(slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    job = Job(slurm, tmp_path).train()
    going = job.node_of_slot(1)
    steps = [line.split() for line in slurm("squeue", "-s", "-h", "-o", "%i %N %j").splitlines()]
    step = next(number for number, node, name in steps if node == going and name == "swift-run")
    slurm(
        *words(put_in(command(PAGE, "scancel --signal=USR1"), {"JOB.STEP": step})), check=False
    )  # of nodes that share an address it says that some know no step
    job.wait(lambda: f"node {going} was drained" in job.text(), "the drain")
    assert job.end() == "COMPLETED", job.text()
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


@pytest.mark.timeout(240)
def test_a_node_is_drained_in_slurm(slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """By an operator who knows nothing of this job."""
    job = Job(slurm, tmp_path, pace_s=1.0).train()
    going = job.node_of_slot(1)
    order = put_in(command(PAGE, "scontrol update nodename"), {"NODE": going, "...": "'bad | memory: 5%'"})
    slurm(*words(order))
    job.wait(lambda: f"node {going} was drained" in job.text(), "the drain")
    told = f"node {going} is drained in Slurm: bad | memory: 5%; it leaves the job when a spare has its place"
    assert job.text().count("drained in Slurm") == job.text().count(told) == 1, job.text()
    assert job.end() == "COMPLETED", job.text()
    assert job.node_of_slot(1) != going
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


@pytest.mark.timeout(240)
def test_the_time_is_up_after_a_drain(slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """A node that has left long before, and well, is no end of the job: it is queued again."""
    job = Job(slurm, tmp_path, checkpoint=1000, pace_s=1.0).train()
    going = job.node_of_slot(1)
    slurm("scontrol", "update", f"nodename={going}", "state=drain", "reason=memory")
    left = tmp_path / f".swift-{job.number}" / f"result.{going}"
    job.wait(left.exists, "it has left")
    found = json.loads(left.read_text())
    assert (found["exit_code"], found["cause"]) == (0, "drained"), job.text()
    slurm("scancel", "--signal=USR1", job.number)
    job.start_at_once()
    assert "swift-run ended with 75" in job.text()
    assert job.end() == "COMPLETED", job.text()
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


@pytest.mark.timeout(240)
def test_the_time_limit_itself(slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """Slurm, and nobody else, says that it is near: half a minute earlier than asked for, or a little later."""
    job = Job(slurm, tmp_path, checkpoint=1000, pace_s=1.0)
    job.train("--signal=USR1@5", nodes=2, spares=0, time="1")
    job.wait(lambda: slurm.state_of(job.number) != "RUNNING", "the warning")
    job.start_at_once()
    assert "swift-run ended with 75" in job.text() and "TIME LIMIT" not in job.text(), job.text()
    slurm("scontrol", "update", f"jobid={job.number}", "TimeLimit=10")
    assert job.end() == "COMPLETED", job.text()
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


@pytest.mark.timeout(240)
def test_a_node_that_slurm_resumes_keeps_its_place(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """There was no spare, so its order stood."""
    job = Job(slurm, tmp_path, pace_s=1.0).train(nodes=2, spares=0)
    staying = job.node_of_slot(1)
    slurm("scontrol", "update", f"nodename={staying}", "state=drain", "reason=memory")
    job.wait(lambda: f"node {staying} is drained in Slurm: memory;" in job.text(), "the order")
    slurm("scontrol", "update", f"nodename={staying}", "state=resume")
    told = f"Slurm has node {staying} in service again: it stays in the job"
    job.wait(lambda: told in job.text(), "it is taken back")
    assert job.end() == "COMPLETED", job.text()
    assert job.node_of_slot(1) == staying and "was drained" not in job.text(), job.text()
    assert [job.iterations(rank) for rank in range(4)] == [list(range(ITERATIONS))] * 4, job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


@pytest.mark.timeout(240)  # Slurm takes its time to notice a crash
@pytest.mark.parametrize("how", ["requeue", *in_soak("crash of the first node")])
def test_a_job_that_is_queued_again(
    how: str, slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """It goes on with the newest checkpoint."""
    job = Job(slurm, tmp_path, checkpoint=3).train()
    job.wait(lambda: list((tmp_path / "checkpoints").glob("*/committed.json")), "a checkpoint")
    if how == "requeue":
        job.order(command(PAGE, "scontrol requeue"))
    else:  # the one with the batch script
        slurm.crash(slurm.nodes[0])
    job.start_at_once()
    assert job.end() == "COMPLETED", job.text()
    assert re.search(r"all ranks begin with the checkpoint of iteration [1-9]", job.text()), job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))


def test_what_is_mistyped_ends_the_job_with_2(slurm: SlurmCluster, tmp_path: Path) -> None:
    spares = Job(slurm, tmp_path).submit("--nodes=2", str(TEMPLATE), str(SCRIPT), SPARES="2")
    assert spares.ended() == "FAILED" and "SPARES=2: spares are some of the 2 nodes of this job" in spares.text()
    option = Job(slurm, tmp_path).submit("--nodes=2", str(TEMPLATE), "--no-such-option", str(SCRIPT))
    assert option.ended() == "FAILED"
    assert "swift-run ended with 2\n" in option.text() and "is lost" not in option.text()


def test_scancel_ends_everything(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path).train()
    job.order(command(PAGE, "scancel JOB"))
    assert job.ended() == "CANCELLED", job.text()
    job.wait(lambda: slurm("squeue", "-s", "-h", "-j", job.number, check=False) == "", "no step is left")


HETEROGENEOUS = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1
srun --het-group=0,1 swift-run --nproc-per-node 2 {script}
"""
PLAIN = """#!/bin/bash
#SBATCH --nodes=2
{export}
{line}
"""


@pytest.mark.parametrize("kind", ["plain", "heterogeneous", *in_soak("array")])
def test_srun_needs_no_option_of_the_rendezvous(
    kind: str, slurm: SlurmCluster, tmp_path: Path, etcd: str, undisturbed: Callable[..., str]
) -> None:
    script = tmp_path / "job.sh"
    line = put_in(command(PAGE, "srun"), {"--nproc-per-node": "2", "train.py": str(SCRIPT)})
    export = put_in(command(PAGE, "export"), {"etcd1:2379": etcd})
    text = HETEROGENEOUS if kind == "heterogeneous" else PLAIN
    script.write_text(text.format(script=SCRIPT, line=line, export=export))
    array = ("--array=4-4",) if kind == "array" else ()
    job = Job(slurm, tmp_path).submit(*array, str(script), SWIFT_ETCD_ENDPOINTS=etcd)
    job.wait_for_iteration(2)
    assert re.search(r"Slurm job lab-\d+: node 1 of the 2 of this step", job.text()), job.text()
    assert job.end() == "COMPLETED", job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS))
