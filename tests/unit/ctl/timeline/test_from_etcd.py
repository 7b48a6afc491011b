"""From the records of a job to its past: rosters from the newest back, times, and what cannot be known."""

from __future__ import annotations

from typing import Any

from swift_agent.ctl.timeline.assemble import assemble
from swift_agent.ctl.timeline.from_etcd import paces, read
from swift_rendezvous.codec import encode
from swift_rendezvous.node.registration import enter_job
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import changes_of
from swift_rendezvous.roster.records import (
    EventRecord,
    GenerationRecord,
    JobRecord,
    ProfileRecord,
    RateRecord,
    ResultRecord,
)
from swift_rendezvous.roster.view import View
from tests.support import records
from tests.support.memory_store import MemoryStore
from tests.support.timelines import T, copied

KEYS = Keys("gpt")


class Past:
    """A job as its coordinators have written it down."""

    def __init__(self, *names: str) -> None:
        self.store, self.view = MemoryStore(), View()
        self.entries = {name: self.enter(name) for name in names}

    def enter(self, name: str) -> Any:
        return enter_job(self.store, KEYS, JobRecord(2, 2, "command", 1), records.node(name), 60)

    def generation(self, after_s: float, made: GenerationRecord, details: bool = True, **failures: Any) -> None:
        self.view = View(generation=self.view.generation, failures=failures.get("failures", {}))
        told = changes_of(self.view, made) if details else {}
        event = EventRecord(made.number, f"generation ({made.mode})", made.why, T + after_s, told)
        self.store.put(KEYS.event(made.number), encode(event))
        self.store.put(KEYS.generation, encode(made))
        self.view = View(generation=made)

    def recovered(self, after_s: float, number: int, iteration: int, total_s: float) -> None:
        details = {"phases_s": {"agree": 0.5, "total": total_s}, "iteration": iteration, "predicted_s": 1.5,
                   "plan": copied(iteration - 1, {3: 1}).to_json()}  # fmt: skip
        self.store.put(KEYS.recovery(number), encode(EventRecord(number, "recovered", "w", T + after_s, details)))

    def pace(self, number: int, began_s: dict[int, float]) -> None:
        record = RateRecord(max(began_s) + 1, 2.0, number, T + max(began_s.values()), {
            iteration: T + at_s for iteration, at_s in began_s.items()
        })  # fmt: skip
        self.store.put(KEYS.pace(number), encode(record))

    def read(self, after_s: float) -> Any:
        return read("gpt", self.store.get_prefix(KEYS.prefix)[0], T + after_s)


def a_past() -> Past:
    """As `timelines.known` has it, and a fourth generation: n0 is drained, n3 takes its place."""
    past = Past("n0", "n1")
    past.generation(0, records.generation())
    past.pace(1, {0: 10.0, 170: 95.0})
    past.enter("n2")
    past.generation(100.5, records.generation(2, "replace"), failures={1: records.failure("workers", 1, (1,))})
    past.recovered(102, 2, 182, 2.0)
    past.pace(2, {182: 102.5, 376: 199.5})
    past.generation(201, records.generation(3, "replace", ("n0", "n2")), failures={1: records.failure("node", 1)})
    past.store.delete(KEYS.node("n1"))
    past.recovered(205, 3, 379, 5.0)
    past.enter("n3")
    past.generation(250, records.generation(4, "replace", ("n3", "n2")))
    past.recovered(251, 4, 470, 1.0)
    return past


def test_the_rosters_from_the_newest_back() -> None:
    known = a_past().read(300)
    assert [chapter.nodes for chapter in known.chapters] == [
        ("n0", "n1"), ("n0", "n1"), ("n0", "n2"), ("n3", "n2")
    ]  # fmt: skip
    assert {chapter.workers for chapter in known.chapters} == {(2, 2)}
    worker, node, drain = assemble(known).incidents
    assert (worker.title, node.title) == ("rank 3 on n1 lost", "node n1 lost")
    assert drain.title == "node n0 drained, n3 takes its place"
    assert (worker.failed_s - T, worker.stalled_s, worker.iteration, worker.predicted_s) == (100, 2.0, 182, 1.5)
    assert worker.plan is not None and worker.plan.sources == {3: 1}
    assert known.chapters[1].new == {1: (1,)} and known.chapters[3].handover == (0,)


def test_when_iterations_began() -> None:
    past = a_past()
    points = past.read(300).points
    assert [(point.at_s - T, point.iteration) for point in points] == [(10, 0), (95, 170), (102.5, 182), (199.5, 376)]
    past.store.put(KEYS.pace(3), b"garbage")
    past.store.put(KEYS.pace(4), encode(RateRecord(12, 2.0, 4, T + 280)))
    assert paces("gpt", past.store.get_prefix(KEYS.prefix)[0])[-1].iteration == 11
    assert len(past.read(300).points) == 5


def test_when_nodes_came() -> None:
    known = a_past().read(300)
    came = {presence.node: presence.begin_s - T for presence in known.presences}
    # Who came after the recovery was written, came after that.
    assert came == {"n0": 0, "n2": 0, "n3": 205}
    assert any("spare" in note for note in known.notes)


def test_records_of_another_version_and_what_is_missing() -> None:
    past = Past("n0", "n1")
    past.generation(0, records.generation(5), details=False)
    past.store.put(KEYS.event(6), b'{"v": 999}')
    known = past.read(10)
    assert known.chapters[0].nodes == ("n0", "n1")
    told = ("cannot be read", "before 5", "swift_agent.init()")
    assert len(known.notes) == 3 and all(any(part in note for note in known.notes) for part in told)
    odd = {"moved": {"x": 1, "0": ["a"], "1": ["a", "b"]}, "lost": {"0": 3, "1": {"local_ranks": "x"}, "y": {}}}
    past.store.put(KEYS.event(5), encode(EventRecord(5, "generation (replace)", "w", T, odd)))
    chapter = past.read(10).chapters[0]
    assert chapter.moved == {1: ("a", "b")} and [loss.slot for loss in chapter.losses] == [1]
    past.store.delete(KEYS.generation)
    assert any("is not known" in note for note in past.read(10).notes)
    nothing = read("gpt", [], T)
    assert not nothing.chapters and assemble(nothing).elapsed_s == 0


def test_a_loss_now_and_the_end_of_a_job() -> None:
    past = a_past()
    past.store.put(KEYS.failure(4, 0), encode(records.failure("workers", 0, (1,), name="n3")))
    timeline = assemble(past.read(300))
    assert timeline.incidents[-1].title == "rank 1 on n3 lost" and timeline.state == "recovering"
    past.store.put(KEYS.profile, encode(ProfileRecord({}, ("measured: x",), "replica")))
    past.store.put(KEYS.result, encode(ResultRecord("failed", "no more")))
    known = past.read(900)
    assert (known.state, known.why, known.end_s - T, known.strategy) == ("failed", "no more", 251, ("measured: x",))
    assert known.failing_s is None and any("When the job ended" in note for note in known.notes)


def test_a_job_that_grew() -> None:
    past = Past("n0", "n1")
    past.generation(0, records.generation(slots=("n0",)))
    past.generation(50, records.generation(2, "resize", ("n0", "n1")))
    known = past.read(60)
    assert [chapter.nodes for chapter in known.chapters] == [("n0",), ("n0", "n1")]
    assert known.chapters[1].handover == () and assemble(known).incidents[0].title == "the job goes on with 2 nodes"
