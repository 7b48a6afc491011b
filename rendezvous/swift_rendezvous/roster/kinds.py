"""Every kind of record that a job keeps in etcd, one row each: its name in the keys, where a `View` has it, how it is
read. Pure.

From these rows follow what a view reads and forgets with a generation, what the coordinator removes behind it, and what
is left to remove of a job that has ended. A new record needs its class in `records`, a row here, a field in `View` and
its key in `Keys`; the tests name the one that is missing. This module must never know what a record means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    DrainRecord,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    GenerationRecord,
    JobRecord,
    KernelsRecord,
    MeasuredRecord,
    NodeRecord,
    ParkedRecord,
    PauseRecord,
    PlanRecord,
    PositionRecord,
    ProfileRecord,
    ProgressRecord,
    RateRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
    TakenRecord,
)


@dataclass(frozen=True)
class Kind:
    """*name*: the first part of its keys. *attribute*: of `View`. *read*: the record that is stored as those bytes;
    raises `RecordError`."""

    name: str
    attribute: str
    read: Callable[[bytes], Any]


def _is_there(value: bytes) -> bool:
    """Of what says all by being there."""
    return True


def _names(value: bytes) -> tuple[str, ...]:
    try:
        return tuple(value.decode().split(",")) if value else ()
    except UnicodeDecodeError as error:
        raise RecordError(f"no text: {error}") from None


def _kind(name: str, attribute: str, record: type[Any]) -> Kind:
    return Kind(name, attribute, functools.partial(decode, record))


PER_JOB = (
    _kind("job", "job", JobRecord),
    _kind("generation", "generation", GenerationRecord),
    _kind("coordinator", "coordinator", CoordinatorRecord),
    Kind("tracked", "tracked", _is_there),
    Kind("preload", "preload", _names),
    _kind("kernels", "kernels", KernelsRecord),
    _kind("end", "result", ResultRecord),
    _kind("rate", "rate", RateRecord),
    _kind("profile", "profile", ProfileRecord),
)
# Below them are names of nodes.
NODES = _kind("nodes", "nodes", NodeRecord)
PER_NODE = (NODES, _kind("drain", "drains", DrainRecord))
# Below them are numbers of generations.
PER_GENERATION = (
    _kind("store", "store", StoreRecord),
    _kind("plan", "plan", PlanRecord),
    Kind("release", "released", _is_there),
    _kind("pause", "pause", PauseRecord),
)
# And below those numbers of slots. "~": see `Keys.for_coordinator`.
PER_SLOT = (
    _kind("failure", "failures", FailureRecord),
    _kind("~progress", "progress", ProgressRecord),
    _kind("~resumed", "resumed", ResumedRecord),
    _kind("~finished", "finished", FinishedRecord),
    _kind("exited", "exited", ExitedRecord),
    _kind("~position", "positions", PositionRecord),
    _kind("~parked", "parked", ParkedRecord),
    _kind("~handover", "handovers", ProgressRecord),
    _kind("taken", "taken", TakenRecord),
    _kind("~measured", "measured", MeasuredRecord),
)
# Read by people; of them a view has the last numbers.
HISTORY = "events"
# Faults that a person orders, and what became of them: of no view, and removed with the job.
FAULTS, FAULT_ANSWERS = "inject", "injected"
# The same, but a view has nothing of them.
PACE = "~pace"
