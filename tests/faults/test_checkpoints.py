"""Jobs that take checkpoints: a lost stage begins with the newest, and so do all if nothing else is left.

Kills at every step of a checkpoint leave a job that ends with the same bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_agent.wire.injected import Fault
from swift_logging_store.stores.open import open_store
from tests.faults.conftest import assert_recovered
from tests.support import job
from tests.support.hdfs_cluster import HdfsCluster, why_not
from tests.support.injected import apart, node_killed
from tests.support.job import Agents, Outcome
from tests.support.pipelines import References, at
from tests.support.s3_server import BUCKET, S3Server
from tests.tiers import in_soak

PIPELINE = Path(job.__file__).with_name("pipeline_train.py")


@pytest.fixture
def pipeline(make_agents: Callable[..., Agents]) -> Callable[..., Outcome]:
    def train(
        faults: Sequence[dict[str, Any] | Fault], nodes: str = "abcd", num_workers: int = 1, **orders: Any
    ) -> Outcome:
        num_nodes = 4 // num_workers
        options = ("--spares", str(len(nodes) - num_nodes)) if len(nodes) > num_nodes else ()
        of_script, injected = apart(faults)
        return make_agents(
            num_nodes=num_nodes, num_workers=num_workers, max_restarts=20, script=PIPELINE, options=options,
            orders={"faults": of_script, "checkpoint": 3, "patient": True, **orders},
        ).run(nodes, injected)  # fmt: skip

    return train


@pytest.fixture
def expected(undisturbed_pipelines: References) -> Callable[..., Outcome]:
    """The pipeline without failures and without checkpoints."""
    return lambda schedule="Schedule1F1B", **orders: undisturbed_pipelines(schedule, **orders)


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    text = outcome.text()
    assert outcome.results.keys() == expected.results.keys(), text
    for rank, result in outcome.results.items():
        assert result["hash"] == expected.results[rank]["hash"], f"rank {rank}\n{text}"


def assert_only(lost: set[int], outcome: Outcome) -> None:
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, outcome.text()
    assert "all workers restart" not in outcome.text()


def iterations_in(directory: Path) -> list[int]:
    found = (directory / "checkpoints").glob("*/committed.json")
    return sorted(json.loads(path.read_text())["iteration"] for path in found)


@pytest.mark.parametrize(("place", "begins"), [("forward", (3, 6, 9)), ("agreed", (3, 9))])
def test_a_lost_stage_begins_with_the_newest(
    place: str, begins: tuple[int, ...], pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]
) -> None:
    """Each stage once; also right after a checkpoint, where nothing is to be repeated but the pipeline's first step.
    Where all go on with iteration 6 none is taken there."""
    faults = [at(place, iteration, rank) for iteration, rank in ((3, 2), (5, 0), (7, 3), (10, 1))]
    outcome = pipeline(faults)
    assert_only({0, 1, 2, 3}, outcome)
    assert_equal(outcome, expected())
    for begin in begins:
        assert f"load the checkpoint of iteration {begin}" in outcome.text()
    assert iterations_in(outcome.directory) == [9, 12]


def test_several_stages_on_each_rank(pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]) -> None:
    schedule = "ScheduleInterleaved1F1B"
    faults = [at("backward", number, number % 4) for number in (4, 6, 11)]
    outcome = pipeline(faults, schedule=schedule)
    assert_only({0, 2, 3}, outcome)
    assert_equal(outcome, expected(schedule=schedule))


def test_a_pipeline_that_evaluates_now_and_then(
    pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]
) -> None:
    """Its stages agree again at each change."""
    faults = [
        {"at": place, "iteration": number, "rank": rank, "scope": "worker"}
        for place, number, rank in (("backward", 4, 2), ("backward", 6, 0), ("between", 6, 3), ("backward", 10, 1))
    ]
    outcome = pipeline(faults, evaluates=True)
    assert_only({0, 1, 2, 3}, outcome)
    assert_equal(outcome, expected(evaluates=True))


def test_neighbours_lost_together_begin_with_the_same(
    pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]
) -> None:
    faults = [at("backward", 5, 2, "node"), node_killed(1, 10, "backward", 1.0, micro_batch=8)]
    outcome = pipeline(faults, nodes="abcd", num_workers=2)
    assert_only({0, 1, 2, 3}, outcome)
    assert_equal(outcome, expected())


# The places, by checkpoint. Only rank 0 commits and removes.
LOSSES = {
    "the worker of rank 0": (0, "worker", {2: "before write", 4: "after write", 6: "before commit", 8: "after commit",
                                           10: "after remove"}),
    "rank 0 in the middle of a step": (0, "worker", {2: "in write", 4: "before name of part", 6: "before name of mark",
                                                     8: "before remove directory", 10: "after remove directory"}),
    "the worker of rank 3": (3, "worker", {4: "before write", 6: "in write", 8: "after write"}),
    "the node of rank 0": (0, "node", {4: "before commit", 8: "after commit"}),
}  # fmt: skip


@pytest.mark.parametrize("who", LOSSES)
def test_a_loss_at_each_step_of_a_checkpoint(
    who: str, pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]
) -> None:
    rank, scope, places = LOSSES[who]
    faults = [{"at": at, "iteration": iteration, "rank": rank, "scope": scope} for iteration, at in places.items()]
    nodes = "abcdef" if scope == "node" else "abcd"
    outcome = pipeline(faults, nodes=nodes, checkpoint=2)
    assert_only({rank}, outcome)
    assert_equal(outcome, expected())
    assert iterations_in(outcome.directory)[-1] == 12


@pytest.mark.parametrize("kind", ["s3", *in_soak("hdfs")])
def test_a_loss_at_each_step_of_a_checkpoint_in_a_store(
    kind: str, make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a bucket, where a file is there when its upload has ended; in `make soak` in HDFS, too."""
    if kind == "hdfs" and (why := why_not()):
        pytest.skip(why)
    faults = [
        {"at": at, "iteration": iteration, "rank": rank, "scope": "worker"}
        for iteration, rank, at in (
            (2, 0, "before write"), (4, 3, "in write"), (6, 0, "before commit"), (8, 0, "after commit"),
            (10, 0, "before remove directory"),
        )
    ]  # fmt: skip
    with S3Server(tmp_path / "s3") if kind == "s3" else HdfsCluster(tmp_path / "hdfs", num_data_nodes=1) as server:
        url = f"s3://{BUCKET}" if isinstance(server, S3Server) else server.url
        environment = server.environment if isinstance(server, S3Server) else {}
        outcome = make_agents(
            tmp_path, num_nodes=4, num_workers=1, max_restarts=20, script=PIPELINE, environment=environment,
            orders={"faults": faults, "checkpoint": 2, "patient": True, "store": f"{url}/run"},
        ).run("abcd")  # fmt: skip
        assert_only({0, 3}, outcome)
        assert_equal(outcome, expected())
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        marks = sorted(name.split(".")[0] for name in open_store(f"{url}/run").names() if "iteration" in name)
    assert marks == ["iteration-000000000010", "iteration-000000000012"], marks


def test_all_begin_with_it_if_iterations_cannot_be_repeated(
    pipeline: Callable[..., Outcome], expected: Callable[..., Outcome]
) -> None:
    faults = [{"at": "forward", "iteration": number, "rank": 2, "scope": "worker"} for number in (2, 5, 10)]
    outcome = pipeline(faults, collective="compiled")
    text = outcome.text()
    assert text.count("no log has what this collective gave") >= 2, text
    for begin in (3, 9):
        assert f"all ranks begin with the checkpoint of iteration {begin}" in text
    assert_equal(outcome, expected(collective="compiled"))


def test_another_seed_is_noticed(pipeline: Callable[..., Outcome]) -> None:
    """A checkpoint has the state, but what is repeated since then would draw other numbers."""
    outcome = pipeline([{"at": "forward", "iteration": 5, "rank": 2, "scope": "worker"}], seedless=True)
    text = outcome.text()
    assert "rank 2: the script's set-up gives another seed than when the job began" in text
    assert "all workers restart" in text and "all ranks begin with the checkpoint of iteration 3" in text
    # That is a recovery, too, and over with the first iteration.
    told = r"recovered: generation \d+ goes on at iteration 4: agree \d+ ms, .*iteration \d+ ms, total"
    assert re.search(told, text), text
    for rank in range(4):
        assert f"rank {rank}: the script's seed is not that with which the checkpoint of iteration 3 was taken" in text
    assert len(outcome.results) == 4, text


def test_a_damaged_one_is_not_used(
    make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path
) -> None:
    """All begin with the one before it, and it is taken again."""
    start(make_agents, tmp_path, iterations=8)
    assert iterations_in(tmp_path) == [3, 6]
    part = next((tmp_path / "checkpoints").glob("iteration-000000000006.*/rank-2.*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    faults = [
        {"at": "forward", "iteration": iteration, "rank": rank, "scope": "worker"}
        for iteration, rank in ((3, 1), (5, 2), (7, 1))
    ]
    outcome = start(make_agents, tmp_path, faults=faults)
    assert f"{part} is damaged: it is not what was written" in outcome.text()
    assert "all ranks begin with the checkpoint of iteration 3" in outcome.text()
    # Also before there is another one: its first step is one that all made after they had begun.
    assert "load the checkpoint of iteration 3, and repeat iterations 3 to 4" in outcome.text()
    assert "all workers restart" not in outcome.text()
    assert_equal(outcome, expected())
    for path in (tmp_path / "checkpoints").glob("*/rank-*"):
        path.unlink()
    outcome = start(make_agents, tmp_path, faults=faults)
    assert not outcome.results and "can be loaded on all ranks" in outcome.text()
    assert "give job.checkpoint() another directory" in outcome.text()
    assert iterations_in(tmp_path) == [9, 12]


def test_a_damaged_one_is_not_used_later_either(
    make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path
) -> None:
    """It is still the newest there, as that of its iteration was not taken again: a failure came in its place."""
    start(make_agents, tmp_path, iterations=8)
    part = next((tmp_path / "checkpoints").glob("iteration-000000000006.*/rank-2.*"))
    part.write_bytes(part.read_bytes()[:-1])
    faults = [
        {"at": place, "iteration": iteration, "rank": rank, "scope": "worker"}
        for place, iteration, rank in (("agreed", 5, 0), ("forward", 7, 2))
    ]
    outcome = start(make_agents, tmp_path, faults=faults)
    assert outcome.fired == {0, 1} and "all ranks begin with the checkpoint of iteration 3" in outcome.text()
    assert outcome.text().count("load the checkpoint of iteration 3") == 2, outcome.text()
    assert "load the checkpoint of iteration 6" not in outcome.text()
    assert "all workers restart" not in outcome.text()
    assert_equal(outcome, expected())


FAULT_OF_A_STAGE = [{"at": "backward", "iteration": 5, "rank": 2, "scope": "worker"}]


def start(
    make_agents: Callable[..., Agents], directory: Path, environment: dict[str, str] | None = None, **orders: Any
) -> Outcome:
    for path in directory.glob("result.*"):
        path.unlink()
    return make_agents(
        directory, num_nodes=4, num_workers=1, script=PIPELINE, environment=environment or {},
        orders={"faults": [], "checkpoint": 3, "patient": True, **orders},
    ).run("abcd")  # fmt: skip


def test_where_nothing_can_be_written_training_goes_on(
    make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").touch()
    outcome = start(make_agents, tmp_path)
    assert not outcome.results
    assert "give job.checkpoint() a directory or bucket that all nodes can read and write" in outcome.text()
    (tmp_path / "checkpoints").unlink()
    # It can be read, and nobody can make anything in it.
    outcome = start(make_agents, tmp_path, patient=False, store="/proc/sys")
    assert outcome.text().count("Training goes on.") >= 4
    assert_equal(outcome, expected())


def test_checkpoints_in_a_bucket(
    make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path
) -> None:
    """A stage begins with one of them, and so do all in the next run."""
    with S3Server(tmp_path / "s3") as server:
        given = {"store": f"s3://{BUCKET}/run", "environment": server.environment}
        outcome = start(make_agents, tmp_path, iterations=8, faults=FAULT_OF_A_STAGE, **given)
        assert outcome.fired == {0} and "load the checkpoint of iteration 3" in outcome.text()
        assert_only({2}, outcome)
        assert f"in s3://{BUCKET}/run: " in outcome.text() and server.environment["AWS_SECRET_ACCESS_KEY"] not in (
            outcome.text()
        )
        # The first of these does not come twice. What is written when the script ends is written to its end: pyarrow
        # ends its S3 at exit.
        faults = [
            *FAULT_OF_A_STAGE,
            {"at": "before write", "iteration": 12, "rank": 1, "scope": "wait"},
            {"at": "close", "rank": 1, "scope": "go", "on": 1},
        ]
        outcome = start(make_agents, tmp_path, faults=faults, **given)
    assert outcome.fired == {0, 1, 2}
    assert "all ranks begin with the checkpoint of iteration 6" in outcome.text()
    assert f"checkpoint of iteration 12 in s3://{BUCKET}/run: " in outcome.text()
    assert_equal(outcome, expected())


def test_what_an_epoch_has_begun_with_does_not_count_twice(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    """The second run goes on in the middle of an epoch at whose begin the script has made parts of the model new."""
    orders = {"begins_again": 1, "checkpoint": 3, "patient": True}
    first = make_agents(tmp_path, orders={**orders, "iterations": 8}).run("ab")
    assert len(first.results) == 4 and iterations_in(tmp_path) == [3, 6], first.text()
    for path in tmp_path.glob("result.*"):
        path.unlink()
    outcome = make_agents(tmp_path, orders=orders).run("ab")
    assert "all ranks begin with the checkpoint of iteration 6" in outcome.text()
    assert len(outcome.results) == 4 and outcome.hashes == {undisturbed(begins_again=1)}, outcome.text()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_checkpoints_in_hdfs(
    make_agents: Callable[..., Agents], expected: Callable[..., Outcome], tmp_path: Path
) -> None:
    with HdfsCluster(tmp_path / "hdfs", num_data_nodes=1) as cluster:
        given = {"store": f"{cluster.url}/run"}
        outcome = start(make_agents, tmp_path, iterations=8, faults=FAULT_OF_A_STAGE, **given)
        assert outcome.fired == {0} and "load the checkpoint of iteration 3" in outcome.text()
        assert_only({2}, outcome)
        assert f"in {cluster.url}/run: " in outcome.text()
        outcome = start(make_agents, tmp_path, faults=FAULT_OF_A_STAGE, **given)  # which does not come twice
    assert "all ranks begin with the checkpoint of iteration 6" in outcome.text()
    assert_equal(outcome, expected())


def test_replicas_write_one_part(make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """And all begin with it if none of them lives."""
    agents = make_agents(orders={"checkpoint": 1, "patient": True}, options=("--spares", "2"))
    outcome = agents.run("abcd", [node_killed(0, 5, "forward"), node_killed(2, 5, "forward")])
    assert_recovered(outcome, undisturbed(), {0, 1, 2, 3}, num_faults=0)
    assert "no checkpoint of iteration 1: rank 0: DistributedDataParallel rebuilds its buckets" in outcome.text()
    assert "all ranks begin with the checkpoint of iteration 5" in outcome.text()
    assert iterations_in(outcome.directory) == [11, 12]
    assert len(list((outcome.directory / "checkpoints").glob("*11.*/rank-0.*"))) == 1
    assert not list((outcome.directory / "checkpoints").glob("*/rank-1.*"))
