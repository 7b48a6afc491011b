"""Coordinators and watchers, with their threads, on one store: elections, takeovers amid any write, fencing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from swift_rendezvous.codec import decode, encode
from swift_rendezvous.node import coordinator
from swift_rendezvous.node.coordinator import Coordinator
from swift_rendezvous.node.watcher import JobWatcher
from swift_rendezvous.roster import draining
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    DrainRecord,
    ExitedRecord,
    FinishedRecord,
    GenerationRecord,
    JobRecord,
    PlanRecord,
    ProgressRecord,
    ResultRecord,
)
from swift_rendezvous.roster.view import View, view_of_entries
from swift_rendezvous.store.kv import Compare, KeyValueStore, Op, Put, StoreUnavailable, TransactionResult
from tests.support import records
from tests.support.etcd_cluster import wait_for
from tests.support.memory_store import MemoryStore
from tests.support.records import failure, generation, node

KEYS = Keys("job")


def planner(generation: GenerationRecord, view: View) -> PlanRecord:
    return PlanRecord(generation.number, {"slots": sorted(view.progress)}, f"plan {generation.number}")


class Tap:
    """One agent's way to the store: counts its transactions, and can be frozen or cut at any of them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.num_writes = 0
        self.cut_before = self.cut_after = 1 << 30
        self.open = threading.Event()
        self.open.set()
        self.frozen = threading.Event()
        self.outcomes: list[bool] = []
        self.drop_guards_of: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transaction(self, compare: Sequence[Compare], success: Sequence[Op],
                    failure: Sequence[Op] = ()) -> TransactionResult:
        if not self.open.is_set():
            self.frozen.set()
            self.open.wait(20.0)
        self.num_writes += 1
        if self.num_writes >= self.cut_before:
            raise StoreUnavailable("cut off")
        compare = [condition for condition in compare if condition.key != self.drop_guards_of]
        result = self._store.transaction(compare, success, failure)
        self.outcomes.append(result.succeeded)
        if self.num_writes >= self.cut_after:
            raise StoreUnavailable("cut off, the answer is lost")
        return result


class Agent:
    """The part of an agent that this room has: its record, its lease, a watcher and a coordinator."""

    def __init__(self, store: MemoryStore, name: str, rules: Rules, life: int = 1, deaf: bool = False) -> None:
        self.store, self.name, self.record = store, name, node(name, life)
        self.tap = Tap(store)
        self.lease = store.grant_lease(5)
        self.keeper = self.lease.keep_alive()
        store.put(KEYS.node(name), encode(self.record), self.lease.id)
        self.lines: list[str] = []
        way: KeyValueStore = self.tap
        self.coordinator = Coordinator(way, KEYS, self.record, self.lease.id, planner, rules, self.lines.append)
        self.views: list[View] = []
        self.watcher = JobWatcher(way, KEYS, self.see, self.record.incarnation)

    def see(self, view: View) -> None:
        # The watcher's thread may be faster with the second view than `start` with the first.
        if not self.views or view.revision >= self.views[-1].revision:
            self.views.append(view)
        self.coordinator.update(view)

    def start(self) -> None:
        self.coordinator.start()
        self.see(self.watcher.start())

    def stop(self) -> None:
        self.tap.open.set()
        self.watcher.stop()
        self.coordinator.stop()

    @property
    def acting(self) -> bool:
        return self.coordinator.acting


class Job:
    """*num_nodes* slots; agents beyond them are spares."""

    def __init__(self, names: Sequence[str], num_nodes: int = 2, rules: Rules = Rules(30.0)) -> None:  # noqa: B008
        self.store = MemoryStore()
        self.rules = rules
        self.store.put(KEYS.job, encode(JobRecord(num_nodes, 2, "command", 1)))
        self.store.put(KEYS.tracked, b"1")
        self.agents = {name: Agent(self.store, name, rules) for name in names}

    def start(self, *names: str) -> None:
        for name in names or self.agents:
            self.agents[name].start()

    def stop(self) -> None:
        for agent in self.agents.values():
            agent.stop()
        self.store.close()

    @property
    def generation(self) -> GenerationRecord | None:
        found = self.store.get(KEYS.generation)
        return decode(GenerationRecord, found.value) if found else None

    @property
    def holder(self) -> str | None:
        found = self.store.get(KEYS.coordinator)
        return decode(CoordinatorRecord, found.value).node_id if found else None

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 5.0) -> Any:
        return wait_for(condition, timeout_s, what)

    def wait_generation(self, number: int) -> GenerationRecord:
        found = self.wait(lambda: self.generation and self.generation.number >= number and self.generation,
                          f"generation {number}")
        assert isinstance(found, GenerationRecord)
        return found

    def fail(self, kind: Any, slot: int, ranks: tuple[int, ...] = (), name: str | None = None) -> None:
        current = self.generation
        assert current is not None
        self.store.put(KEYS.failure(current.number, slot), encode(failure(kind, slot, ranks, name=name)))

    def report(self) -> None:
        """What the agents would write on their way into a replaced generation."""
        current = self.generation
        assert current is not None
        for slot, owner in enumerate(current.slots):
            self.store.put(KEYS.progress(current.number, slot), encode(ProgressRecord(slot, owner.incarnation, ())))

    def content(self) -> dict[str, bytes]:
        return {kv.key: kv.value for kv in self.store.get_prefix(KEYS.prefix)[0]}


@pytest.fixture
def jobs() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*args: Any, **kwargs: Any) -> Job:
        made.append(Job(*args, **kwargs))
        return made[-1]

    yield make
    for job in made:
        job.stop()


def test_one_of_many_is_elected_and_begins_the_job(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1", "n2", "n3"])
    job.start()
    generation = job.wait_generation(1)
    assert [o.node_id for o in generation.slots] == ["n0", "n1"]
    job.wait(lambda: sum(agent.acting for agent in job.agents.values()) == 1, "one coordinator")
    plan = job.store.get(KEYS.plan(1))
    assert plan is not None and decode(PlanRecord, plan.value).why == "plan 1"
    job.wait(lambda: all(a.views and a.views[-1].plan for a in job.agents.values()), "all see the plan")


def test_a_whole_life(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1", "n2"])
    job.start()
    job.wait_generation(1)
    job.fail("workers", 1, (1,))
    assert job.wait_generation(2).lost == {1: (1,)}
    assert job.store.get(KEYS.plan(2)) is None and job.store.get(KEYS.failure(1, 1)) is None  # swept
    job.report()
    plan = job.wait(lambda: job.store.get(KEYS.plan(2)), "the plan")
    assert decode(PlanRecord, plan.value).content == {"slots": [0, 1]}
    for slot in range(2):
        job.store.put(KEYS.finished(2, slot), encode(FinishedRecord(slot, f"n{slot}.1")))
    job.wait(lambda: job.store.get(KEYS.release(2)), "the release")
    for slot in range(2):
        job.store.put(KEYS.exited(2, slot), encode(ExitedRecord(slot, f"n{slot}.1")))
    end = job.wait(lambda: job.store.get(KEYS.result), "the result")
    assert decode(ResultRecord, end.value).state == "succeeded"
    events = [kv.key for kv in job.store.get_prefix(KEYS.prefix + "events/")[0]]
    assert events == [KEYS.event(1), KEYS.event(2)]


def test_a_lost_coordinator_is_succeeded_without_waiting_for_its_lease(jobs: Callable[..., Job]) -> None:
    """The records prove it lost; virtual time stands still, so its lease never runs out here."""
    job = jobs(["n0", "n1", "n2"])
    job.start("n0")
    job.wait(lambda: job.holder == "n0", "n0 is coordinator")
    job.start("n1", "n2")
    job.wait_generation(1)
    job.agents["n0"].stop()
    job.fail("node", 0)
    generation = job.wait_generation(2)
    assert [o.node_id for o in generation.slots] == ["n2", "n1"] and job.holder in ("n1", "n2")
    job.wait(lambda: job.store.get(KEYS.node("n0")) is None, "n0 is forgotten")


@pytest.mark.parametrize("returns", [True, False])
def test_a_slot_is_kept_for_a_node_whose_lease_is_gone(returns: bool, jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1", "n2"], rules=Rules(30.0, return_s=1.0))
    job.start()
    job.wait_generation(1)
    lost = next(job.agents[name] for name in ("n0", "n1") if not job.agents[name].acting)
    lost.lease.revoke()
    gone_s = time.monotonic()
    job.wait(lambda: any("comes back by itself" in line for a in job.agents.values() for line in a.lines), "the wait")
    if returns:
        job.store.put(KEYS.node(lost.name), encode(lost.record))
        job.fail("workers", 0, (1,))
        assert lost.name in [owner.node_id for owner in job.wait_generation(2).slots]
    else:
        assert lost.name not in [owner.node_id for owner in job.wait_generation(2).slots]
        assert time.monotonic() - gone_s >= 1.0


def test_a_coordinator_that_is_lost_after_its_workers_have_exited_is_succeeded(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"])
    job.start("n0")
    job.wait(lambda: job.holder == "n0", "n0 is coordinator")
    job.start("n1")
    job.wait_generation(1)
    job.store.put(KEYS.release(1), b"1")
    job.store.put(KEYS.exited(1, 0), encode(ExitedRecord(0, "n0.1")))
    job.agents["n0"].stop()
    job.fail("node", 0)
    job.store.put(KEYS.exited(1, 1), encode(ExitedRecord(1, "n1.1")))
    end = job.wait(lambda: job.store.get(KEYS.result), "the result")
    assert decode(ResultRecord, end.value).state == "succeeded" and job.holder == "n1"


def test_a_lost_spare_that_was_coordinator_is_succeeded(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1", "n2"])
    job.start("n2")
    job.wait_generation(1)
    assert job.holder == "n2"
    job.start("n0", "n1")
    job.agents["n2"].stop()
    job.store.delete(KEYS.node("n2"))  # what an agent does that saw the spare die
    job.wait(lambda: job.holder in ("n0", "n1"), "another coordinator")


def test_a_coordinator_that_is_accused_and_alone_decides_itself(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"], rules=Rules(0.2))
    job.start("n0")
    job.wait_generation(1)
    job.agents["n1"].lease.revoke()
    job.fail("node", 0)
    end = job.wait(lambda: job.store.get(KEYS.result), "the result")
    assert decode(ResultRecord, end.value).state == "stopped"
    assert job.agents["n0"].tap.num_writes < 20  # and does not elect itself over and over


# Writes of n0 in the scenario: elect, generation 1, generation 2 (and forget n1), plan 2, generation 3, plan 3,
# release, result.
@pytest.mark.parametrize("lost_answer", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(1, 9))
def test_takeover_in_the_middle_of_any_write(jobs: Callable[..., Job], at: int, lost_answer: bool) -> None:
    job = jobs(["n0", "n1", "n2"])
    first = job.agents["n0"]
    if lost_answer:
        first.tap.cut_after = at
    else:
        first.tap.cut_before = at
    died = threading.Event()

    def die_when_cut() -> None:
        wait_for(lambda: first.tap.num_writes >= at or died.is_set(), 15.0, f"write {at}")
        first.coordinator.stop()
        # Its lease runs out; its node record is spared, to keep the scenario's roster.
        job.store.delete(KEYS.coordinator)

    undertaker = threading.Thread(target=die_when_cut)
    undertaker.start()
    try:
        job.start("n0")
        job.wait(lambda: job.holder == "n0" or first.tap.num_writes >= at, "n0 acts")
        job.start("n2")
        _scenario(job)
    finally:
        died.set()
        undertaker.join()
    assert first.tap.num_writes >= at, "the cut never came"


def test_only_the_last_generations_stay_in_the_history(
    jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "NUM_EVENTS_KEPT", 2)
    job = jobs(["n0", "n1"])
    job.start()
    for number in range(1, 5):
        job.wait_generation(number)
        job.store.put(KEYS.recovery(number), b"told")
        job.store.put(KEYS.pace(number), b"fast")
        if number < 4:
            job.report()
            job.wait(lambda n=number: job.store.get(KEYS.plan(n)), f"plan {number}")  # type: ignore[misc]
            job.fail("workers", 1, (1,))
    kept = [kv.key for kv in job.store.get_prefix(KEYS.prefix + "events/")[0]]
    assert kept == [key for number in (2, 3, 4) for key in (KEYS.event(number), KEYS.recovery(number))]
    assert [kv.key for kv in job.store.get_prefix(KEYS.paces)[0]] == [KEYS.pace(number) for number in (2, 3, 4)]


def _scenario(job: Job) -> None:
    assert [o.node_id for o in job.wait_generation(1).slots] == ["n0", "n1"]
    job.fail("node", 1)
    second = job.wait_generation(2)
    assert [o.node_id for o in second.slots] == ["n0", "n2"] and second.number == 2
    job.wait(lambda: job.store.get(KEYS.node("n1")) is None, "n1 is forgotten")
    job.report()
    job.wait(lambda: job.store.get(KEYS.plan(2)), "plan 2")
    job.fail("workers", 1, (0,), name="n2")
    third = job.wait_generation(3)
    assert third.number == 3 and third.lost == {1: (0,)}
    job.report()
    job.wait(lambda: job.store.get(KEYS.plan(3)), "plan 3")
    for slot in range(2):
        job.store.put(KEYS.finished(3, slot), encode(FinishedRecord(slot, "x")))
    job.wait(lambda: job.store.get(KEYS.release(3)), "the release")
    for slot in range(2):
        job.store.put(KEYS.exited(3, slot), encode(ExitedRecord(slot, "x")))
    end = job.wait(lambda: job.store.get(KEYS.result), "the result")
    assert decode(ResultRecord, end.value).state == "succeeded"
    assert [kv.key for kv in job.store.get_prefix(KEYS.prefix + "events/")[0]] == [KEYS.event(n) for n in (1, 2, 3)]


def _thaw_in_another_world(job: Job, guard_dropped: str | None) -> tuple[dict[str, bytes], dict[str, bytes], Agent]:
    """n0 is frozen in front of the write of generation 2; the others go on to 3; n0 comes back and goes on, too."""
    first = job.agents["n0"]
    first.tap.drop_guards_of = guard_dropped
    job.start("n0")
    job.wait(lambda: job.holder == "n0", "n0 is coordinator")
    job.wait_generation(1)
    first.tap.open.clear()
    job.fail("workers", 1, (0,))
    assert first.tap.frozen.wait(5.0)
    num_before = len(first.tap.outcomes)
    first.keeper.stop()
    first.lease.revoke()  # what etcd does when nothing is heard of it
    job.start("n1", "n2")
    assert [o.node_id for o in job.wait_generation(2).slots] == ["n2", "n1"]
    job.report()
    job.wait(lambda: job.store.get(KEYS.plan(2)), "plan 2")
    before = job.content()
    first.tap.open.set()
    job.wait(lambda: len(first.tap.outcomes) > num_before, "n0 writes on")
    job.wait(lambda: first.views[-1].number >= 2, "n0 sees what happened")
    first.coordinator.stop()  # ends after the step that it is in
    return before, job.content(), first


def test_a_frozen_coordinator_that_comes_back_writes_nothing(jobs: Callable[..., Job]) -> None:
    before, after, first = _thaw_in_another_world(jobs(["n0", "n1", "n2"]), None)
    assert after == before
    assert first.tap.outcomes[-1] is False


def test_the_test_of_the_frozen_coordinator_notices_a_missing_guard(jobs: Callable[..., Job], monkeypatch: Any) -> None:
    """Without the comparison of the generation and of the coordinator's key the same history goes wrong."""
    job = jobs(["n0", "n1", "n2"])
    original = Tap.transaction

    def unguarded(self: Tap, compare: Sequence[Compare], success: Sequence[Op],
                  failure: Sequence[Op] = ()) -> TransactionResult:
        if self is job.agents["n0"].tap:
            compare = [c for c in compare if c.key not in (KEYS.coordinator, KEYS.generation)]
        return original(self, compare, success, failure)

    monkeypatch.setattr(Tap, "transaction", unguarded)
    before, after, _ = _thaw_in_another_world(job, None)
    assert after != before


@pytest.mark.parametrize("dropped", [KEYS.coordinator, KEYS.generation])
def test_each_guard_alone_holds_back_a_stale_generation(jobs: Callable[..., Job], dropped: str) -> None:
    before, after, _ = _thaw_in_another_world(jobs(["n0", "n1", "n2"]), dropped)
    assert after[KEYS.generation] == before[KEYS.generation]


def test_a_release_that_is_out_holds_back_the_next_generation(jobs: Callable[..., Job]) -> None:
    """The coordinator released on a view that lacks a failure which is stored already; workers may have exited."""
    job = jobs(["n0", "n1"])
    agent = job.agents["n0"]
    job.start("n0")
    job.wait_generation(1)
    job.wait(lambda: agent.acting and agent.views[-1].plan is not None, "n0 acts")
    agent.watcher.stop()
    job.store.put(KEYS.release(1), b"1")
    job.fail("workers", 1, (0,))
    stale = agent.views[-1]
    seen = replace(stale, failures={1: failure("workers", 1, (0,))})  # not the release
    num_before = len(agent.tap.outcomes)
    agent.see(seen)
    job.wait(lambda: len(agent.tap.outcomes) > num_before, "the try")
    assert agent.tap.outcomes[-1] is False
    assert job.generation is not None and job.generation.number == 1


def test_a_drained_node_that_has_just_come_back_holds_back_the_next_generation(jobs: Callable[..., Job]) -> None:
    """It still has what it hands over; the coordinator has not seen yet that it is there."""
    job = jobs(["n0", "n1", "n2"])
    agent = job.agents["n1"]
    job.start("n1")
    job.wait_generation(1)
    job.wait(lambda: agent.acting and agent.views[-1].plan is not None, "n1 acts")
    agent.watcher.stop()
    first = agent.views[-1]
    handing = generation(2, "replace", ("n2", "n1"), lost={0: (0, 1)}, handover={0: records.owner("n0")})
    job.store.put(KEYS.generation, encode(handing))
    stored = job.store.get(KEYS.generation)
    assert stored is not None
    away = {name: one for name, one in first.nodes.items() if name != "n0"}
    for is_back in (True, False):
        if not is_back:
            job.store.delete(KEYS.node("n0"))
        num_before = len(agent.tap.outcomes)
        agent.see(replace(first, nodes=away, generation=handing, generation_revision=stored.mod_revision, plan=None,
                          revision=stored.mod_revision))  # fmt: skip
        job.wait(lambda: len(agent.tap.outcomes) > num_before, "the try")  # noqa: B023
        assert agent.tap.outcomes[-1] is not is_back


def test_waiting_for_a_node_ends_on_time(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"], rules=Rules(0.4))
    job.start("n0")
    job.wait_generation(1)
    began_s = time.monotonic()
    job.fail("node", 1)
    end = job.wait(lambda: job.store.get(KEYS.result), "the result")
    assert 0.35 <= time.monotonic() - began_s < 3.0
    assert decode(ResultRecord, end.value).state == "stopped"
    assert any("wait for a node" in line for line in job.agents["n0"].lines)


def test_a_node_in_time_ends_the_wait(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"], rules=Rules(30.0))
    job.start("n0")
    job.wait_generation(1)
    job.fail("node", 1)
    job.wait(lambda: any("wait for a node" in line for line in job.agents["n0"].lines), "the wait")
    job.agents["n5"] = Agent(job.store, "n5", job.rules)
    assert [o.node_id for o in job.wait_generation(2).slots] == ["n0", "n5"]


def test_decisions_wait_for_a_store_that_is_away(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"])
    agent = job.agents["n0"]
    job.start("n0")
    job.wait_generation(1)
    agent.tap.cut_before = agent.tap.num_writes + 1
    job.fail("workers", 1, (0,))
    job.wait(lambda: agent.tap.num_writes >= agent.tap.cut_before, "a try")
    agent.tap.cut_before = 1 << 30
    assert job.wait_generation(2).number == 2


def test_a_view_that_comes_late_is_not_acted_on(jobs: Callable[..., Job]) -> None:
    job = jobs(["n0", "n1"])
    agent = job.agents["n0"]
    job.start("n0")
    job.wait_generation(1)
    job.wait(lambda: agent.acting, "n0 acts")
    agent.watcher.stop()
    num_before = agent.tap.num_writes
    agent.coordinator.update(View(job=agent.views[-1].job, nodes=agent.views[-1].nodes, revision=1))  # would elect
    assert agent.acting
    agent.coordinator.stop()
    assert agent.tap.num_writes == num_before


# ---- the watcher ----


def test_a_watcher_outlives_compaction_and_unreadable_records() -> None:
    store = MemoryStore()
    store.put(KEYS.job, encode(JobRecord(2, 2, "command", 1)))
    views: list[View] = []
    watcher = JobWatcher(store, KEYS, views.append)
    first = watcher.start()
    assert first.job is not None and not first.tracked
    store.put(KEYS.node("bad"), b"{}")
    store.put(KEYS.tracked, b"1")
    wait_for(lambda: views and views[-1].tracked, 5.0, "the record after the unreadable one")
    assert "bad" not in views[-1].nodes
    watcher.stop()
    num_seen = len(views)
    store.put(KEYS.preload, b"late")
    assert len(views) == num_seen


STRANGE = {
    "drain/x": b"garbage", "nodes/x": b"garbage", "preload": b"\xff\xfe", "store/\u00b2": b"1", "rate": b'{"v":2}',
    "plan/" + "9" * 5000: b"1", "exited/1/0": b"[" * 100_000, "generation": b"garbage", "end": b"garbage",
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE, ids=[name[:12] for name in STRANGE])
def test_no_record_blinds_a_watcher_or_keeps_it_from_listing(name: str) -> None:
    store, views = MemoryStore(), list[View]()
    store.put(KEYS.job, encode(JobRecord(2, 2, "command", 1)))
    store.put(KEYS.generation, encode(generation(1)))
    watcher = JobWatcher(store, KEYS, views.append, "n0.1")
    watcher.start()
    store.put(KEYS.prefix + name, STRANGE[name])
    store.put(KEYS.failure(1, 1), encode(failure("node", 1)))
    wait_for(lambda: views and 1 in views[-1].failures, 5.0, "the failure after the strange record")
    # Who becomes coordinator needs the whole job and lists it again.
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    store.put(KEYS.progress(1, 1), encode(ProgressRecord(1, "n1.1", ())))
    wait_for(lambda: 1 in views[-1].progress and 1 in views[-1].failures, 5.0, "the view of a coordinator")
    assert views[-1].generation == generation(1)
    watcher.stop()
    new_node = JobWatcher(store, KEYS, views.append, "n9.1")
    assert new_node.start().job is not None
    new_node.stop()


@pytest.mark.parametrize(("name", "value"), [
    ("generation", None), ("generation", b"garbage"), ("coordinator", None), ("coordinator", b"garbage"),
    ("job", b"garbage"),
])  # fmt: skip
def test_what_the_job_cannot_do_without_is_written_again(
    jobs: Callable[..., Job], name: str, value: bytes | None
) -> None:
    job = jobs(["n0", "n1", "n2"])
    job.start("n0", "n1")
    before = job.wait_generation(1)
    job.wait(lambda: any(agent.acting for agent in job.agents.values()), "one acts")  # n0 or n1
    if value is None:
        job.store.delete(KEYS.prefix + name)
    else:
        job.store.put(KEYS.prefix + name, value)

    def mended() -> bool:
        found = job.store.get(KEYS.prefix + name)
        return found is not None and found.value not in (value, None)

    job.wait(mended, f"{name} again")
    if name == "generation":
        assert job.wait_generation(1) == before  # and not another first generation of other nodes
    job.fail("node", 1)
    after = job.wait_generation(2)
    assert after.slots[1].node_id == "n2" and after.slots[0] == before.slots[0]


def test_a_watcher_that_is_left_behind_lists_again() -> None:
    class Slow(MemoryStore):
        compacted = False

        def watch_prefix(self, prefix: str, start_revision: int | None = None, **options: Any) -> Any:
            if not self.compacted:
                self.compacted = True
                self.put(KEYS.tracked, b"1")
                self.put(KEYS.preload, b"numpy")
                self.compact(self.get_prefix("")[1])  # what the watch would have begun with is gone
            return super().watch_prefix(prefix, start_revision, **options)

    store = Slow()
    store.put(KEYS.node("n0"), encode(node("n0")))
    views: list[View] = []
    watcher = JobWatcher(store, KEYS, views.append)
    watcher.start()
    wait_for(lambda: views and views[-1].tracked and views[-1].preload == ("numpy",), 5.0, "the second listing")
    store.transaction([], [Put(KEYS.node("n1"), encode(node("n1")))])
    wait_for(lambda: "n1" in views[-1].nodes, 5.0, "what came after it")
    watcher.stop()


def test_while_a_job_forms_only_the_coordinator_hears_of_every_node() -> None:
    """The others list the nodes once they have a generation; what they are told then is whole."""
    store, views = MemoryStore(), dict[str, list[View]]()
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    watchers = {}
    for name in ("n0", "n1", "n2"):
        store.put(KEYS.node(name), encode(node(name)))
        seen = views[name] = []
        watchers[name] = JobWatcher(store, KEYS, seen.append, f"{name}.1")
        seen.append(watchers[name].start())
    wait_for(lambda: set(views["n0"][-1].nodes) == {"n0", "n1", "n2"}, 5.0, "the coordinator's view")
    store.put(KEYS.generation, encode(generation(1)))
    store.put(KEYS.node("n3"), encode(node("n3")))  # from here on all follow the nodes
    wait_for(lambda: all("n3" in seen[-1].nodes for seen in views.values()), 5.0, "a node after the generation")
    for watcher in watchers.values():
        watcher.stop()
    for name, known in (("n1", {"n0", "n1"}), ("n2", {"n0", "n1", "n2"})):
        before = [view for view in views[name] if view.generation is None]
        assert [set(view.nodes) for view in before] == [known]  # the first, and nothing else
        assert all({"n0", "n1", "n2"} <= set(view.nodes) for view in views[name][1:])


def test_a_coordinator_that_has_come_later_becomes_known() -> None:
    """While a job forms, too: its heartbeats are watched, and its order to leave is heard."""
    store, views = MemoryStore(), list[View]()
    store.put(KEYS.node("n0"), encode(node("n0")))
    watcher = JobWatcher(store, KEYS, views.append, "n0.1")
    watcher.start()
    store.put(KEYS.node("n1"), encode(node("n1")))
    store.put(KEYS.node("n2"), encode(node("n2")))
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n2", "n2.1")))
    wait_for(lambda: views and views[-1].coordinator is not None, 5.0, "the coordinator")
    assert set(views[-1].nodes) == {"n0", "n1", "n2"} and len(views) == 1
    store.put(KEYS.drain("n0"), encode(DrainRecord("n0", "n0.1", "w", 1.0)))
    wait_for(lambda: views[-1].drains, 5.0, "the order")
    watcher.stop()


def test_a_job_that_ends_before_it_has_begun_is_seen_to_end() -> None:
    store, views = MemoryStore(), list[View]()
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    watcher = JobWatcher(store, KEYS, views.append, "n1.1")
    watcher.start()
    store.put(KEYS.result, encode(ResultRecord("stopped", "enough")))
    wait_for(lambda: views and views[-1].result is not None, 5.0, "the end")
    watcher.stop()


def test_a_node_that_is_coordinator_before_it_has_looked_lists_all() -> None:
    store = MemoryStore()
    store.put(KEYS.generation, encode(generation(1)))
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    store.put(KEYS.progress(1, 0), encode(ProgressRecord(0, "n0.1", ())))
    watcher = JobWatcher(store, KEYS, lambda view: None, "n0.1")
    assert set(watcher.start().progress) == {0}
    watcher.stop()


def test_only_the_coordinator_sees_what_all_slots_write() -> None:
    """Another one takes over in the middle of a recovery: what it has not followed until then it gets by a listing."""
    store, views = MemoryStore(), dict[str, list[View]]()
    store.put(KEYS.generation, encode(generation(1, slots=("n0", "n1", "n2"))))
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    watchers = []
    for incarnation in ("n0.1", "n1.1", "n2.1"):
        seen = views[incarnation] = []
        watchers.append(JobWatcher(store, KEYS, seen.append, incarnation))
        watchers[-1].start()
    store.put(KEYS.progress(1, 0), encode(ProgressRecord(0, "n0.1", ())))
    store.put(KEYS.tracked, b"1")
    wait_for(lambda: all(seen and seen[-1].tracked for seen in views.values()), 5.0, "what all see")
    assert [set(views[name][-1].progress) for name in views] == [{0}, set(), set()]
    assert len(views["n1.1"]) == 1
    store.put(KEYS.progress(1, 1), encode(ProgressRecord(1, "n1.1", ())))
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n1", "n1.1")))
    wait_for(lambda: set(views["n1.1"][-1].progress) == {0, 1}, 5.0, "the listing of the new coordinator")
    store.put(KEYS.progress(1, 2), encode(ProgressRecord(2, "n2.1", ())))
    wait_for(lambda: set(views["n1.1"][-1].progress) == {0, 1, 2}, 5.0, "what came after it")
    revisions = [view.revision for view in views["n1.1"]]
    assert revisions == sorted(revisions)
    for watcher in watchers:
        watcher.stop()
    assert not any(view.progress for view in views["n2.1"])
    # It must not decide on what it had seen before: to it, all slots would be silent.
    assert all(view.progress for view in views["n1.1"] if view.coordinator and view.coordinator.node_id == "n1")


def test_a_watcher_that_ends_by_an_error_says_so() -> None:
    """Who watches no more looks alive and handles nothing."""
    store, told = MemoryStore(), list[str]()

    def fail(view: View) -> None:
        raise ZeroDivisionError("a defect")

    watcher = JobWatcher(store, KEYS, fail, None, told.append)
    watcher.start()
    store.put(KEYS.tracked, b"1")
    wait_for(lambda: told == ["its thread swift-job-watch has ended by ZeroDivisionError: a defect"], 5.0, "the reason")
    watcher.stop()


def test_hundreds_of_lost_nodes_fit_into_transactions_of_etcd() -> None:
    """At most 128 operations and comparisons each; nothing of a lost node is left when its slot is given away."""
    names = [f"n{number}" for number in range(320)]
    taken: list[tuple[int, int, bool]] = []

    class Counting(MemoryStore):
        def transaction(
            self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
        ) -> TransactionResult:
            makes = any(isinstance(op, Put) and op.key == KEYS.generation for op in success)
            taken.append((len(compare), len(success), makes))
            return super().transaction(compare, success, failure)

    store = Counting()
    first = generation(1, slots=names[:160])
    store.put(KEYS.job, encode(JobRecord(160, 2, "command", 1)))
    store.put(KEYS.tracked, b"1")
    for name in names:
        store.put(KEYS.node(name), encode(node(name)))
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    store.put(KEYS.generation, encode(first))
    for slot in range(1, 160):
        store.put(KEYS.failure(1, slot), encode(replace(failure("node", slot), is_dead=True)))
    taken.clear()
    one = Coordinator(store, KEYS, node("n0"), 0, planner, Rules(30.0), lambda line: None)
    one._step(view_of_entries(KEYS, store.get_prefix(KEYS.prefix)[0]))
    assert taken[-1][2] and max(max(sizes[:2]) for sizes in taken) <= 128
    found = view_of_entries(KEYS, store.get_prefix(KEYS.prefix)[0])
    assert found.number == 2 and set(found.nodes) == {"n0", *names[160:]}


def test_orders_to_leave_for_many_nodes_are_carried_out_in_turns() -> None:
    names = [f"n{number}" for number in range(200)]
    drains = {name: DrainRecord(name, f"{name}.1", "w", 0.0) for name in names[:100]}
    many = View(generation=generation(1, slots=names[:100]), drains=drains)
    assert len(draining.moves(many, [node(name) for name in names[100:]])) == draining.MOST_MOVES
