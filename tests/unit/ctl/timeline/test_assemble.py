"""From chapters to a timeline: who did what when, which incidents there were, what they cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swift_agent.ctl.timeline import model, words
from swift_agent.ctl.timeline.assemble import MOST_LANES, MOST_ROWS, Chapter, Known, assemble, title_of
from swift_agent.ctl.timeline.model import Loss, Piece, Point, Timeline, steps_of
from swift_recovery.planning.plan import Plan
from tests.support.timelines import T, copied, known


def lane(timeline: Timeline, node: str, rank: int) -> list[tuple[float, float, str]]:
    row = next(row for row in timeline.rows if row.node == node)
    pieces = next(lane.pieces for lane in row.lanes if lane.rank == rank)
    return [(piece.begin_s - T, piece.end_s - T, piece.state) for piece in pieces]


def test_what_each_rank_did() -> None:
    timeline = assemble(known())
    assert [row.node for row in timeline.rows] == ["a", "c", "b"]
    assert lane(timeline, "a", 0) == [
        (0, 10, "starts"), (10, 100, "trains"), (100, 102, "waits"), (102, 200, "trains")
    ]  # fmt: skip
    assert lane(timeline, "b", 3) == [
        (0, 10, "starts"), (10, 100, "trains"), (100.5, 102, "starts"), (102, 200, "trains"), (200, 205, "waits"),
        (205, 300, "trains"),
    ]  # fmt: skip
    assert lane(timeline, "c", 1) == [(201, 205, "starts"), (205, 300, "trains")]
    a, c, b = timeline.rows
    assert c.spare == (Piece(T + 50, T + 201, "spare"),) and not a.spare and not b.spare
    assert [(one.at_s - T, one.ranks) for one in b.lost] == [(100, (3,))] and not b.until
    assert [(one.at_s - T, one.ranks) for one in a.lost] == [(200, ())] and a.until == "lost: its connection was closed"


def test_incidents_and_what_they_cost() -> None:
    timeline = assemble(known())
    worker, node = timeline.incidents
    assert (worker.title, node.title) == ("rank 3 on b lost", "node a lost")
    assert (worker.stalled_s, worker.cost_rank_s, worker.lost_iterations) == (2.0, 8.0, 0)
    assert (node.stalled_s, node.cost_rank_s, node.takers) == (5.0, 20.0, ((0, "a", "c"),))
    assert timeline.stalled_s == 7.0 and timeline.cost_rank_s == 28.0
    assert timeline.goodput == pytest.approx(1 - 7 / 300) and timeline.usual_per_s == pytest.approx(2.0)
    assert worker.way == "state of a replica" and model.mean_recovery_s(timeline) == 3.5


def test_the_speed_is_nothing_while_the_job_stands_and_as_usual_beside_that() -> None:
    timeline = assemble(known())
    at = {step.begin_s - T: step.per_s for step in timeline.steps(T + 90, T + 115)}
    assert at[100] == 0.0 and at[110.5] == pytest.approx(2.0)
    joined = timeline.steps(T, T + 300, 10.0)
    assert len(joined) < 40 and next(step for step in joined if step.begin_s == T + 200).end_s == T + 205


def test_all_that_begin_with_an_older_state_lose_iterations() -> None:
    chapters = known().chapters
    again = replace(chapters[1], mode="restart", plan=Plan("restart", "no copy"), iteration=151, losses=())
    timeline = assemble(known(chapters=(chapters[0], again), points=tuple(Point(T + i, i) for i in range(100))))
    # Of 99 that were begun... none: iteration 150 would be ahead of them. With 51 there are 49.
    assert timeline.incidents[0].lost_iterations == 0
    again = replace(again, iteration=51)
    timeline = assemble(known(chapters=(chapters[0], again), points=tuple(Point(T + i, i) for i in range(100))))
    assert timeline.incidents[0].lost_iterations == 49
    assert timeline.repeated_s == pytest.approx(49.0) and timeline.goodput == pytest.approx(1 - (2 + 49) / 300)
    unknown = assemble(known(chapters=(chapters[0], again), points=()))
    assert unknown.incidents[0].lost_iterations is None and unknown.repeated_s is None


def test_one_that_is_cut_by_another_goes_over_into_it() -> None:
    chapters = known().chapters
    cut = replace(chapters[1], resumed_s=None, iteration=None, phases_s={}, plan=None)
    after = replace(chapters[2], failed_s=T + 103, begin_s=T + 104, resumed_s=T + 108)
    timeline = assemble(known(chapters=(chapters[0], cut, after)))
    assert [(one.failed_s - T, one.until_s - T) for one in timeline.incidents] == [(100, 103), (103, 108)]
    assert timeline.stalled_s == 8.0 and timeline.incidents[0].lost_iterations == 0
    overlapping = replace(after, failed_s=T + 101)
    assert assemble(known(chapters=(chapters[0], replace(cut, resumed_s=T + 102), overlapping))).stalled_s == 8.0


def test_of_a_script_that_tells_nothing_the_end_of_a_restart_is_not_known() -> None:
    chapters = known().chapters
    again = replace(chapters[1], mode="restart", plan=None, resumed_s=None, iteration=None, phases_s={})
    timeline = assemble(known(chapters=(chapters[0], again), points=(), tracked=False))
    (incident,) = timeline.incidents
    assert incident.untold and incident.stalled_s == 0.5 and incident.lost_iterations is None
    assert words.outcome(incident, timeline).startswith("when all trained again is not known")
    assert words.goodput(timeline) == "at most 99.8 %" and lane(timeline, "b", 2)[-1] == (100.5, 300, "trains")


def test_a_loss_that_is_not_answered_yet() -> None:
    loss = Loss(1, "b", "node", (), "silent")
    timeline = assemble(known(failing_s=T + 290, failing=(loss,), state="recovering"))
    last = timeline.incidents[-1]
    assert (last.generation, last.title, last.resumed_s, last.stalled_s) == (4, "node b lost", None, 10.0)
    assert lane(timeline, "b", 2)[-1] == (205, 290, "trains") and lane(timeline, "c", 0)[-1] == (290, 300, "waits")


def test_a_drained_node_and_a_job_that_has_not_begun() -> None:
    chapters = known().chapters
    drained = replace(chapters[2], handover=(0,), losses=())
    timeline = assemble(known(chapters=(chapters[0], drained)))
    assert timeline.incidents[0].title == "node a drained, c takes its place"
    assert timeline.rows[0].until == "drained; c has its place" and not timeline.rows[0].lost
    nothing = assemble(Known("gpt", "a test", "starting", T))
    assert nothing.goodput is None and not nothing.rows and not nothing.incidents


@pytest.mark.parametrize(("chapter", "title"), [
    (Chapter(2, "resize", nodes=("a", "b", "c")), "the job goes on with 3 nodes"),
    (Chapter(2, "restart"), "all workers start again"),
    (Chapter(2, "restart", losses=(Loss(0, "a", "restart", (), "x"),)), "workers cannot go on in place"),
    (Chapter(2, "replace", losses=(Loss(0, "a", "again", (), "x"),)), "processes are connected again"),
    (Chapter(2, "replace", losses=tuple(Loss(i, f"n{i}", "node", (), "x") for i in range(5))), "5 nodes lost"),
    (Chapter(2, "replace"), "something is lost"),
])  # fmt: skip
def test_titles(chapter: Chapter, title: str) -> None:
    assert title_of(chapter) == title


def test_a_large_job_is_drawn_in_part() -> None:
    names = tuple(f"n{i}" for i in range(200))
    moved = {150: ("n150", "s")}
    chapters = (
        Chapter(1, "start", "", T, names, (8,) * 200),
        Chapter(2, "replace", "", T + 10, (*names[:150], "s", *names[151:]), (8,) * 200, moved, failed_s=T + 9,
                losses=(Loss(150, "n150", "node", (), "x"),), resumed_s=T + 12),
    )  # fmt: skip
    timeline = assemble(Known("gpt", "a test", "training", T + 20, chapters))
    assert len(timeline.rows) == MOST_ROWS and timeline.num_hidden == 201 - MOST_ROWS
    assert {"n150", "s", "n0"} <= {row.node for row in timeline.rows}
    assert sum(len(row.lanes) for row in timeline.rows) <= MOST_LANES
    assert timeline.rows[0].ranks == tuple(range(8))


def test_steps_end_where_iterations_go_back() -> None:
    points = [Point(0, 0), Point(1, 10), Point(2, 4), Point(3, 8)]
    assert [(step.begin_s, step.per_s) for step in steps_of(points, [])] == [(0, 10.0), (2, 4.0)]
    assert steps_of([], []) == () and steps_of(points[:1], []) == ()


def test_as_json() -> None:
    found = json.loads(json.dumps(model.to_json(assemble(known()))))
    assert [one["generation"] for one in found["incidents"]] == [2, 3]
    assert found["incidents"][1]["losses"][0]["node"] == "a" and found["incidents"][0]["phases_ms"]["total"] == 2000
    assert [row["node"] for row in found["nodes"]] == ["a", "c", "b"] and len(found["points"]) > 500


def test_ways() -> None:
    incident = assemble(known()).incidents[0]
    for plan, said in (
        (Plan("restart", "w"), "newest checkpoint"), (Plan("fresh", "w"), "set themselves up"),
        (replace(copied(3, {}), replays=(1,)), "message logs"), (replace(copied(3, {}), handovers=(1,)), "hands its"),
        (replace(copied(3, {}), loads=(1,)), "files of the nodes"), (copied(3, {}), "hold the state already"),
        (None, "not known"),
    ):  # fmt: skip
        assert said in replace(incident, plan=plan).way
