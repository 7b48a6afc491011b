"""Asks Slurm now and then how it has the nodes of the job, and writes the orders that follow.

A thread of its own, in a step of Slurm only. It asks while this agent is the coordinator: slurmctld has one query for
the whole job. Must never keep the agent waiting, nor end it: without an answer nothing is decided.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.slurm import states
from swift_agent.launch import slurm
from swift_agent.launch.config import AgentConfig
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node import drain_orders
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.kv import KeyValueStore
from swift_rendezvous.threads import has_started, only_logged, thread

log = logging.getLogger(__name__)

EVERY_S = 30.0
ANSWER_S = 20.0
# Between two looks at whether the agent ends meanwhile.
LOOK_S = 0.2


@contextlib.contextmanager
def watching(config: AgentConfig, store: KeyValueStore, state: Callable[[], AgentState]) -> Iterator[None]:
    """Only in a step, with Slurm's commands at hand, in a job that other nodes can join."""
    nodes, program = slurm.nodes_of(os.environ), shutil.which("sinfo")
    if not nodes or program is None or config.etcd is None:
        yield
        return
    watch = Watch(store, Keys(config.job_id), state, program, nodes)
    try:
        yield
    finally:
        watch.stop()


class CannotAsk(Exception):
    """sinfo has not answered."""


class Watch:
    """Runs from here on. *state*: the agent's, as of now. *program*: sinfo. *nodes*: of the allocation."""

    def __init__(
        self, store: KeyValueStore, keys: Keys, state: Callable[[], AgentState], program: str, nodes: str
    ) -> None:
        self._store, self._keys, self._state = store, keys, state
        self._command = [program, "--noheader", "--all", "--local", "--Node", f"--nodes={nodes}",
                         f"--format={states.FORMAT}"]  # fmt: skip
        # What a user has set there would change the answer.
        self._environ = {
            name: value for name, value in os.environ.items()
            if not name.startswith("SINFO_") and name != "SLURM_CLUSTERS"
        }  # fmt: skip
        self._had: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._is_failing = False
        self._stopped = threading.Event()
        self._thread = thread("swift-slurm", self._run, only_logged)
        has_started(self._thread)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    # ---- in its thread ----

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            if not self._is_coordinator():
                continue
            try:
                self._look(states.nodes_of(self._ask()))
                self._is_failing = False
            except CannotAsk as error:
                if not self._is_failing and not self._stopped.is_set():
                    log.warning("Slurm does not say which nodes are drained: %s; asking on", error)
                self._is_failing = True
            except RendezvousError as error:
                log.debug("orders of Slurm cannot be written: %s", error)

    def _is_coordinator(self) -> bool:
        state = self._state()
        coordinator = state.view.coordinator
        return coordinator is not None and coordinator.incarnation == state.incarnation

    def _ask(self) -> str:
        """Raises `CannotAsk`."""
        try:
            process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotAsk(f"{type(error).__name__}: {error}") from error
        deadline_s = time.monotonic() + ANSWER_S
        with process:
            while True:
                try:
                    answer, complaint = process.communicate(timeout=LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if self._stopped.is_set() or time.monotonic() >= deadline_s:
                        process.kill()
                        process.communicate()
                        raise CannotAsk(f"sinfo has not ended within {ANSWER_S:g} s") from None
        # Not its exit code: the agent reaps all of its children, so that of this one may be lost.
        if not states.nodes_of(answer):
            raise CannotAsk(" ".join(complaint.split())[: states.MAX_REASON] or "sinfo has named no node")
        return answer

    def _look(self, found: dict[str, states.NodeState]) -> None:
        view = self._state().view
        self._had = states.still_had(view, found, self._had)
        decision = states.decide(view, found, self._had, time.time())
        for one in decision.orders:
            if drain_orders.order(self._store, self._keys, view, one):
                self._had.add(one.incarnation)
                slot = view.generation.slot_of(one.incarnation) if view.generation is not None else None
                waits = "" if slot is None else " when a spare has its place"
                log.info("node %s is %s; it leaves the job%s", one.node_id, one.why, waits)
        for node in decision.taken_back:
            if drain_orders.take_back(self._store, self._keys, view, node):
                log.info("Slurm has node %s in service again: it stays in the job", node)
        for left in decision.left:
            if left not in self._told:
                self._told.add(left)
                log.info("%s", left[1])
