"""Looks for faults that people have ordered for this node, waits for their moment, and strikes.

A thread of its own, only with `--allow-injection`. It looks at the agent from outside, as a person with a shell would:
the loop knows nothing of it. Each order is answered once, by the agent that has its target: beside its key in etcd.
Must never strike twice for one order, nor one that is older than this agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
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
from swift_agent.wire.injected import NEXT, ORDERED, REACHED, Fault, FaultError, fault_of
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
# For the record that the script has called swift_agent.init(), which may come after an order.
TRACKED_S = 2.0
# For a shell to strike.
STRUCK_S = 0.2
# For a worker that is about to stop itself.
WAKE_S = 0.5


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
        self._taken_back: set[str] = set()
        self._at: dict[int, str] = {}  # local rank -> whose moment it is to come to
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

    # ---- in its threads ----

    def _run(self) -> None:
        prefix = self._keys.faults
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
                        else:
                            self._taken_back.add(event.kv.key.removeprefix(prefix))
            except RendezvousError as error:
                log.debug("orders of faults cannot be followed: %s", error)
                revision = None
                self._stopped.wait(RETRY_S)

    def _take(self, value: bytes) -> None:
        """An order, in a thread of its own: one that waits for its moment keeps no other waiting."""
        try:
            fault = fault_of(value)
        except FaultError as error:
            log.warning("an order of a fault is left out: %s", error)
            return
        if self._is_ours(fault):
            has_started(threading.Thread(target=self._carry_out, args=(fault,), name="swift-fault", daemon=True))

    def _carry_out(self, fault: Fault) -> None:
        try:
            with self._at_the_moment(fault) as left:
                command = command_of(fault, self._place())  # processes may be others than when it was ordered
                self._check(command)
                what = f"{fault.kind} of {fault.target}, {fault.moment}"
                if not self._answer(fault, "done", what):
                    return  # it was carried out before, or is not wanted any more
                log.warning("injected: %s", what)
                subprocess.Popen(
                    ["sh", "-c", command], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                if fault.kind == "freeze":
                    left.append("frozen")
                elif fault.kind in ("kill-worker", "kill-node"):
                    self._stopped.wait(STRUCK_S)  # it must not go on for a moment
        except CannotStrike as error:
            self._answer(fault, "refused", str(error))
        except Exception as error:  # of this order only: the training goes on
            log.warning("a fault that was ordered came to nothing: %s: %s", type(error).__name__, error)

    def _check(self, command: str) -> None:
        for program in ("ip", "tc"):
            if f"{program} " in command:
                if shutil.which(program) is None:
                    raise CannotStrike(f"no program {program} on this node")
                if os.geteuid() != 0:
                    raise CannotStrike("this agent does not run as root, and cannot change the network")

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
            os.getpid(), first, workers, others, _interface_of(me.host if me is not None else ""),
            {rank: tuple(found) for rank, found in segments.items()}, self._messages,
        )  # fmt: skip

    # ---- the moment ----

    @contextlib.contextmanager
    def _at_the_moment(self, fault: Fault) -> Iterator[list[str]]:
        """Inside, the worker stands at that moment, if one was named. It goes on in the end, whatever happens; so does
        one that comes there too late. Not if something is put into the list: then others wake it."""
        left: list[str] = []
        if fault.iteration is None:
            yield left
            return
        deadline_s = time.monotonic() + TRACKED_S
        while not self._state().view.tracked:
            if time.monotonic() > deadline_s or self._stopped.wait(LOOK_S):
                raise CannotStrike("the script has not called swift_agent.init() yet, or does not: leave --at out")
        place = self._place()
        local_rank, pid = place.local_rank(fault.rank), place.workers.get(fault.rank, 0)
        if not pid:
            raise CannotStrike(f"rank {fault.rank} has no process on this node")
        deadline_s = time.monotonic() + WAKE_S  # one that was just taken back is soon over
        while self._at.setdefault(local_rank, fault.id) != fault.id:
            if time.monotonic() > deadline_s or self._stopped.wait(LOOK_S):
                raise CannotStrike(f"rank {fault.rank} is to come to the moment of another fault first")
        order, reached = (Path(self._directory, f"{name}-{local_rank}") for name in (ORDERED, REACHED))
        try:
            reached.unlink(missing_ok=True)
            new = order.with_suffix(".new")
            named = {name: getattr(fault, name) for name in ("id", "iteration", "phase", "part", "micro_batch")}
            new.write_text(json.dumps(named))
            new.replace(order)
            log.warning("waits for its moment: %s of %s, %s", fault.kind, fault.target, fault.moment)
            pid = self._wait_for(fault, local_rank, pid, reached)
            order.unlink(missing_ok=True)  # the next process of that rank comes to the same moment
            yield left
        finally:
            order.unlink(missing_ok=True)
            if not left:
                self._wake(pid, reached)
            del self._at[local_rank]

    def _wait_for(self, fault: Fault, local_rank: int, pid: int, reached: Path) -> int:
        """Until the worker has stopped itself there: its process, which may have come in the place of *pid*."""
        deadline_s = time.monotonic() + MOMENT_TIMEOUT_S
        while not self._stopped.is_set():
            said = _text(reached).split()
            if said[:1] == [fault.id]:
                if said[1:] == ["past"]:
                    raise CannotStrike(f"rank {fault.rank} has begun a later iteration than {fault.iteration} already")
                if said[1:] == ["missed"]:
                    raise CannotStrike(f"that moment did not come in that iteration of rank {fault.rank}")
                if _status(pid) == psutil.STATUS_STOPPED:
                    return pid
            if _status(pid) in ("", psutil.STATUS_ZOMBIE):
                if fault.iteration == NEXT:
                    raise CannotStrike(f"the process of rank {fault.rank} has ended before that moment")
                worker = self._state().workers.get(local_rank)  # the next one may come to that iteration
                pid = worker.pid if worker is not None and worker.alive else pid
            if fault.id in self._taken_back:
                raise CannotStrike("it was taken back")
            if time.monotonic() > deadline_s:
                raise CannotStrike(f"rank {fault.rank} has not come to that moment within {MOMENT_TIMEOUT_S:g} s")
            self._stopped.wait(LOOK_S)
        raise CannotStrike("this agent ends")

    def _wake(self, pid: int, reached: Path) -> None:
        """A worker that says that it is there stops in the next moment, if it has not yet."""
        deadline_s = time.monotonic() + WAKE_S
        while time.monotonic() < deadline_s:
            if _status(pid) == psutil.STATUS_STOPPED and not self._state().paused:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                break
            if not reached.exists():
                break
            time.sleep(LOOK_S)
        reached.unlink(missing_ok=True)

    def _answer(self, fault: Fault, state: str, what: str) -> bool:
        """Whether this is the first answer to an order that still stands: only then it may be carried out."""
        answer = {"version": 1, "node": self._state().node_id, "state": state, "what": what, "time_s": time.time()}
        order, key = self._keys.fault(fault.id), self._keys.fault_answer(fault.id)
        guards = [Compare.exists(order), Compare.absent(key)]
        try:
            return self._store.transaction(guards, [Put(key, json.dumps(answer).encode())]).succeeded
        except RendezvousError as error:
            log.warning("a fault that was ordered came to nothing: %s: %s", type(error).__name__, error)
            return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _status(pid: int) -> str:
    """'' for a process that is not there."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return ""
