"""Jobs on GPUs, over NCCL and over gloo, whose workers and nodes are killed: the result is equal bit for bit.

Four workers share the GPUs that there are. Two ranks on one GPU need an NCCL of version 2.31 or newer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.conftest import assert_recovered
from tests.faults.test_overlap import UNDONE
from tests.support.agent_forks import ForkServer
from tests.support.job import ROOT, Agents, Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_WORKERS = 4
SHARES_GPUS = 23100  # 2.31.0
WAIT_S = 200.0  # a first use of CUDA takes seconds in each process
SCRIPTS = {name: ROOT / "tests" / "support" / f"{name}_train.py" for name in ("fault", "hsdp", "pipeline", "overlap")}
# cuBLAS is not the same from run to run without it.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

Run = Callable[..., Outcome]


def nccl_version() -> int:
    """Of the library that is loaded, which need not be the one that torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def environment(backend: str) -> dict[str, str]:
    if backend == "gloo" or torch.cuda.device_count() >= NUM_WORKERS:
        return ENVIRONMENT
    version = nccl_version()
    if version < SHARES_GPUS:
        pytest.skip(f"{NUM_WORKERS} workers over NCCL need as many GPUs, or NCCL 2.31: this is {version}")
    return ENVIRONMENT | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Run:
    def train(backend: str, script: str = "fault", nodes: str = "ab", **options: Any) -> Outcome:
        orders = {"device": "cuda", "backend": backend, **options.pop("orders", {})}
        agents = make_agents(
            orders=orders, script=SCRIPTS[script], environment=environment(backend), max_restarts=8, **options
        )
        for node in nodes:
            agents.start(node)
        return agents.wait(WAIT_S)

    return train


@pytest.fixture(scope="session")
def undisturbed_on_gpus(
    tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer
) -> Callable[..., dict[int, str]]:
    """rank -> hash of the state after a run without failure."""

    @functools.cache
    def train(backend: str, script: str = "fault", num_nodes: int = 2, **orders: Any) -> dict[int, str]:
        directory: Path = tmp_path_factory.mktemp("undisturbed")
        agents = Agents(
            directory, etcd, job_id=f"{directory.name}-{backend}-{script}", forks=forks, script=SCRIPTS[script],
            orders={"device": "cuda", "backend": backend, **orders}, environment=environment(backend),
            num_nodes=num_nodes, num_workers=NUM_WORKERS // num_nodes,
        )  # fmt: skip
        for node in "abcd"[:num_nodes]:
            agents.start(node)
        outcome = agents.wait(WAIT_S)
        assert set(outcome.exit_codes.values()) == {0}, outcome.text()
        assert sorted(outcome.results) == [0, 1, 2, 3], outcome.text()
        return {rank: result["hash"] for rank, result in outcome.results.items()}

    return train


def faults_at(*places: tuple[str, int, int], scope: str = "worker") -> list[dict[str, Any]]:
    return [{"at": at, "iteration": iteration, "rank": rank, "scope": scope} for at, iteration, rank in places]


def assert_same(outcome: Outcome, expected: dict[int, str], lost: set[int]) -> None:
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, text
    assert {rank: result["hash"] for rank, result in outcome.results.items()} == expected, text


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_workers_of_ddp(backend: str, run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]) -> None:
    faults = faults_at(("forward", 0, 1), ("backward", 3, 0), ("before_step", 5, 2), ("after_step", 8, 3))
    faults.append({"at": "backward", "iteration": 10, "rank": 0, "scope": "worker", "delay_s": 0.001})
    outcome = run(backend, orders={"faults": faults})
    assert_recovered(outcome, undisturbed_on_gpus(backend)[0], {0, 1, 2, 3}, num_faults=len(faults))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_node_of_ddp(backend: str, run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]) -> None:
    faults = faults_at(("backward", 5, 0), scope="node")
    outcome = run(backend, nodes="abc", orders={"faults": faults}, options=("--spares", "1"))
    assert_recovered(outcome, undisturbed_on_gpus(backend)[0], {0, 1})


@pytest.mark.parametrize(("at", "victim"), [("transfer", 0), ("transfer", 2), ("verify", 2)])
def test_another_loss_in_the_recovery(
    at: str, victim: int, run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]
) -> None:
    """Of the source, or of who only takes part, while communicators are made."""
    faults = [*faults_at(("backward", 5, 1)), {"at": at, "rank": victim, "scope": "worker", "after": 0}]
    outcome = run("nccl", orders={"faults": faults})
    assert_recovered(outcome, undisturbed_on_gpus("nccl")[0], {1, victim}, num_faults=2)


def test_shards_with_replicas(run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]) -> None:
    faults = faults_at(("forward", 0, 1), ("backward", 3, 2), ("before_step", 5, 0), ("after_step", 8, 3))
    outcome = run("nccl", "hsdp", orders={"faults": faults, "model": "hsdp"})
    assert_same(outcome, undisturbed_on_gpus("nccl", "hsdp", model="hsdp"), {0, 1, 2, 3})


def test_shards_from_a_checkpoint(run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]) -> None:
    faults = faults_at(("backward", 7, 2))
    orders = {"model": "fsdp", "checkpoint": 3, "patient": True}
    outcome = run("nccl", "hsdp", orders={"faults": faults, **orders})
    assert sorted(outcome.results) == [0, 1, 2, 3], outcome.text()
    assert {rank: result["hash"] for rank, result in outcome.results.items()} == undisturbed_on_gpus(
        "nccl", "hsdp", model="fsdp"
    ), outcome.text()


@pytest.mark.parametrize("schedule", ["ByHand", "Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_stages_of_a_pipeline(
    schedule: str, run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]
) -> None:
    """Over NCCL survivors begin the iteration again."""
    places = ("forward", 0, 2), ("forward", 1, 1), ("backward", 4, 3), ("after_step", 6, 0), ("between", 8, 2)
    faults = faults_at(*places)
    outcome = run(
        "nccl", "pipeline", nodes="abcd", num_nodes=4, num_workers=1, orders={"faults": faults, "schedule": schedule}
    )
    assert_same(outcome, undisturbed_on_gpus("nccl", "pipeline", num_nodes=4, schedule=schedule), {0, 1, 2, 3})


# As in test_overlap; but a device reduces one bucket after the other, so of a rank all later ones are refused, too.
NOT_UNDONE = [
    {"iteration": 3, "victim": 1, "bucket": 2, "refused": {"0": [0, 1]}},
    {"iteration": 5, "victim": 0, "bucket": 3, "refused": {"1": [0, 1, 2], "2": [1, 2], "3": [2]}, "then": 2},
    {"iteration": 7, "victim": 3, "bucket": 3, "refused": {"0": [2]}},
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("faults", [UNDONE, NOT_UNDONE], ids=["undone", "not undone"])
def test_updates_in_the_backward(
    faults: list[dict[str, Any]], backend: str, run: Run, undisturbed_on_gpus: Callable[..., dict[int, str]]
) -> None:
    orders = {"iterations": 10, "optimizer": "adam"}
    outcome = run(backend, "overlap", orders={**orders, "overlap": True, "exact": True, "faults": faults})
    assert len(outcome.hashes) == 1 and len(outcome.results) == 4, outcome.text()
    assert outcome.results[0]["hash"] == undisturbed_on_gpus(backend, "overlap", overlap=False, **orders)[0]


def test_memory_of_communicators_that_were_cut_is_given_back(
    run: Run, tmp_path: Path, undisturbed_on_gpus: Callable[..., dict[int, str]]
) -> None:
    """Nobody else may use the GPUs meanwhile."""
    faults = faults_at(*(("backward", iteration, 1) for iteration in range(1, 8)))
    (tmp_path / "once").mkdir()
    once = run("nccl", orders={"faults": faults[:1]}, directory=tmp_path / "once")
    often = run("nccl", orders={"faults": faults})
    assert_recovered(often, undisturbed_on_gpus("nccl")[0], {1}, num_faults=len(faults))
    more = often.results[0]["gpu_bytes"] - once.results[0]["gpu_bytes"]
    print(f"once: {once.results[0]['gpu_bytes'] >> 20} MiB; six more recoveries: {more >> 20} MiB more")
    assert more < 100 << 20, often.text()
