"""One job under random failures of agents, workers, etcd members and links, until it has come through all of them.

Two slots and a spare, each agent in a network namespace of its own where that is possible, and three etcd members. What
strikes is drawn by `soak_plan`; here it is done to real processes, and undone. After each failure the job has to make
progress, and only ranks that were struck may have a new process. `run` ends with what was seen, and all that is wrong.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.etcd_cluster import EtcdCluster
from tests.support.history import History
from tests.support.hostile import Neighbours
from tests.support.job import Agents, Outcome
from tests.support.leftovers import names_of_networks, our_processes
from tests.support.network import Host, Network, why_not
from tests.support.soak_plan import (
    ON_ETCD,
    Aim,
    Failure,
    Layout,
    Moment,
    Sample,
    Strike,
    aim,
    draw,
    grown,
    standstill_s,
    wrong_records,
)

NODES = ("a", "b", "c")
NUM_SLOTS = 2
EPOCH = 4  # iterations; see fault_train
LEASE_TTL_S = 3
LOOK_S = 0.02
GRACE_S = 3.0  # for processes to be gone, after their agents
JOB_ID = "soak"


class Stuck(Exception):
    """The job does not go on, or has ended: there is nothing left to strike."""


class Tail:
    """The lines of a file that others append to; each is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[list[str]] = []

    def read(self) -> list[list[str]]:
        """All whole lines so far, split at blanks."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as stream:
            stream.seek(self._offset)
            whole, end, _ = stream.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            self.lines += [line.split() for line in whole.decode().splitlines()]
        return self.lines


@dataclass
class Undo:
    """What ends a failure: done once *due*."""

    what: str
    due: Callable[[], bool]
    do: Callable[[], None]

T = TypeVar("T")


@dataclass
class Seen:
    """One failure: what struck whom, and for how long no iteration ended on some rank. *recovered*: the generation has
    changed by it; else it hit a spare or etcd, or was over before anybody was given up."""

    number: int
    kinds: tuple[str, ...]
    what: str
    standstill_s: float = 0.0
    recovered: bool = False
    took_s: float = 0.0


@dataclass
class Result:
    """*wrong*: empty if all is as it has to be."""

    seed: int
    links: str
    seen: list[Seen] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    num_iterations: int = 0
    num_generations: int = 0
    equal: bool = False
    strangers: str = ""
    longest: dict[str, Any] = field(default_factory=dict)

    def kinds(self) -> Counter[str]:
        return Counter(kind for seen in self.seen for kind in seen.kinds)

    def standstills(self, recovered: bool) -> dict[str, list[float]]:
        """By kind; what struck during another's recovery is one of "two at once"."""
        found: dict[str, list[float]] = {}
        for seen in [seen for seen in self.seen if seen.recovered == recovered]:
            found.setdefault(seen.kinds[0] if len(seen.kinds) == 1 else "two at once", []).append(seen.standstill_s)
        return found


class Soak:
    """Made: the cluster runs and the job trains. `run` strikes; `close` leaves nothing."""

    def __init__(
        self, directory: Path, seed: int, *, num_workers: int = 2, stretch_s: float = 0.1, bound_s: float = 90.0,
        strangers: bool = False, say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """*directory*: empty. *bound_s*: within which the job has to go on after a failure. *strangers*: neighbours
        interfere all the time, see `hostile`."""
        self._with_strangers = strangers
        self.neighbours: Neighbours | None = None
        self.directory, self._num_workers, self._bound_s, self._say = directory, num_workers, bound_s, say
        self._ranks = range(NUM_SLOTS * num_workers)
        self.result = Result(seed, links=why_not())
        self._before = set(our_processes())
        self._stack = contextlib.ExitStack()
        self._undos: list[Undo] = []
        self._killed: set[str] = set()
        self._dead: dict[str, str] = {}  # node -> incarnation in which it was killed
        self._shaky: dict[str, tuple[str, float]] = {}
        self._excused: dict[int, float] = {}
        self._known_pids: dict[int, int] = {}
        self._samples: dict[int, tuple[str, list[Sample]]] = {}
        self._had_slot: set[int] = set()
        self._etcd_away = False
        self._dead_members: set[int] = set()
        self._orphans: list[psutil.Process] = []
        try:
            self._begin(stretch_s)
        except BaseException:
            self.close()
            raise

    def _begin(self, stretch_s: float) -> None:
        self.network: Network | None = None
        self._names: set[str] = set()
        if not self.result.links:
            self.network = Network(len(NODES))
            self._stack.callback(self.network.close)
            self._names = {name for host in self.network.hosts for name in (host.name, host.link)}
        (self.directory / "etcd").mkdir()
        (self.directory / "tmp").mkdir()
        address = self.network.address if self.network else "127.0.0.1"
        self.cluster = self._stack.enter_context(EtcdCluster(self.directory / "etcd", 3, host=address))
        endpoints = ",".join(self.cluster.endpoints)
        self.hosts: dict[str, Host] = dict(zip(NODES, self.network.hosts, strict=True)) if self.network else {}
        self.agents = Agents(
            self.directory,
            endpoints,
            num_nodes=NUM_SLOTS,
            num_workers=self._num_workers,
            max_restarts=1_000_000,
            job_id=JOB_ID,
            options=("--spares", str(len(NODES) - NUM_SLOTS), "--lease-ttl", str(LEASE_TTL_S)),
            orders={"iterations": 1_000_000 * EPOCH, "stretch_s": stretch_s},
            environment={"GLOO_SOCKET_IFNAME": "eth0" if self.network else "lo", "TMPDIR": str(self.directory / "tmp")},
            hosts=dict(self.hosts),
        )
        self._stack.callback(self.agents.kill_all)
        self.history = self._stack.enter_context(History(endpoints, JOB_ID))
        self._times = {rank: Tail(self.directory / f"times.{rank}") for rank in self._ranks}
        self._pids = {rank: Tail(self.directory / f"pids.{rank}") for rank in self._ranks}
        for node in NODES:
            self.agents.start(node)
        self._until(lambda: self._is_whole() and min(map(self._iteration, self._ranks)) >= 3, "the job to train")
        self._known_pids = {rank: len(self._pids[rank].read()) for rank in self._ranks}
        if self._with_strangers:
            prefixes = [host.prefix for host in self.hosts.values()] or [()]
            neighbours = Neighbours(self.result.seed, endpoints, JOB_ID, prefixes, self._living)
            self.neighbours = self._stack.enter_context(neighbours)

    def _living(self) -> list[int]:
        """Agents that have joined: one that cannot be started is another matter."""
        here = {node: self._incarnation(node) for node in NODES if node not in self._killed}
        joined = [node for node, incarnation in here.items() if incarnation and incarnation != self._dead.get(node)]
        return [self.agents.running[node].pid for node in joined]

    def close(self) -> None:
        """End all that still runs, frozen or not."""
        self._stack.close()

    # ---- looking ----

    def _iteration(self, rank: int) -> int:
        lines = self._times[rank].read()
        return int(lines[-1][0]) if lines else -1

    def _roster(self) -> dict[str, Any]:
        return self.history.now("generation") or {"slots": [], "number": 0, "mode": "", "store_slot": 0}

    def _is_whole(self) -> bool:
        """All nodes are in the job, and those of the roster are the ones that it names."""
        here = {node: self.history.now(f"nodes/{node}") for node in NODES}
        if any(now and now["incarnation"] == self._dead.get(node) for node, now in here.items()):
            return False
        owners = self._roster()["slots"]
        return (
            all(here.values())
            and len(owners) == NUM_SLOTS
            and all((here[o["node_id"]] or {}).get("incarnation") == o["incarnation"] for o in owners)
        )

    def _layout(self) -> Layout:
        roster = self._roster()
        slots = tuple(owner["node_id"] for owner in roster["slots"])
        others = tuple(node for node in NODES if node not in slots and node not in self._killed)
        coordinator = (self.history.now("coordinator") or {}).get("node_id")
        living = frozenset(rank for rank in self._ranks if self._process_of(rank) is not None)
        return Layout(slots, self._num_workers, others, coordinator, slots[roster["store_slot"]], living,
                      shaky=frozenset(self._still_shaky() | self._killed))  # fmt: skip

    def _incarnation(self, node: str) -> str:
        return str((self.history.now(f"nodes/{node}") or {}).get("incarnation", ""))

    def _still_shaky(self) -> set[str]:
        """Nodes whose loss may yet come of something that is over."""
        for node, (incarnation, until_s) in list(self._shaky.items()):
            now = self.history.now(f"nodes/{node}")
            back = until_s < math.inf and now is not None and now["incarnation"] != incarnation
            if back or time.monotonic() > until_s:
                del self._shaky[node]
        return set(self._shaky)

    def _process_of(self, rank: int) -> psutil.Process | None:
        lines = self._pids[rank].read()
        try:
            process = psutil.Process(int(lines[-1][0])) if lines else None
            return process if process is not None and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def _log(self, node: str) -> str:
        return (self.directory / f"agent.{node}.log").read_text(errors="replace")

    # ---- waiting ----

    def _pump(self) -> None:
        """Undo what is due; raise `Stuck` if there is no job to go on with."""
        for undo in [undo for undo in self._undos if undo.due()]:
            self._undos.remove(undo)
            undo.do()
        for node, process in self.agents.running.items():
            if node not in self._killed and process.poll() is not None:
                raise Stuck(f"the agent of {node} has ended with code {process.returncode}")
        ended = self.history.now("end")
        if ended is not None:
            raise Stuck(f"the job has ended: {ended}")
        roster = self._roster()
        if roster["mode"] == "restart":
            raise Stuck(f"all workers start again: {roster['why']}")

    def _until(self, condition: Callable[[], T], what: str, bound_s: float | None = None) -> T:
        """The first true value of *condition*."""
        deadline_s = time.monotonic() + (bound_s or self._bound_s)
        while True:
            self._pump()
            if value := condition():
                return value
            if time.monotonic() > deadline_s:
                left = [undo.what for undo in self._undos]
                raise Stuck(f"not within {bound_s or self._bound_s:g} s: {what} (still to be undone: {left})")
            time.sleep(LOOK_S)

    # ---- the soak ----

    def run(self, num_failures: int, first: int = 0) -> Result:
        """Strike so often, then let the job end and look at everything."""
        began_s, number, result = time.monotonic(), first, self.result
        try:
            while sum(result.kinds().values()) < num_failures:
                self._fail(draw(result.seed, number, self.network is not None))
                number += 1
            outcome = self._finish()
        except (Stuck, AssertionError) as error:  # the latter from a helper that waits
            self._wrong(f"failure {number}, {result.seen[-1].what if result.seen else 'the start'}: {error}")
            for node in NODES:
                self._say("\n".join([f"--- {node}", *self._log(node).splitlines()[-25:]]))
            self.close()
        else:
            self._judge(outcome)
        result.duration_s = time.monotonic() - began_s
        return result

    def _fail(self, failure: Failure) -> None:
        # Whoever may still be lost by what came before is not counted on: one that the job can spare is waited for.
        target = self._until(lambda: aim(failure.first, self._layout()), f"somebody to spare for {failure.first}")
        assert target is not None
        began_s, struck_s, mark = time.monotonic(), time.time(), self.history.mark()
        generation = self._roster()["number"]
        seen = Seen(failure.number, (failure.first.kind,), self._describe(failure.first, target))
        self.result.seen.append(seen)
        may_lose = set(self._strike(failure.first, target))
        if failure.second is not None:
            if may_lose and failure.moment != "now":
                self._wait_moment(failure.moment, mark)
            strike_s = time.monotonic() + failure.delay_s
            self._until(lambda: time.monotonic() >= strike_s, "the second failure")
            # What the first has taken is not a copy any more, whoever has its slot now.
            layout = self._layout()
            layout = Layout(**{**vars(layout), "gone": frozenset(may_lose)})
            second = aim(failure.second, layout)
            if second is None:
                self.result.left_out.append(f"{failure.number}: then {failure.second}")
            else:
                seen.kinds += (failure.second.kind,)
                seen.what += f", {failure.moment} + {failure.delay_s:.2f} s: {self._describe(failure.second, second)}"
                may_lose |= self._strike(failure.second, second)
        self._until(lambda: not self._undos, "the end of the failure")
        for member in sorted(self._dead_members):
            self.cluster.wait_healthy(member)
        self._dead_members.clear()
        self._etcd_away = False
        done = max(map(self._iteration, self._ranks))
        # All have to do one that has begun after this.
        self._until(lambda: min(map(self._iteration, self._ranks)) >= done + 2, f"iteration {done + 2} on all ranks")
        self._until(lambda: not any(map(_lives, self._orphans)), "the end of the workers without an agent", 15.0)
        self._orphans.clear()
        if failure.patient:
            self._until(self._is_whole, "all nodes to be there")
        times = {rank: [float(line[1]) for line in self._times[rank].read()] for rank in self._ranks}
        seen.standstill_s = max(standstill_s(values, struck_s, time.time()) for values in times.values())
        seen.recovered = self._roster()["number"] > generation
        seen.took_s = time.monotonic() - began_s
        self._check_pids(seen, may_lose)
        self._sample()
        self._say(
            f"{sum(self.result.kinds().values())}: failure {failure.number}: {seen.what}; stood still "
            f"{seen.standstill_s:.2f} s, iteration {self._iteration(0)}, generation {self._roster()['number']}"
        )

    def _wait_moment(self, moment: Moment, mark: int) -> None:
        """Until a recovery has come so far. What may be lost need not be: then in a while."""
        begins = {"failure": "failure/", "generation": "generation", "plan": "plan/"}[moment]
        end_s = time.monotonic() + 2 * LEASE_TTL_S + 2.0
        self._until(
            lambda: any(name.startswith(begins) for name in self.history.names_since(mark)) or time.monotonic() > end_s,
            moment,
        )

    def _describe(self, strike: Strike, target: Aim) -> str:
        """Who it is that is struck: not always whom the strike names, see `aim`."""
        layout = target.after
        whom = [f"rank {rank}" for rank in target.ranks]
        for node in target.nodes:
            roles = [f"slot {slot}" for slot, owner in enumerate(layout.slots) if owner == node] or ["spare"]
            roles += ["coordinator"] * (node == layout.coordinator) + ["store"] * (node == layout.store)
            whom.append(f"{node}: {', '.join(roles)}")
        return f"{strike.kind}{' ' * bool(strike.way)}{strike.way}{' of ' * bool(whom)}{'; '.join(whom)}"

    def _check_pids(self, seen: Seen, may_lose: set[int]) -> None:
        now_s = time.monotonic()
        excused = {rank for rank, until_s in self._excused.items() if until_s > now_s}
        for rank in self._ranks:
            num = len(self._pids[rank].read())
            if num > self._known_pids[rank] and rank not in may_lose | excused:
                pids = [line[0] for line in self._pids[rank].lines[self._known_pids[rank] - 1 :]]
                self._wrong(f"failure {seen.number}, {seen.what}: rank {rank} was not struck, its processes are {pids}")
            self._known_pids[rank] = num

    def _wrong(self, text: str) -> None:
        self._say(f"WRONG: {text}")
        self.result.wrong.append(text)

    def _sample(self) -> None:
        slots = {owner["node_id"] for owner in self._roster()["slots"]}
        for node, agent in self.agents.running.items():
            if node in self._killed or not self.history.now(f"nodes/{node}"):
                continue
            if node in slots:
                self._had_slot.add(agent.pid)
            # Who has had a slot keeps what it has started for its workers.
            role = "a slot" if node in slots else "spare after a slot" if agent.pid in self._had_slot else "spare"
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(agent.pid)
                files = _open_files(agent.pid)
                if self.neighbours is not None:
                    files["socket"] -= self.neighbours.num_held(agent.pid)
                rss_mb = process.memory_info().rss / 1e6
                sample = Sample(role, process.num_threads(), sum(files.values()), rss_mb, files)
                self._samples.setdefault(agent.pid, (node, []))[1].append(sample)

    # ---- failures ----

    def _strike(self, strike: Strike, target: Aim) -> frozenset[int]:
        """Do it, and see to it that it is undone; the ranks that may get a new process by it."""
        if strike.kind in ON_ETCD:
            self._strike_etcd(strike)
            return frozenset()
        for rank in target.ranks:
            process = self._process_of(rank)
            if process is not None:
                process.kill()
        if not target.nodes:
            return target.may_lose
        node = target.nodes[0]
        if strike.kind in ("node", "agent"):
            self._kill(node, with_workers=strike.kind == "node")
            ready_s = time.monotonic() + strike.lasts_s
            undo = Undo(f"the end of {node}", lambda: self._can_start(node, ready_s), lambda: self._start(node))
            self._undos.append(undo)
            return target.may_lose
        before = {each: self._incarnation(each) for each in target.nodes}
        undo = self._freeze(node, strike) if strike.kind == "freeze" else self._cut(strike, target)

        def end() -> None:
            undo.do()
            # What it has brought on is seen and decided within this time: see "How a loss is seen" of the rendezvous.
            until_s = time.monotonic() + 2 * LEASE_TTL_S + 4.0
            for each in target.nodes:
                self._shaky[each] = (before[each], until_s)
            self._excused.update(dict.fromkeys(target.may_lose, until_s))

        self._shaky.update({each: (before[each], math.inf) for each in target.nodes})
        self._undos.append(Undo(undo.what, undo.due, end))
        return target.may_lose

    def _kill(self, node: str, with_workers: bool) -> None:
        process = self.agents.running[node]
        self._killed.add(node)
        self._dead[node] = self._incarnation(node)
        if with_workers:
            self.agents.kill_node(node)
        else:
            self._orphans += psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.wait()

    def _can_start(self, node: str, due_s: float) -> bool:
        return time.monotonic() >= due_s and not self._etcd_away and node not in self._unreachable()

    def _start(self, node: str) -> None:
        self.agents.start(node)
        self._killed.discard(node)
        self._shaky.pop(node, None)

    def _unreachable(self) -> set[str]:
        return {undo.what.rpartition(" ")[2] for undo in self._undos if undo.what.startswith("link")}

    def _freeze(self, node: str, strike: Strike) -> Undo:
        """Until its lease is over, and then some time."""
        pid, incarnation = self.agents.running[node].pid, self._incarnation(node)
        os.kill(pid, signal.SIGSTOP)
        gone_s: list[float] = []

        def due() -> bool:
            now = self.history.now(f"nodes/{node}")
            if not gone_s and (now is None or now["incarnation"] != incarnation):
                gone_s.append(time.monotonic())
            return bool(gone_s) and time.monotonic() >= gone_s[0] + strike.lasts_s

        return Undo(f"frozen {node}", due, lambda: os.kill(pid, signal.SIGCONT))

    def _cut(self, strike: Strike, target: Aim) -> Undo:
        assert self.network is not None
        node = target.nodes[0]
        host, due_s = self.hosts[node], time.monotonic() + strike.lasts_s
        if strike.kind == "cut":
            host.cut()
            heal = host.heal
        else:
            address = self.hosts[target.nodes[1]].address if strike.way == "to a peer" else self.network.address
            inside = strike.way != "from etcd"
            host.deafen(address, from_inside=inside)

            def heal() -> None:
                host.undeafen(address, from_inside=inside)

        return Undo(f"link of {node}", lambda: time.monotonic() >= due_s, heal)

    def _strike_etcd(self, strike: Strike) -> None:
        leader = self.cluster.leader()
        wanted = leader if strike.victim in ("coordinator", "store") else int(3 * strike.pick)
        members = [wanted] if strike.kind != "quorum" else [leader, (leader + 1) % 3]
        kills = strike.kind == "etcd kill" or (strike.kind == "quorum" and strike.pick < 0.5)
        self._etcd_away = strike.kind == "quorum"
        for member in members:
            self.cluster.kill(member) if kills else self.cluster.freeze(member)
        due_s = time.monotonic() + strike.lasts_s

        def back() -> None:
            for member in members:
                self.cluster.start(member, wait=False) if kills else self.cluster.thaw(member)
            self._dead_members.update(members)
            self._etcd_away = False

        self._undos.append(Undo(f"etcd members {members}", lambda: time.monotonic() >= due_s, back))

    # ---- the end ----

    def _finish(self) -> Outcome:
        self._until(self._is_whole, "all nodes to be there")
        if self.neighbours is not None:
            self.neighbours.stop()
            self.result.strangers = self.neighbours.summary()
        last = (max(map(self._iteration, self._ranks)) // EPOCH + 20) * EPOCH
        (self.directory / "last.new").write_text(str(last))
        (self.directory / "last.new").rename(self.directory / "last")
        (self.directory / "hurry").touch()
        self.result.num_iterations = last
        deadline_s = time.monotonic() + self._bound_s
        while any(agent.poll() is None for agent in self.agents.running.values()):
            if time.monotonic() > deadline_s:
                raise Stuck(f"the job has not ended {self._bound_s:g} s after its last failure")
            time.sleep(LOOK_S)
        return self.agents.wait()

    def _judge(self, outcome: Outcome) -> None:
        """All that has to hold once the agents have ended."""
        result, generations = self.result, self.history.puts("generation")
        result.num_generations = len(generations)
        codes = {node: code for node, code in outcome.exit_codes.items() if code}
        if codes:
            self._wrong(f"agents have ended with {codes}")
        numbers = [record["number"] for record in generations]
        if numbers != list(range(1, len(numbers) + 1)):
            self._wrong(f"generations do not follow each other: {numbers}")
        for rank in self._ranks:
            calls = [(int(line[0]), int(line[1])) for line in Tail(self.directory / f"calls.{rank}").read()]
            ends = [(int(line[0]), int(line[2])) for line in self._times[rank].read()]
            for text in wrong_records(rank, calls, ends, result.num_iterations, len(numbers) - 1):
                self._wrong(text)
            pids = [int(line[0]) for line in self._pids[rank].read()]
            found = outcome.results.get(rank)
            if found is None or found["pid"] != pids[-1] or len(pids) != self._known_pids[rank]:
                self._wrong(f"rank {rank}: its result is {found}, its processes were {pids}")
        self._judge_growth()
        keys = self.history.left()
        self._wrong(f"keys left in etcd: {keys}") if keys else None
        self.close()
        ours = [process for pid, process in our_processes().items() if pid not in self._before]
        ours = psutil.wait_procs(ours, timeout=GRACE_S)[1]
        left = [f"{process.pid}: {' '.join(process.cmdline())[:120]}" for process in ours]
        left += sorted(self._names & names_of_networks())
        names = (path.name for path in (self.directory / "tmp").iterdir())
        left += sorted(name for name in names if not name.startswith("torchinductor_"))  # torch's, one for all jobs
        self._wrong(f"left behind: {left}") if left else None
        expected = undisturbed(self.directory / "calm", result.num_iterations, self._num_workers)
        result.equal = outcome.hashes == {expected}
        if not result.equal:
            self._wrong(f"the final state is {outcome.hashes}, without failures {expected}")

    def _judge_growth(self) -> None:
        """The agent that has lived through most."""
        pid, (node, samples) = max(self._samples.items(), key=lambda item: len(item[1][1]), default=(0, ("", [])))
        figures, wrong = grown(samples)
        files = {role: [dict(sample.files) for sample in samples if sample.role == role] for role in figures}
        some = {role: looks[:: max(1, len(looks) // 6)] for role, looks in files.items()}
        self.result.longest = {"node": node, "num_failures": len(samples), "figures": figures, "files": some}
        for text in wrong:
            self._wrong(f"the agent of {node} (pid {pid}), over {len(samples)} failures, {text}")


def _open_files(pid: int) -> Counter[str]:
    """How many of each kind a process has open."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(entry)
                found[name if name.startswith("/dev") else name.partition(":[")[0] if ":[" in name else "file"] += 1
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def undisturbed(directory: Path, num_iterations: int, num_workers: int) -> str:
    """The hash of the final state of the same script without any failure."""
    directory.mkdir()
    with PrivateEtcd() as etcd:
        agents = Agents(
            directory, ",".join(etcd.config.endpoints), num_nodes=NUM_SLOTS, num_workers=num_workers, job_id="calm",
            orders={"iterations": num_iterations}, environment={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        try:
            for node in NODES[:NUM_SLOTS]:
                agents.start(node)
            outcome = agents.wait(120.0 + 0.1 * num_iterations)
        finally:
            agents.kill_all()
    assert set(outcome.exit_codes.values()) == {0} and len(outcome.hashes) == 1, outcome.text()
    return outcome.hashes.pop()


@contextlib.contextmanager
def soaking(directory: Path, seed: int, **options: Any) -> Iterator[Soak]:
    """A soak that is over at the end, whatever happens."""
    soak = Soak(directory, seed, **options)
    try:
        yield soak
    finally:
        soak.close()


def summary(result: Result) -> str:
    """For people."""
    lines = [f"{sum(result.kinds().values())} failures in {result.duration_s:.0f} s: "
             + ", ".join(f"{count} {kind}" for kind, count in result.kinds().most_common())]  # fmt: skip
    if result.links:
        lines.append(f"links were left out: {result.links}")
    if result.left_out:
        lines.append(f"{len(result.left_out)} would have taken the last copy of the state, and were left out")
    for recovered, what in ((True, "with"), (False, "without")):
        lines.append(f"stood still {what} a recovery, seconds (median, worst):")
        for kind, values in sorted(result.standstills(recovered).items()):
            lines.append(f"  {kind:12} {statistics.median(values):6.2f} {max(values):6.2f}  ({len(values)})")
    lines.append(f"{result.num_iterations} iterations, {result.num_generations} generations; "
                 f"weights {'equal' if result.equal else 'NOT shown to be equal'}")  # fmt: skip
    if result.strangers:
        lines.append(result.strangers)
    lines.append(f"the agent that lived through most: {result.longest}")
    lines += [f"WRONG: {text}" for text in result.wrong] or ["nothing is wrong"]
    return "\n".join(lines)
