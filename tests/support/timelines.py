"""A made-up job with a past, for tests of what is shown of it."""

from __future__ import annotations

from typing import Any

from swift_agent.ctl.timeline.assemble import Chapter, Known, Presence
from swift_agent.ctl.timeline.model import Loss, Point
from swift_recovery.planning.plan import Plan

T = 1_700_000_000.0
"""When it began."""


def copied(iteration: int, sources: dict[int, int]) -> Plan:
    return Plan("copy", f"ranks {sorted(sources)} are new", iteration, sources=sources)


def known(names: tuple[str, str, str] = ("a", "b", "c"), **changes: Any) -> Known:
    """Two nodes of two ranks and a spare, two iterations per second. At 100 s rank 3 is lost, at 200 s node a, whose
    place the spare takes: 2 s and 5 s in which nobody trains."""
    a, b, c = names
    chapters = (
        Chapter(1, "start", "2 nodes are here", T, (a, b), (2, 2)),
        Chapter(
            2, "replace", "rank 3 was lost", T + 100.5, (a, b), (2, 2), new={1: (1,)}, failed_s=T + 100,
            losses=(Loss(1, b, "workers", (3,), "rank 3 killed by signal 9"),), resumed_s=T + 102, iteration=182,
            phases_s={"agree": 0.5, "plan": 0.1, "start": 1.0, "total": 2.0}, plan=copied(181, {3: 1}),
            predicted_s=1.5,
        ),
        Chapter(
            3, "replace", f"lost node {a}", T + 201, (c, b), (2, 2), moved={0: (a, c)}, failed_s=T + 200,
            losses=(Loss(0, a, "node", (), "its connection was closed"),), resumed_s=T + 205, iteration=379,
            phases_s={"agree": 1.0, "total": 5.0}, plan=copied(378, {0: 2, 1: 3}),
        ),
    )  # fmt: skip
    times = [10 + 0.5 * i for i in range(180)] + [102.5 + 0.5 * i for i in range(195)]
    times += [205.5 + 0.5 * i for i in range(180)]
    first = {0: 0, 180: 182, 375: 379}
    points, iteration = list[Point](), 0
    for index, after_s in enumerate(times):
        iteration = first.get(index, iteration + 1)
        points.append(Point(T + after_s, iteration))
    base: dict[str, Any] = {
        "job": "gpt", "source": "a test", "state": "training", "end_s": T + 300, "chapters": chapters,
        "presences": (Presence(b, T), Presence(c, T + 50)), "points": tuple(points), "notes": ("Nothing else.",),
    }  # fmt: skip
    return Known(**{**base, **changes})
