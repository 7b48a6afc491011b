"""Stock torchrun with `--rdzv-backend swift-etcd` and a real etcd: nodes meet, join late, are killed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import EtcdCluster, wait_for
from tests.support.group_nodes import SCRIPT, Nodes
from tests.support.job import ROOT, SOURCE_ROOTS
from tests.support.pages import command, put_in, words

GROUP = "torchrun.handlers"
LEASE_TTL_S = 4
CONF = f"join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,lease_ttl={LEASE_TTL_S}"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    # Short elections allow short leases.
    with EtcdCluster(tmp_path, heartbeat_ms=20, election_ms=200) as cluster:
        yield cluster


@pytest.fixture
def entry_point_path(tmp_path: Path) -> list[str]:
    """What PYTHONPATH needs so that torch finds the plug-in: nothing where the package is installed.

    Without an installation there is no metadata, and torch looks for entry points nowhere else. So metadata are made
    here, from what pyproject.toml declares.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    installed = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}
    if declared.items() <= installed.items():
        return []
    metadata = tmp_path / "metadata" / "swift_agent_from_source-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: swift-agent-from-source\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in declared.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return [str(metadata.parent)]


@pytest.fixture
def make_job(
    tmp_path: Path, etcd: EtcdCluster, entry_point_path: list[str], forks: ForkServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Nodes]]:
    """Stock torchrun agents of a job with the name of the test; killed with all their workers at the end. *as_typed*:
    each is started as a user does; else it is forked from a process that has imported torch, if that found the plug-in.
    """
    made: list[Nodes] = []

    def make(nnodes: str = "2", conf: str = CONF, as_typed: bool = False) -> Nodes:
        directory = tmp_path / "job"
        directory.mkdir()
        (directory / "train.py").write_text(SCRIPT)
        line = put_in(command("docs/torchrun-plugin.md", "torchrun"), {
            "--rdzv-endpoint": ",".join(etcd.endpoints), "--rdzv-id": request.node.name, "--nnodes": nnodes,
            "--nproc-per-node": "1", "--max-restarts": "5",
        })  # fmt: skip
        *options, script = words(line)[1:]
        started = [
            "-m", "torch.distributed.run", *options, "--rdzv-conf", conf, "--local-addr", "127.0.0.1",
            "--monitor-interval", "0.2", str(directory / script),
        ]  # fmt: skip
        made.append(
            Nodes(directory, started, path=entry_point_path, forks=None if as_typed or entry_point_path else forks)
        )
        return made[-1]

    yield make
    for job in made:
        job.kill_all()


def keys(etcd: EtcdCluster) -> list[str]:
    with EtcdStore(EtcdConfig(etcd.endpoints)) as store:
        return [kv.key for kv in store.get_prefix("")[0]]


def test_two_nodes_train_and_leave_nothing(
    make_job: Callable[..., Nodes], etcd: EtcdCluster, request: pytest.FixtureRequest
) -> None:
    job = make_job(as_typed=True)
    job.start("a")
    job.start("b")
    job.wait_for_group("a", "b")
    assert all(key.startswith(f"/swift-rdzv/{request.node.name}/") for key in keys(etcd)) and keys(etcd)
    etcd.kill(0)
    time.sleep(1)
    assert job.group(), "training does not need etcd"
    etcd.start(0)
    job.finish()
    wait_for(lambda: not keys(etcd), 4 * LEASE_TTL_S, "no key after the lease")


def test_the_group_grows_and_survives_the_loss_of_its_first_node(
    make_job: Callable[..., Nodes], etcd: EtcdCluster
) -> None:
    job = make_job("2:3")
    job.start("a")
    job.start("b")
    job.wait_for_group("a", "b")
    job.start("c")
    group = job.wait_for_group("a", "b", "c")
    # The hardest to lose: the others must not look for the store of its workers any more.
    first = next(node for node, rank in group.items() if rank == 0)
    job.kill(first)
    job.wait_for_group(*({"a", "b", "c"} - {first}))
    job.finish()
    wait_for(lambda: not keys(etcd), 4 * LEASE_TTL_S, "no key after the lease")


def test_a_wrong_option_ends_torchrun_with_its_name(make_job: Callable[..., Nodes]) -> None:
    job = make_job(conf="lease_ttl=1")
    job.start("a")
    assert job.agents["a"].wait(60) == 1
    assert "lease_ttl=1 must be at least twice keep_alive_interval=5" in job.text()


# torch loads the entry points in the middle of its own import. A torchrun with another backend must not pay for ours.
IMPORTS = """
import sys
{first}
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
assert not any(name.split(".")[0] == "grpc" for name in sys.modules), "grpc is loaded"
try:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    registry.create_handler(RendezvousParameters("swift-etcd", "a:b", "job", 1, 1))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["import torch", "import swift_agent.torchrun_plugin.backend"])
def test_torch_finds_it_whatever_is_imported_first(first: str, entry_point_path: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(first=first)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCE_ROOTS, *entry_point_path])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "port 'b' is not a number" in done.stdout and done.returncode == 0, done.stdout + done.stderr
