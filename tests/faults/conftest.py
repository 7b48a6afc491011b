"""For the fault tests: one etcd for all, undisturbed runs to compare with, and a driver of real agents."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.agent_forks import ForkServer
from tests.support.job import Agents, Outcome
from tests.support.pipelines import References

_job_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def etcd() -> Iterator[str]:
    """Endpoint of a real etcd server that all fault tests share; each job has an id of its own."""
    with PrivateEtcd() as server:
        yield ",".join(server.config.endpoints)


@pytest.fixture
def make_agents(tmp_path: Path, etcd: str, forks: ForkServer) -> Iterator[Callable[..., Agents]]:
    """Makes the agents of a job; whatever they leave running is killed at the end of the test."""
    made: list[Agents] = []

    def make(directory: Path | None = None, **options: Any) -> Agents:
        options.setdefault("endpoint", etcd)
        options.setdefault("forks", forks)
        job = Agents(directory or tmp_path, job_id=f"job-{next(_job_numbers)}", **options)
        made.append(job)
        return job

    yield make
    for job in made:
        job.kill_all()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer) -> Callable[..., str]:
    """The hash of parameters, buffers and optimizer state after a run without failure; each kind of run is made once,
    for all processes of pytest. The plain one has processes that torchrun would have started, as no other run that it
    is compared with.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def run(**orders: Any) -> str:
        name = hashlib.sha256(json.dumps(orders, sort_keys=True).encode()).hexdigest()[:16]
        with open(shared / f"undisturbed-{name}", "a+") as known:
            fcntl.flock(known, fcntl.LOCK_EX)  # another process may be making it
            known.seek(0)
            if not (found := known.read()):
                found = make(orders)
                known.write(found)
        return found

    def make(orders: dict[str, Any]) -> str:
        directory = tmp_path_factory.mktemp("undisturbed")
        agents = Agents(
            directory, etcd, job_id=f"undisturbed-{next(_job_numbers)}", orders=orders, forks=forks,
            start_method="forkserver" if orders else "spawn",
        )  # fmt: skip
        outcome = agents.run()
        assert set(outcome.exit_codes.values()) == {0}, outcome.text()
        assert len(outcome.hashes) == 1 and len(outcome.results) == 4, outcome.results
        return outcome.hashes.pop()

    return run


@pytest.fixture(scope="session")
def undisturbed_pipelines(tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer) -> References:
    """Pipelines without failures: each kind of run is made once for all files."""
    return References(tmp_path_factory.mktemp("pipelines"), etcd, forks)


def assert_recovered(
    outcome: Outcome, expected_hash: str, lost: set[int], num_faults: int = 1, told: bool = True
) -> None:
    """All faults fired, all ended well, only *lost* ranks have a second process, and the state is that of no
    failure. *told*: somebody lived to say that the replicas were compared at the end.
    """
    text = outcome.text()
    assert outcome.fired == set(range(num_faults)), f"faults that fired: {outcome.fired}\n{text}"
    assert sorted(outcome.results) == [0, 1, 2, 3], text
    again = {rank for rank, pids in outcome.pids.items() if len(pids) > 1}
    assert again == lost, f"ranks with a second process: {again}, lost were {lost}\n{text}"
    for rank, result in outcome.results.items():
        assert result["pid"] == outcome.pids[rank][-1], text
    assert outcome.hashes == {expected_hash}, f"{outcome.results}\n{text}"
    assert not told or "equal checksums" in text, text
