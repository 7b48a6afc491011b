"""One table of records: what is derived from it is complete."""

from __future__ import annotations

import inspect
from dataclasses import fields

from swift_rendezvous.codec import encode
from swift_rendezvous.node import coordinator, registration
from swift_rendezvous.roster import kinds
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import GenerationRecord, Owner
from swift_rendezvous.roster.view import Change, View, apply
from swift_rendezvous.store.kv import Delete, DeletePrefix, Op

KEYS = Keys("j")
BELOW = (*kinds.PER_JOB, *kinds.PER_NODE, *kinds.PER_GENERATION, *kinds.PER_SLOT)
# What a view has beside records: where they stand, in which order they came, what was read last.
BESIDE = {
    "revision", "job_created", "joined", "generation_revision", "coordinator_revision", "told", "recovered", "begun",
    "damaged",
}  # fmt: skip


def test_a_view_has_a_field_for_each_kind_and_no_other() -> None:
    assert {kind.attribute for kind in BELOW} | BESIDE == {field.name for field in fields(View)}
    assert len({kind.name for kind in BELOW}) == len({kind.attribute for kind in BELOW}) == len(BELOW)


BESIDE_VIEWS = {kinds.HISTORY, kinds.PACE, kinds.FAULTS, kinds.FAULT_ANSWERS}


def test_every_key_that_keys_can_make_is_of_a_kind() -> None:
    """`Keys.finished(3, 1)` is "~finished/3/1"."""
    made = {kinds.HISTORY, kinds.PACE}  # the others are properties
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in ("prefix", "job_id", "for_coordinator", "for_members"):
            continue
        if isinstance(member, property):
            made.add(getattr(KEYS, name)[len(KEYS.prefix) :].rstrip("/"))
        elif not name.startswith("of_"):
            given = [3, 1] if "slot" in inspect.signature(member).parameters else [3]
            parts = member(KEYS, *given)[len(KEYS.prefix) :].split("/")
            made.add(parts[0])
            rows = {2: kinds.PER_GENERATION, 3: kinds.PER_SLOT}.get(len(parts), ())
            is_of_node = parts[0] in {kind.name for kind in kinds.PER_NODE} | BESIDE_VIEWS
            assert is_of_node or parts[0] in {kind.name for kind in rows}, name
    assert made == {kind.name for kind in BELOW} | BESIDE_VIEWS


def touched(ops: list[Op]) -> set[str]:
    assert all(isinstance(op, (Delete, DeletePrefix)) for op in ops)
    return {op.key if isinstance(op, Delete) else op.prefix for op in ops if isinstance(op, (Delete, DeletePrefix))}


def test_what_belongs_to_a_generation_is_removed_behind_it() -> None:
    swept = touched(coordinator.Coordinator._sweep(Bare(), 3))  # type: ignore[arg-type]
    assert swept == {"/swift/j/" + key for key in (
        "failure/3/", "~progress/3/", "~resumed/3/", "~finished/3/", "exited/3/", "~position/3/", "~parked/3/",
        "~handover/3/", "taken/3/", "~measured/3/", "store/3", "plan/3", "release/3", "pause/3",
    )}  # fmt: skip


class Bare:
    """A coordinator, reduced to its keys."""

    _keys = KEYS


def test_of_a_job_that_has_ended_nothing_is_left_but_its_nodes() -> None:
    removed = touched(registration._all_but_nodes(KEYS))
    for kind in BELOW:
        key = f"{KEYS.prefix}{kind.name}"
        is_removed = any(key == one or f"{key}/".startswith(one) for one in removed)
        assert is_removed is (kind is not kinds.NODES), kind.name
    assert KEYS.events in removed and KEYS.for_coordinator in removed


def test_a_newer_generation_has_nothing_of_the_older_but_the_rest_stays() -> None:
    owner = Owner("a", "1", "host")
    view = apply(View(), KEYS, Change(KEYS.generation, encode(GenerationRecord(1, "start", (owner,), 1, 0, "w")), 5))
    assert view.number == 1 and not view.damaged
    marks: dict[str, object] = {kind.attribute: {0: kind.name} for kind in kinds.PER_SLOT}
    marks |= {kind.attribute: kind.name for kind in kinds.PER_GENERATION} | {"told": {0: 7}, "tracked": True}
    for name, mark in marks.items():
        object.__setattr__(view, name, mark)
    view = apply(view, KEYS, Change(KEYS.generation, encode(GenerationRecord(2, "start", (owner,), 1, 0, "w")), 6))
    assert view.number == 2 and view.tracked and not view.told
    for kind in (*kinds.PER_SLOT, *kinds.PER_GENERATION):
        assert getattr(view, kind.attribute) == getattr(View(), kind.attribute), kind.name
