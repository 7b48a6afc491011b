"""Agents on loopback that run one script, whose workers say in which group they work; for groups that change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.agent_forks import Fork, ForkServer
from tests.support.etcd_cluster import wait_for
from tests.support.job import SOURCE_ROOTS

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
        seen = {"node": os.environ["NODE"], "rank": rank, "world": world, "pid": os.getpid(),
                "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}
        path = out / f"{os.getpid()}.part"
        path.write_text(json.dumps(seen))
        path.rename(path.with_suffix(".json"))  # nobody reads half of it
    if rounds >= 3 and flag[1] > 0:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


@dataclass
class Nodes:
    """Agents, each a node of its own on loopback, whose Python runs *command*; `$OUT` is *directory*."""

    directory: Path
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    forks: ForkServer | None = None
    """What agents are forked from; None: they are new interpreters."""
    agents: dict[str, subprocess.Popen[bytes] | Fork] = field(default_factory=dict)

    def start(self, node: str) -> None:
        drop = ("PET_", "TORCH", "RANK", "WORLD_SIZE", "MASTER_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        environment = {
            **kept, "PYTHONPATH": os.pathsep.join([*SOURCE_ROOTS, *self.path]), "OUT": str(self.directory),
            "NODE": node, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **self.environment,
        }  # fmt: skip
        with open(self.directory / f"{node}.log", "wb") as log:
            if self.forks is not None:
                self.agents[node] = self.forks.start(self.command, environment, self.directory, log.fileno())
            else:
                self.agents[node] = subprocess.Popen(
                    [sys.executable, *self.command], env=environment, stdout=log, stderr=log, cwd=self.directory
                )

    def kill(self, node: str) -> None:
        """As a machine that is gone: the agent first, then all that it has started."""
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

    def worlds(self) -> set[int]:
        return {json.loads(path.read_text())["world"] for path in self.directory.glob("*.json")}

    def kill_all(self) -> None:
        for node in list(self.agents):
            self.kill(node)

    def finish(self) -> None:
        (self.directory / "stop").touch()
        for agent in self.agents.values():
            assert agent.wait(60) == 0, self.text()

    def text(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
