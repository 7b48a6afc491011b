"""Records of a small job, with names that say what they are: node `n0` in its first life is the incarnation `n0.1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    FailureKind,
    FailureRecord,
    GenerationMode,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    Owner,
    PlanRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import View


def node(name: str, life: int = 1, *, port: int = 1000, workers: int = 2) -> NodeRecord:
    return NodeRecord(name, f"{name}.{life}", "127.0.0.1", port, workers, "command")


def owner(name: str, life: int = 1) -> Owner:
    return Owner(name, f"{name}.{life}", "127.0.0.1")


def generation(
    number: int = 1,
    mode: GenerationMode = "start",
    slots: Sequence[str] = ("n0", "n1"),
    *,
    workers: int = 2,
    epoch: int = 1,
    lost: dict[int, tuple[int, ...]] | None = None,
    num_restarts: int = 0,
    store_slot: int = 0,
    handover: dict[int, Owner] | None = None,
) -> GenerationRecord:
    return GenerationRecord(number, mode, tuple(owner(name) for name in slots), workers, store_slot,
                            f"generation {number}", epoch, lost or {}, num_restarts, handover or {})


def failure(
    kind: FailureKind, slot: int, ranks: tuple[int, ...] = (), *, left: int = 1, name: str | None = None,
    when_s: int = 0,
) -> FailureRecord:
    name = name or f"n{slot}"
    exits = tuple(WorkerExit(slot * 2 + r, r, 100 + r, -9, name, timestamp_s=when_s) for r in ranks)
    return FailureRecord(kind, slot, f"{name}.1", ranks, f"evidence {kind} {slot}", "n9", left, exits)


def view(**changes: Any) -> View:
    """A job of two nodes with two workers each in its first generation, coordinated by n0; *changes* override."""
    names = changes.pop("names", ("n0", "n1"))
    nodes = {name: node(name) for name in names}
    base: dict[str, Any] = {
        "job": JobRecord(2, 2, "command", 1),
        "nodes": nodes,
        "joined": {name: index + 1 for index, name in enumerate(names)},
        "generation": generation(),
        "generation_revision": 10,
        "coordinator": CoordinatorRecord("n0", "n0.1"),
        "coordinator_revision": 9,
        "tracked": True,
        "plan": PlanRecord(1, {"kind": "fresh"}, "begin"),
    }
    return View(**{**base, **changes})
