"""The coordinator is lost in the middle of what it coordinates: killed, or frozen and woken later, at every step.

A first failure (a worker or a node is killed) starts a recovery. The agent that coordinates it is struck right before
or right after one of its own transactions (`tests/support/struck_agent.py`), so exactly there and nowhere else. After
it, always: the fault fired at its step, the job ends well with the weights of an undisturbed run, only ranks that were
lost have a second process, and each generation has one roster.

A frozen one is woken when the others go on without it. Then nothing may be written but that its node is back, as a
spare; the transaction before which it was frozen is refused.

    a, b: the nodes of the slots 0 (ranks 0, 1) and 1 (ranks 2, 3)     c, d: spares     first coordinator: a, or c
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.faults.conftest import assert_recovered
from tests.support.etcd_cluster import wait_for
from tests.support.history import History
from tests.support.job import Agents, Outcome
from tests.tiers import in_soak, long

pytestmark = pytest.mark.timeout(300)

STRUCK = Path(__file__).parents[1] / "support" / "struck_agent.py"
# Where one is frozen and woken, iterations are slow until that is over: somebody has to be training when it wakes up.
LONG = {"iterations": 40}
SLOW = {**LONG, "pause_s": 0.4}

WORKER = {"at": "backward", "iteration": 5, "rank": 3, "scope": "worker"}
WORKER_OF_COORDINATOR = {"at": "backward", "iteration": 5, "rank": 1, "scope": "worker"}
NODE = {"at": "backward", "iteration": 5, "rank": 2, "scope": "node"}


class Strike(NamedTuple):
    """See `tests/support/struck_agent.py`. *generation* 0: any."""

    node: str
    step: str
    generation: int
    when: str
    do: str = "freeze"


# What the coordinator writes of a recovery and of the end of the job, and the ranks that have to start again when its
# node is lost right before or right after it. After the release nobody does: the training is complete.
KILLS = [
    (Strike("a", "generation", 2, "before", "kill"), {0, 1, 3}),
    (Strike("a", "generation", 2, "after", "kill"), {0, 1, 3}),
    (Strike("a", "plan", 2, "before", "kill"), {0, 1, 3}),
    (Strike("a", "plan", 2, "after", "kill"), {0, 1, 3}),
    (Strike("a", "release", 2, "before", "kill"), {0, 1, 3}),
    (Strike("a", "release", 2, "after", "kill"), {3}),
    (Strike("a", "end", 0, "before", "kill"), {3}),
    (Strike("a", "end", 0, "after", "kill"), {3}),
    # What its agent writes as one of those that recover.
    (Strike("a", "failure", 1, "after", "kill"), {0, 1}),
    (Strike("a", "progress", 2, "after", "kill"), {0, 1, 3}),
    (Strike("a", "store", 2, "after", "kill"), {0, 1, 3}),
    (Strike("a", "resumed", 2, "after", "kill"), {0, 1, 3}),
]

# Two in one job: a is frozen, and c takes its slot and coordinates; a is woken and becomes a spare; another worker is
# killed and c is frozen, so a gets its slot back.
FREEZES = [
    (Strike("a", "generation", 2, "before"), Strike("c", "generation", 3, "after")),
    (Strike("a", "plan", 2, "before"), Strike("c", "plan", 4, "after")),
    (Strike("a", "failure", 1, "before"), Strike("c", "progress", 3, "before")),
    (Strike("a", "store", 2, "before"), Strike("c", "resumed", 4, "before")),
]
# What `make test-all` has; `make soak` has all (3 minutes more).
KILLS_OF_ALL = [strike if index in (1, 2, 5) else long(*strike) for index, strike in enumerate(KILLS)]
FREEZES_OF_ALL = [FREEZES[0], *in_soak(*FREEZES[1:])]


@dataclass
class Run:
    """A job whose agents are struck, and all that is written into its keys."""

    agents: Agents
    history: History
    strikes: list[Strike]

    @property
    def directory(self) -> Path:
        return self.agents.directory

    def let(self, name: str) -> None:
        (self.directory / name).touch()

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        try:
            return wait_for(condition, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.history.names()}\n{self.agents.outcome(0).text()}") from None

    # ---- faults ----

    def struck(self, index: int) -> bool:
        return (self.directory / f"struck.{index}").exists()

    def frozen(self, index: int) -> bool:
        return self.struck(index) and self.is_stopped(self.strikes[index].node)

    def is_stopped(self, node: str) -> bool:
        return psutil.Process(self.pid(node)).status() == psutil.STATUS_STOPPED

    def pid(self, node: str) -> int:
        return self.agents.running[node].pid

    def kill_worker(self, rank: int) -> None:
        os.kill(int((self.directory / f"pids.{rank}").read_text().split()[-1]), signal.SIGKILL)

    def outcome_of(self, index: int) -> str:
        """What became of the transaction at which the agent was frozen."""
        path = self.directory / f"outcome.{index}"
        self.wait(path.exists, "the transaction is over")
        return path.read_text()

    # ---- what the others do ----

    def trains(self) -> bool:
        paths = [self.directory / f"times.{rank}" for rank in range(4)]
        return all(path.exists() and len(path.read_text().splitlines()) > 3 for path in paths)

    def goes_on_without(self, node: str, but_for: int) -> bool:
        """Another coordinates, the newest roster has recovered without *node*, and nothing is on its way to etcd.
        *but_for*: that roster has at least this number."""
        history = self.history
        roster = history.puts("generation")[-1]
        number, since = roster["number"], roster["revision"]
        owners = [owner["node_id"] for owner in roster["slots"]]
        if number < but_for or node in owners or history.coordinator() in (node, None):
            return False
        return number == 1 or bool(history.puts(f"events/{number:08d}.recovered", since))

    def wake(self, node: str) -> int:
        """Wake a frozen node; the revision of the store before that."""
        since = self.history.revision()
        os.kill(self.pid(node), signal.SIGCONT)
        return since

    def wake_among_others(self, node: str) -> None:
        """Wake *node* while the others train: all that is written is that it is back, and that as a spare."""
        history = self.history
        since = self.wake(node)
        self.wait(lambda: history.puts(f"nodes/{node}", since) and history.puts("job", since), f"{node} is back")
        # The rate comes from whoever trains rank 0; what the workers have measured, and what follows from it, once.
        told = {name for name in history.written(since) if name in ("rate", "profile") or name.startswith("~measured/")}
        assert history.written(since) - told == {f"nodes/{node}", "job"}
        assert history.deleted(since) == set()
        # The record of the job is written with that of a node, and says the same.
        first, *others = ({**record, "revision": 0} for record in history.puts("job"))
        assert all(other == first for other in others)


@pytest.fixture
def start(make_agents: Callable[..., Agents], etcd: str) -> Iterator[Callable[..., Run]]:
    """Start a job in which agents are struck; its nodes have entered when this returns."""
    with contextlib.ExitStack() as stack:

        def run(
            strikes: list[Strike],
            orders: dict[str, Any],
            nodes: str = "abc",
            coordinator: str = "a",
            slow: str = "",
            lease_ttl_s: int = 2,
        ) -> Run:
            """*slow*: nodes that do not come to be coordinator before they are let (`pass.NODE`)."""
            agents = make_agents(
                orders=orders,
                options=("--lease-ttl", str(lease_ttl_s), "--spares", str(len(nodes) - 2)),
                program=(str(STRUCK),),
            )
            waits = [Strike(node, "election", 0, "before", "wait") for node in slow]
            agents.environment["AGENT_ORDERS"] = json.dumps(
                {"dir": str(agents.directory), "strikes": [strike._asdict() for strike in (*strikes, *waits)]}
            )
            job = Run(agents, stack.enter_context(History(etcd, agents.job_id)), strikes)
            for node in nodes:
                agents.start(node)
            # Slots go by the order in which nodes come, and the first that is not slow coordinates.
            for node in nodes:
                job.let(f"enter.{node}")
                job.wait(lambda node=node: job.history.is_here(node), f"node {node}")
                if node == coordinator:
                    job.wait(lambda: job.history.coordinator() == coordinator, f"coordinator {coordinator}")
            return job

        yield run


def finish(job: Run, expected: str, lost: set[int], num_faults: int = 1, told: bool = True) -> Outcome:
    """Let the job end, and assert what must hold after any strike."""
    job.let("hurry")
    outcome = job.agents.wait(120.0)
    assert_recovered(outcome, expected, lost, num_faults, told)
    assert all(job.struck(index) for index in range(len(job.strikes))), outcome.text()
    killed = {strike.node for strike in job.strikes if strike.do == "kill"}
    assert all(outcome.exit_codes[node] == -signal.SIGKILL for node in killed), outcome.text()
    names, rosters = job.history.names(), job.history.puts("generation")
    assert [roster["number"] for roster in rosters] == list(range(1, len(rosters) + 1)), rosters
    for roster in rosters:
        assert len({owner["incarnation"] for owner in roster["slots"]}) == 2, roster
        assert names.count(f"plan/{roster['number']}") <= 1, names
    assert names.count("end") == 1, names
    return outcome


def ended_well(outcome: Outcome, nodes: str) -> None:
    assert all(outcome.exit_codes[node] == 0 for node in nodes), f"{outcome.exit_codes}\n{outcome.text()}"


def ended_without_a_node(outcome: Outcome, nodes: str) -> None:
    """It was lost when training had ended, but not its workers: they might have been saving something."""
    assert all(outcome.exit_codes[node] == 1 for node in nodes), f"{outcome.exit_codes}\n{outcome.text()}"
    assert "was lost before its workers had exited" in outcome.text()


@pytest.mark.parametrize(("strike", "lost"), KILLS_OF_ALL, ids=[f"{s.when} {s.step}" for s, _ in KILLS])
def test_killed(
    strike: Strike, lost: set[int], start: Callable[..., Run], undisturbed: Callable[..., str]
) -> None:
    """Its node is lost in addition to a worker. Whoever is next goes on from what is written, and waits for no lease:
    that of the dead one would end after the test.
    """
    expected = undisturbed()
    faults = [WORKER_OF_COORDINATOR if strike.step == "failure" else WORKER]
    job = start([strike], {"faults": faults}, lease_ttl_s=600)
    after_all = (strike.step, strike.when) == ("release", "after")
    outcome = finish(job, expected, lost, told=not after_all)
    (ended_without_a_node if after_all else ended_well)(outcome, "bc")


def test_killed_before_the_first_generation(start: Callable[..., Run], undisturbed: Callable[..., str]) -> None:
    """The job begins without it, and waits for no lease."""
    expected = undisturbed()
    job = start([Strike("a", "generation", 1, "before", "kill")], {}, lease_ttl_s=600)
    outcome = finish(job, expected, set(), num_faults=0)
    ended_well(outcome, "bc")


@pytest.mark.parametrize("strikes", FREEZES_OF_ALL, ids=[f"{s.when} {s.step}, {t.when} {t.step}" for s, t in FREEZES])
def test_frozen_in_a_recovery(
    strikes: tuple[Strike, Strike], start: Callable[..., Run], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(**LONG)
    fault = WORKER_OF_COORDINATOR if strikes[0].step == "failure" else WORKER
    job = start(list(strikes), {**SLOW, "faults": [fault]}, slow="b")
    for index, strike in enumerate(strikes):
        if index:
            job.kill_worker(3)
        job.wait(lambda index=index: job.frozen(index), f"{strike}")
        job.wait(
            lambda node=strike.node, index=index: job.goes_on_without(node, but_for=2 + index), "the others go on"
        )
        job.wake_among_others(strike.node)
        assert job.outcome_of(index) == ("refused" if strike.when == "before" else "applied")
        job.let("pass.b")
    outcome = finish(job, expected, {0, 1, 3})
    ended_well(outcome, "abc")
    for strike in strikes:
        assert "comes back as a spare" in outcome.output[strike.node]


def test_frozen_before_and_after_the_release(start: Callable[..., Run], undisturbed: Callable[..., str]) -> None:
    """All wait at their end: before the release a frozen node is replaced, after it nothing is recovered any more."""
    strikes = [Strike("a", "release", 2, "before"), Strike("c", "release", 3, "after")]
    expected = undisturbed()
    job = start(strikes, {"faults": [WORKER]}, slow="b")
    job.wait(lambda: job.frozen(0) and job.frozen(1), "a and c are frozen")
    recovered = "events/00000003.recovered"
    # c tells of the recovery beside the release, so it may have been frozen before it could: then its successor does.
    untold = set() if job.history.puts(recovered) else {recovered}
    since = job.wake("a")
    assert job.outcome_of(0) == "refused"
    job.let("pass.b")
    job.wait(lambda: job.history.puts("end"), "the end")
    job.wake("c")
    outcome = finish(job, expected, {0, 1, 3})
    assert job.history.names().count(recovered) == 1, "told once"
    # The others write down that c, which stays frozen, is lost.
    others = {"coordinator", "failure/3/0", "exited/3/1", "end", "rate"} | untold
    measured = {name for name in job.history.written(since) if name == "profile" or name.startswith("~measured/")}
    assert job.history.written(since) <= {"nodes/a", "job"} | others | measured
    assert "release/2" not in job.history.names() and job.history.names().count("release/3") == 1
    assert "training had ended" in job.history.puts("end")[0]["why"]
    ended_without_a_node(outcome, "abc")


def test_frozen_before_and_after_the_result(start: Callable[..., Run], undisturbed: Callable[..., str]) -> None:
    strikes = [Strike("a", "end", 0, "before"), Strike("c", "end", 0, "after")]
    expected = undisturbed()
    job = start(strikes, {"faults": [WORKER]}, slow="b")
    job.wait(lambda: job.frozen(0) and job.frozen(1), "a and c are frozen")
    assert job.agents.running["b"].wait(30) == 0
    since = job.wake("a")
    assert job.outcome_of(0) == "refused"
    job.wake("c")
    outcome = finish(job, expected, {3})
    assert job.history.written(since) == set() and job.history.left() == []
    ended_well(outcome, "abc")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Strike("c", "election", 0, "before", "kill"), Strike("d", "election", 0, "after")),
        (Strike("c", "election", 0, "before"), Strike("d", "election", 0, "after", "kill")),
    ],
    ids=["killed before, frozen after", "frozen before, killed after"],
)
def test_election(
    first: Strike, second: Strike, start: Callable[..., Run], undisturbed: Callable[..., str]
) -> None:
    """The coordinator is killed in a recovery, its successor before it is elected, and the next one after that. The
    frozen one of the two is the only node that is left for the slot, once it is woken."""
    lost_coordinator = Strike("a", "generation", 2, "before", "kill")
    expected = undisturbed()
    job = start([lost_coordinator, first, second], {"faults": [WORKER]}, nodes="abcd", slow="bd")
    job.wait(lambda: job.struck(1), f"{first}")
    job.let("pass.d")
    job.wait(lambda: job.struck(2), f"{second}")
    job.let("pass.b")
    job.wait(lambda: job.history.coordinator() == "b", "b coordinates")
    index = 1 if first.do == "freeze" else 2
    node = job.strikes[index].node
    job.wait(lambda: not job.history.is_here(node), f"{node} is given up")
    since = job.wake(node)
    assert job.outcome_of(index) == ("refused" if index == 1 else "applied")
    outcome = finish(job, expected, {0, 1, 3})
    assert not any(record["node_id"] == node for record in job.history.puts("coordinator", since))
    ended_well(outcome, "b" + node)


@pytest.mark.parametrize(("do", "when"), [("kill", "after"), ("freeze", "before")])
def test_generation_that_forgets_a_node(
    do: str, when: str, start: Callable[..., Run], undisturbed: Callable[..., str]
) -> None:
    """A node is killed, and its record goes in the transaction of the next generation. The coordinator is a spare."""
    orders, expected = ({}, undisturbed()) if do == "kill" else (SLOW, undisturbed(**LONG))
    strike = Strike("c", "generation", 2, when, do)
    job = start([strike], {**orders, "faults": [NODE]}, nodes="abcd", coordinator="c", slow="abd")
    for node in "abd":
        job.let(f"pass.{node}")
    if do == "freeze":
        job.wait(lambda: job.frozen(0), f"{strike}")
        job.wait(lambda: job.goes_on_without("c", but_for=2), "the others go on")
        job.wake_among_others("c")
        assert job.outcome_of(0) == "refused"
    outcome = finish(job, expected, {2, 3})
    assert outcome.exit_codes["b"] == -signal.SIGKILL
    ended_well(outcome, "ad" if do == "kill" else "acd")


def test_frozen_before_the_first_failure(start: Callable[..., Run], undisturbed: Callable[..., str]) -> None:
    expected = undisturbed(**LONG)
    job = start([], SLOW)
    job.wait(job.trains, "training")
    os.kill(job.pid("a"), signal.SIGSTOP)
    job.wait(lambda: job.is_stopped("a"), "a is frozen")
    job.kill_worker(3)
    job.wait(lambda: job.goes_on_without("a", but_for=2), "the others go on")
    job.wake_among_others("a")
    outcome = finish(job, expected, {0, 1, 3}, num_faults=0)
    ended_well(outcome, "abc")


def test_frozen_while_nothing_fails(start: Callable[..., Run], undisturbed: Callable[..., str]) -> None:
    """A spare that coordinates is frozen until its lease is over: nobody's training is touched."""
    expected = undisturbed(**LONG)
    job = start([], SLOW, coordinator="c", slow="ab")
    job.wait(job.trains, "training")
    os.kill(job.pid("c"), signal.SIGSTOP)
    for node in "ab":
        job.let(f"pass.{node}")
    job.wait(lambda: job.goes_on_without("c", but_for=1), "another takes over")
    job.wake_among_others("c")
    outcome = finish(job, expected, set(), num_faults=0)
    assert len(job.history.puts("generation")) == 1
    ended_well(outcome, "abc")
