"""What the history says of a generation, beside its reason."""

from __future__ import annotations

from dataclasses import replace

from swift_rendezvous.roster.losses import MAX_EVIDENCE, MAX_SAID, MAX_TOLD, changes_of
from swift_rendezvous.roster.records import FailureRecord
from swift_rendezvous.roster.view import View
from tests.support.records import failure, generation, view


def test_a_lost_node_gives_its_slot_to_another() -> None:
    before = view(failures={1: failure("node", 1)})
    told = changes_of(before, generation(2, "replace", ("n0", "n2")))
    assert told["moved"] == {"1": ["n1", "n2"]} and (told["slots"], told["world_size"]) == (2, 4)
    assert told["lost"] == {"1": {"kind": "node", "local_ranks": [], "evidence": "evidence node 1"}}


def test_a_lost_worker_moves_nothing_and_the_first_generation_has_nothing_before_it() -> None:
    told = changes_of(view(failures={0: failure("workers", 0, (1,))}), generation(2, "replace"))
    assert told["moved"] == {} and told["lost"]["0"]["local_ranks"] == [1]
    assert changes_of(View(), generation()) == {"slots": 2, "world_size": 4, "moved": {}, "lost": {}}


def test_what_the_first_worker_that_failed_has_left_is_kept() -> None:
    def failed(slot: int, message: str, when_s: int) -> FailureRecord:
        made = failure("workers", slot, (0,), when_s=when_s)
        return replace(made, exits=tuple(replace(one, message=message) for one in made.exits))

    failures = {0: failed(0, "a victim", 5), 1: failed(1, "x" * 5000 + "\nValueError: it", 4)}
    told = changes_of(view(failures=failures, told={1: 10, 0: 11}), generation(2, "replace"))
    (said,) = told["said"]
    assert (said["rank"], said["host"]) == (2, "n1")
    assert len(said["message"]) == MAX_SAID and said["message"].endswith("ValueError: it")


def test_a_job_that_changes_its_size() -> None:
    assert changes_of(view(), generation(2, "resize", ("n0", "n1", "n2")))["moved"] == {"2": ["", "n2"]}
    assert changes_of(view(), generation(2, "resize", ("n0",)))["moved"] == {"1": ["n1", ""]}


def test_many_losses_and_long_evidence_are_cut() -> None:
    many: dict[int, FailureRecord] = {slot: replace(failure("node", slot), evidence="x" * 999) for slot in range(200)}
    lost = changes_of(view(failures=many), generation(2, "replace"))["lost"]
    assert len(lost) == MAX_TOLD and {len(one["evidence"]) for one in lost.values()} == {MAX_EVIDENCE}
