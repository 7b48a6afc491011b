"""Looks for faults that people have ordered for this node, waits for their moment, and strikes.

A thread of its own, only with `--allow-injection`. It looks at the agent from outside, as a person with a shell would:
the loop knows nothing of it. Each order is answered once, by whoever has its target: beside its key in etcd. Must never
strike twice for one order, nor one that is older than this agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from swift_agent.agent.injection.strikes import CannotStrike, Place, command_of
from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_agent.wire.injected import ANSWERS, ORDERED, ORDERS, REACHED, Fault, FaultError, fault_of
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.kv import Compare, KeyValueStore, Put, Watch
from swift_rendezvous.threads import has_started

log = logging.getLogger(__name__)

# Between two looks at whether a worker stands at the moment; it waits there.
LOOK_S = 0.002
# So long a worker has to come to its moment before the order is given up.
MOMENT_TIMEOUT_S = 600.0
RETRY_S = 1.0


@contextlib.contextmanager
def injecting(
    config: AgentConfig, store: KeyValueStore, directories: Directories, state: Callable[[], AgentState]
) -> Iterator[None]:
    """Only if that is allowed."""
    if not config.allow_injection:
        yield
        return
    injector = Injector(store, config.job_id, state, directories.socket, directories.messages)
    try:
        yield
    finally:
        injector.stop()


class Injector:
    """Runs from here on. *state*: the agent's, as of now. *directory*: of its socket; *messages*: of its logs of
    messages."""

    def __init__(
        self, store: KeyValueStore, job_id: str, state: Callable[[], AgentState], directory: str, messages: str
    ) -> None:
        self._store, self._keys, self._state = store, Keys(job_id), state
        self._directory, self._messages = directory, messages
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="swift-injector", daemon=True)
        if has_started(self._thread):
            log.warning(
                "--allow-injection: a program that may write into etcd may have this node killed (swiftctl inject)"
            )

    def stop(self) -> None:
        self._stopped.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    # ---- in the thread ----

    def _run(self) -> None:
        prefix = self._keys.prefix + ORDERS
        revision: int | None = None
        while not self._stopped.is_set():
            try:
                if revision is None:
                    revision = self._store.get_prefix(prefix)[1] + 1  # what is older was for others
                self._watch = self._store.watch_prefix(prefix, revision)
                for response in self._watch:
                    revision = response.revision + 1
                    for event in response.events:
                        if event.kind == "put":
                            self._take(event.kv.value)
            except RendezvousError as error:
                log.debug("orders of faults cannot be followed: %s", error)
                revision = None
                self._stopped.wait(RETRY_S)

    def _take(self, value: bytes) -> None:
        try:
            fault = fault_of(value)
        except FaultError as error:
            log.warning("an order of a fault is left out: %s", error)
            return
        if not self._is_ours(fault):
            return
        try:
            if fault.iteration is not None:
                self._wait_for(fault)
                self._forget(fault)  # the next process of that rank comes to the same moment
            command = command_of(fault, self._place())
            for program in ("ip", "tc"):
                if f"{program} " in command and shutil.which(program) is None:
                    raise CannotStrike(f"no program {program} on this node")
        except CannotStrike as error:
            self._let_go(fault)
            self._answer(fault, "refused", str(error))
            return
        what = f"{fault.kind} of {fault.target}, {fault.moment}"
        log.warning("injected: %s", what)
        self._answer(fault, "done", what)
        subprocess.Popen(
            ["sh", "-c", command], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if fault.kind not in ("kill-worker", "kill-node", "freeze"):
            self._let_go(fault)

    def _is_ours(self, fault: Fault) -> bool:
        state = self._state()
        if fault.node:
            return fault.node == state.node_id
        generation = state.view.generation
        slot = generation.slot_of(state.incarnation) if generation is not None else None
        return generation is not None and slot is not None and fault.rank in generation.ranks_of(slot)

    def _place(self) -> Place:
        state = self._state()
        generation = state.view.generation
        slot = generation.slot_of(state.incarnation) if generation is not None else None
        first = generation.first_rank(slot) if generation is not None and slot is not None else 0
        workers = {first + local_rank: worker.pid for local_rank, worker in state.workers.items() if worker.alive}
        ours = psutil.Process()
        known = {*workers.values(), os.getpid()}
        others = tuple(child.pid for child in ours.children(recursive=True) if child.pid not in known)
        from swift_logging_store.log.writer import SUFFIX

        segments: dict[int, list[str]] = {}
        for path in sorted(Path(self._messages).rglob(f"*{SUFFIX}")):
            for rank in workers:
                if path.name.startswith(f"rank{rank}."):
                    segments.setdefault(rank, []).append(str(path))
        me = state.view.nodes.get(state.node_id)
        return Place(
            os.getpid(), workers, others, _interface_of(me.host if me is not None else ""),
            {rank: tuple(found) for rank, found in segments.items()}, self._messages,
        )  # fmt: skip

    # ---- the moment ----

    def _files(self, fault: Fault) -> tuple[Path, Path]:
        generation = self._state().view.generation
        assert generation is not None
        local_rank = fault.rank - generation.first_rank(generation.slot_with(fault.rank))
        return Path(self._directory, f"{ORDERED}-{local_rank}"), Path(self._directory, f"{REACHED}-{local_rank}")

    def _wait_for(self, fault: Fault) -> None:
        """Until the worker has stopped itself there."""
        if not self._state().view.tracked:
            raise CannotStrike("the script does not call swift_agent.init(), and has no iterations: leave --at out")
        order, reached = self._files(fault)
        reached.unlink(missing_ok=True)
        new = order.with_suffix(".new")
        new.write_text(
            json.dumps({"id": fault.id, "iteration": fault.iteration, "phase": fault.phase, "part": fault.part})
        )
        os.replace(new, order)
        deadline_s = time.monotonic() + MOMENT_TIMEOUT_S
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):
                if reached.read_text() == fault.id:
                    return
            if time.monotonic() > deadline_s:
                raise CannotStrike(f"rank {fault.rank} has not come to that moment within {MOMENT_TIMEOUT_S:g} s")
            self._stopped.wait(LOOK_S)
        raise CannotStrike("this agent ends")

    def _forget(self, fault: Fault) -> None:
        if fault.iteration is not None:
            for path in self._files(fault):
                path.unlink(missing_ok=True)

    def _let_go(self, fault: Fault) -> None:
        """The worker that stopped itself goes on."""
        if fault.iteration is None:
            return
        self._forget(fault)  # if it has not come there yet
        pid = self._place().workers.get(fault.rank, 0)
        if pid:
            subprocess.run(["kill", "-CONT", str(pid)], check=False)

    def _answer(self, fault: Fault, state: str, what: str) -> None:
        answer = {"version": 1, "node": self._state().node_id, "state": state, "what": what, "time_s": time.time()}
        key = f"{self._keys.prefix}{ANSWERS}{fault.id}"
        with contextlib.suppress(RendezvousError):
            self._store.transaction([Compare.absent(key)], [Put(key, json.dumps(answer).encode())])


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return ""
