"""Stock torchrun with `--rdzv-backend swift-etcd` and a real etcd: nodes meet, join late, are killed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_rendezvous.etcd import EtcdConfig, EtcdStore
from tests.support.etcd_cluster import EtcdCluster, wait_for
from tests.support.job import ROOT, SOURCE_ROOTS

GROUP = "torchrun.handlers"
LEASE_TTL_S = 4
CONF = f"join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,lease_ttl={LEASE_TTL_S}"

SCRIPT = """
import json, os, pathlib, time
import torch
import torch.distributed as dist

out = pathlib.Path(os.environ["OUT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
rounds = 0
while True:
    flag = torch.tensor([1.0, float((out / "stop").exists())])
    dist.all_reduce(flag)
    assert flag[0] == world
    rounds += 1
    if rounds == 3:  # the group works
        seen = {"node": os.environ["NODE"], "rank": rank, "world": world, "pid": os.getpid()}
        path = out / f"{os.getpid()}.part"
        path.write_text(json.dumps(seen))
        path.rename(path.with_suffix(".json"))  # nobody reads half of it
    if rounds >= 3 and flag[1] > 0:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


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


@dataclass
class Job:
    """Stock torchrun agents, each a node of its own on loopback; killed with all their workers at the end."""

    directory: Path
    endpoint: str
    path: list[str]
    nnodes: str
    run_id: str
    conf: str = CONF
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: str) -> None:
        (self.directory / "train.py").write_text(SCRIPT)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "swift-etcd",
            "--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id, "--rdzv-conf", self.conf,
            "--nnodes", self.nnodes, "--nproc-per-node", "1", "--local-addr", "127.0.0.1",
            "--max-restarts", "5", "--monitor-interval", "0.2", str(self.directory / "train.py"),
        ]  # fmt: skip
        drop = ("PET_", "TORCH", "RANK", "WORLD_SIZE", "MASTER_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        environment = {
            **kept, "PYTHONPATH": os.pathsep.join([*SOURCE_ROOTS, *self.path]), "OUT": str(self.directory),
            "NODE": node, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        with open(self.directory / f"{node}.log", "wb") as log:
            self.agents[node] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.directory)

    def kill(self, node: str) -> None:
        """As a machine that is gone: the agent and its workers at once."""
        agent = self.agents.pop(node)
        try:
            family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            if process.is_running():
                process.kill()
        agent.wait()

    def group(self) -> dict[str, int]:
        """Node -> rank of the latest group whose members all work, {} when there is none."""
        seen: list[dict[str, Any]] = [json.loads(path.read_text()) for path in self.directory.glob("*.json")]
        alive = [one for one in seen if _is_alive(one["pid"])]
        nodes = {one["node"]: one["rank"] for one in alive}
        return nodes if alive and {one["world"] for one in alive} == {len(alive)} else {}

    def wait_for_group(self, *nodes: str) -> dict[str, int]:
        def formed() -> dict[str, int]:
            assert all(agent.poll() is None for agent in self.agents.values()), self.text()
            group = self.group()
            return group if group.keys() == set(nodes) and sorted(group.values()) == [*range(len(nodes))] else {}

        try:
            found: dict[str, int] = wait_for(formed, 60, f"a group of {nodes}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None
        return found

    def finish(self) -> None:
        (self.directory / "stop").touch()
        for agent in self.agents.values():
            assert agent.wait(60) == 0, self.text()

    def text(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


@pytest.fixture
def job(
    tmp_path: Path, etcd: EtcdCluster, entry_point_path: list[str], request: pytest.FixtureRequest
) -> Iterator[Job]:
    directory = tmp_path / "job"
    directory.mkdir()
    made = Job(directory, ",".join(etcd.endpoints), entry_point_path, "2", request.node.name)
    yield made
    for node in list(made.agents):
        made.kill(node)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def keys(etcd: EtcdCluster) -> list[str]:
    with EtcdStore(EtcdConfig(etcd.endpoints)) as store:
        return [kv.key for kv in store.get_prefix("")[0]]


def test_two_nodes_train_and_leave_nothing(job: Job, etcd: EtcdCluster) -> None:
    job.start("a")
    job.start("b")
    job.wait_for_group("a", "b")
    assert all(key.startswith(f"/swift-rdzv/{job.run_id}/") for key in keys(etcd)) and keys(etcd)
    etcd.kill(0)
    time.sleep(1)
    assert job.group(), "training does not need etcd"
    etcd.start(0)
    job.finish()
    wait_for(lambda: not keys(etcd), 4 * LEASE_TTL_S, "no key after the lease")


def test_the_group_grows_and_survives_the_loss_of_its_first_node(job: Job, etcd: EtcdCluster) -> None:
    job.nnodes = "2:3"
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


def test_a_wrong_option_ends_torchrun_with_its_name(job: Job) -> None:
    job.conf = "lease_ttl=1"
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


@pytest.mark.parametrize("first", ["import torch", "import swift_agent.torch_rendezvous_backend"])
def test_torch_finds_it_whatever_is_imported_first(first: str, entry_point_path: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(first=first)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCE_ROOTS, *entry_point_path])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "port 'b' is not a number" in done.stdout and done.returncode == 0, done.stdout + done.stderr
