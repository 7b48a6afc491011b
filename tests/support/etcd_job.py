"""A small job on an etcd that a test makes trouble with: two nodes with one worker each, and a spare."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import psutil

from swift_rendezvous.codec import decode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import GenerationRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValue
from tests.support.etcd_cluster import wait_for
from tests.support.job import Agents, Outcome

NODES = ("a", "b", "c")
RANKS = (0, 1)


class EtcdJob:
    """Running and training when it is made. *owners*: rank -> node, *spare*: the node without a slot."""

    def __init__(self, agents: Agents, nodes: tuple[str, ...] = NODES) -> None:
        self.agents, self.keys = agents, Keys(agents.job_id)
        for node in nodes:
            agents.start(node)
        wait_for(lambda: all(self.iteration(rank) >= 3 for rank in RANKS), 150.0, "training")
        for node in nodes:
            wait_for(lambda node=node: "joined job" in self.log(node), 150.0, f"node {node}")  # type: ignore[misc]
        generation = self.generation()
        self.owners = {rank: owner.node_id for rank, owner in enumerate(generation.slots)}
        self.spare = next((node for node in nodes if node not in self.owners.values()), "")
        self.pids = {rank: self._pids(rank) for rank in RANKS}
        assert all(len(pids) == 1 for pids in self.pids.values())

    # ---- looking ----

    def log(self, node: str) -> str:
        path = self.agents.directory / f"agent.{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        return "".join(self.log(node) for node in self.agents.running)

    def iteration(self, rank: int) -> int:
        path = self.agents.directory / f"times.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(lines[-1].split()[0]) if lines else -1

    def generation(self) -> GenerationRecord:
        found = self.get(self.keys.generation)
        assert found is not None
        return decode(GenerationRecord, found.value)

    def get(self, key: str) -> KeyValue | None:
        config = EtcdConfig.from_environment({}, endpoints=self.agents.endpoint)
        assert config is not None
        with EtcdStore(config) as store:
            return store.get(key)

    def _pids(self, rank: int) -> list[int]:
        return [int(line) for line in (self.agents.directory / f"pids.{rank}").read_text().split()]

    # ---- waiting ----

    def goes_on(self, num_iterations: int = 8) -> None:
        """All ranks make so many iterations from here on."""
        began = {rank: self.iteration(rank) for rank in RANKS}
        wait_for(lambda: all(self.iteration(rank) >= began[rank] + num_iterations for rank in RANKS), 60.0,
                 f"{num_iterations} iterations from {began}\n{self.logs()}")  # fmt: skip

    def stands_still(self) -> None:
        """The workers of all nodes are paused by their agents, which say so."""
        self.wait_log("paused before another node can get their places", tuple(self.owners.values()))
        for pids in self.pids.values():
            wait_for(lambda pid=pids[0]: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5.0, "its workers")  # type: ignore[misc]

    def wait_log(self, text: str, nodes: tuple[str, ...] | None = None, timeout_s: float = 60.0) -> None:
        for node in nodes or tuple(self.agents.running):
            wait_for(lambda node=node: text in self.log(node), timeout_s, f"{text!r} from {node}:\n{self.log(node)}")  # type: ignore[misc]

    def recovers(self, timeout_s: float = 60.0) -> None:
        wait_for(lambda: "recovered: generation" in self.logs(), timeout_s, f"the recovery\n{self.logs()}")

    # ---- failures ----

    def kill_worker(self, rank: int) -> None:
        os.kill(self.pids[rank][0], signal.SIGKILL)
        wait_for(lambda: f"(pid {self.pids[rank][0]}) killed by signal 9" in self.log(self.owners[rank]), 10.0,
                 "its agent to see it")  # fmt: skip

    def kill_node(self, rank: int) -> None:
        self.agents.kill_node(self.owners[rank])

    # ---- the end ----

    def finish(self, expected_hash: str, lost: set[int], dead: str = "", timeout_s: float = 120.0) -> Outcome:
        """Let it run to its end. Only *lost* ranks have a second process, nobody changed place, nothing is lost.

        *dead*: the node that was killed.
        """
        self.agents.hurry()
        outcome = self.agents.wait(timeout_s)
        text = outcome.text()
        assert {node: code for node, code in outcome.exit_codes.items() if node != dead and code} == {}, text
        assert sorted(outcome.results) == list(RANKS), text
        again = {rank for rank, pids in outcome.pids.items() if len(pids) > 1}
        assert again == lost, f"ranks with a second process: {again}, lost were {lost}\n{text}"
        for rank in set(RANKS) - lost:
            assert outcome.results[rank]["pid"] == self.pids[rank][0], text
        # Which node has run which rank: a survivor's rank was never started anywhere else.
        places: dict[int, set[str]] = {rank: set() for rank in RANKS}
        for node, output in outcome.output.items():
            for found in re.findall(r"starts ranks \[([\d, ]+)\]", output):
                for rank in found.split(", "):
                    places[int(rank)].add(node)
        for rank, node in self.owners.items():
            wanted = {node} if dead != node else {node, self.spare}
            assert places[rank] == wanted, f"rank {rank} ran on {places[rank]}\n{text}"
        assert outcome.hashes == {expected_hash}, f"{outcome.results}\n{text}"
        assert "equal checksums" in text, text
        return outcome


def ballast(directory: Path) -> Path:
    """A file that takes what is left of the file system of *directory*."""
    path = directory / "ballast"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(64 * 1024))
    return path
