"""Which failures of a rank end a job without --max-restarts, and which restart all its workers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from swift_rendezvous.roster import setbacks
from swift_rendezvous.roster.records import Trouble, WorkerExit
from swift_rendezvous.roster.setbacks import PER_HOUR, RESTARTED, Verdict, judge

RAISED = "ValueError at train.py:31"


class Rank:
    """The failures of rank 1, one generation after another. The job goes on where it was unless told otherwise."""

    def __init__(self, counted: bool = False) -> None:
        self.troubles: tuple[Trouble, ...] = ()
        self.number, self.epoch, self.time_s, self.counted = 0, 1, 1000, counted

    def fails(
        self, at: int = -1, *, done: int = 0, begun: bool = True, code: int = -9, place: str = "", excused: bool = False
    ) -> Verdict:
        self.number += 1
        exit_ = WorkerExit(1, 1, 70 + self.number, code, "h", "", self.time_s, "", place, self.number, at, begun, done,
                           excused)  # fmt: skip
        verdict = judge(self.troubles, [exit_], self.epoch, counted=self.counted)
        self.troubles = verdict.troubles
        if verdict.restart:
            self.epoch = self.number + 1
        return verdict

    def in_set_up(self, code: int = 1, place: str = "", at: int = 20) -> Verdict:
        return self.fails(at, begun=False, code=code, place=place)

    @property
    def trouble(self) -> Trouble:
        (found,) = self.troubles
        return found


def goes_on(verdict: Verdict) -> bool:
    return not verdict.hopeless and not verdict.restart


def test_a_rank_that_advances_is_replaced_as_often_as_it_takes() -> None:
    rank = Rank()
    for number in range(PER_HOUR):
        assert goes_on(rank.fails(10 * number, done=10))
    assert len(rank.trouble.setbacks) == 1


@pytest.mark.parametrize(("first", "second", "third"), [(20, 20, 20), (20, 24, 29), (29, 29, 29)])
def test_three_within_ten_iterations(first: int, second: int, third: int) -> None:
    rank = Rank()
    assert goes_on(rank.fails(first, done=first))
    assert goes_on(rank.fails(second, done=second - first))
    verdict = rank.fails(third, done=third - second)
    assert "3 failures within 10 iterations" in verdict.hopeless[1] and verdict.movable == {1}


def test_three_within_more_than_ten_iterations_go_on() -> None:
    rank = Rank()
    assert all(goes_on(rank.fails(at, done=done)) for at, done in ((20, 20), (26, 6), (32, 6), (38, 6)))


def test_the_same_exception_twice_at_the_same_place() -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20, code=1, place=RAISED))
    verdict = rank.fails(20, code=1, place=RAISED)
    assert RAISED in verdict.hopeless[1] and not verdict.movable
    said = setbacks.describe(rank.trouble, verdict.hopeless[1])
    assert "(1) ValueError at train.py:31, in iteration 20 (pid 71 on h)" in said and "(2) " in said
    advice = setbacks.advice(rank.trouble).splitlines()
    assert [line.partition(":")[0] for line in advice] == ["tried since it last advanced", "safe", "to do"]
    assert "replaced in place once" in advice[0]


@pytest.mark.parametrize("second", ["ValueError at train.py:32", "KeyError at train.py:31", ""])
def test_another_exception_is_another_failure(second: str) -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20, code=1, place=RAISED))
    assert goes_on(rank.fails(20, code=1, place=second))


def test_the_same_exception_long_after_is_another_failure() -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20, code=1, place=RAISED))
    assert goes_on(rank.fails(30, done=10, code=1, place=RAISED))


def test_the_same_iteration_after_all_began_again_with_a_checkpoint() -> None:
    """Thirty iterations of its own each time, and no further."""
    rank = Rank()
    assert goes_on(rank.fails(530, done=530, code=1, place=RAISED))
    assert 1 in rank.fails(530, done=30, code=1, place=RAISED).hopeless


def test_other_iterations_after_all_began_again() -> None:
    rank = Rank()
    assert all(goes_on(rank.fails(at, done=at)) for at in (530, 100, 200, 150))


def test_a_failure_before_its_first_iteration_counts() -> None:
    rank = Rank()
    assert goes_on(rank.fails(begun=False)) and goes_on(rank.fails(begun=False))
    assert 1 in rank.fails(begun=False).hopeless


def test_the_set_up_of_the_script_raises() -> None:
    """Not a matter of replacements: the process that began with all others had raised it, too."""
    rank = Rank()
    assert goes_on(rank.fails(begun=False, code=1, place=RAISED))
    assert RAISED in rank.fails(begun=False, code=1, place=RAISED).hopeless[1]


def test_two_replacements_that_fail_by_themselves_restart_all_once() -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20))
    assert goes_on(rank.in_set_up(place=RAISED))
    verdict = rank.in_set_up(place=RAISED)
    assert not verdict.hopeless and "two replacements of rank 1" in verdict.restart[1] and RAISED in verdict.restart[1]
    # All begin with a checkpoint of iteration 15, and it fails again.
    verdict = rank.fails(17, done=2)
    assert RESTARTED in verdict.hopeless[1] and RESTARTED in setbacks.advice(rank.trouble)


def test_all_restart_again_once_the_rank_has_advanced() -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20)) and goes_on(rank.in_set_up()) and rank.in_set_up().restart
    assert goes_on(rank.fails(60, done=45)) and rank.trouble.tried == ""
    assert goes_on(rank.in_set_up(at=60)) and rank.in_set_up(at=60).restart


def test_replacements_that_are_killed_restart_nobody() -> None:
    rank = Rank()
    assert goes_on(rank.fails(20, done=20)) and goes_on(rank.in_set_up(-9))
    assert 1 in rank.in_set_up(-9).hopeless


def test_with_a_number_only_replacements_that_fail_by_themselves_are_looked_at() -> None:
    rank = Rank(counted=True)
    assert all(goes_on(rank.fails(20, code=1, place=RAISED)) for _ in range(5)) and not rank.troubles
    for _ in range(3):
        assert goes_on(rank.fails(20)) and goes_on(rank.in_set_up()) and rank.in_set_up().restart


def test_who_is_replaced_because_of_others_is_excused() -> None:
    rank = Rank()
    assert all(goes_on(rank.fails(20, excused=True)) for _ in range(5))
    assert goes_on(rank.fails(20)) and goes_on(rank.fails(20)) and rank.fails(20).hopeless


def test_a_bound_per_hour() -> None:
    rank = Rank()
    assert all(goes_on(rank.fails(100 * n, done=100)) for n in range(PER_HOUR))
    assert f"{PER_HOUR + 1} times within an hour" in rank.fails(100 * PER_HOUR, done=100).hopeless[1]
    rank = Rank()
    for n in range(3 * PER_HOUR):
        rank.time_s = 1000 + 40 * n
        assert goes_on(rank.fails(100 * n, done=100))


@pytest.mark.parametrize(("code", "place"), [(1, RAISED), (-9, "")])
def test_an_end_that_is_told_twice_is_counted_once(code: int, place: str) -> None:
    """Its node has missed the generation that replaced it, and tells the next one the same."""

    def ended(pid: int, generation: int = 1) -> WorkerExit:
        return WorkerExit(1, 1, pid, code, "h", "", 1000, "", place, generation, 20, True, 20)

    nodes = {1: "b.1"}
    once = judge((), [ended(100)], 1, nodes=nodes)
    for _ in range(3):
        again = judge(once.troubles, [ended(100)], 1, nodes=nodes)
        assert goes_on(again) and again.troubles == once.troubles
    for other, on in ((ended(101), nodes), (ended(100, 2), nodes), (ended(100), {1: "b.2"})):
        (found,) = judge(once.troubles, [other], 1, nodes=on).troubles
        assert len(found.setbacks) == found.num_since == 2


def test_ranks_are_looked_at_one_by_one() -> None:
    def exits(generation: int) -> Iterable[WorkerExit]:
        return [WorkerExit(rank, 0, 7, -9, "h", generation=generation, iteration=20, begun=True) for rank in (3, 1)]

    troubles: tuple[Trouble, ...] = ()
    for number in (1, 2):
        verdict = judge(troubles, exits(number), 1)
        assert goes_on(verdict)
        troubles = verdict.troubles
    assert list(judge(troubles, exits(3), 1).hopeless) == [3, 1]
    assert list(judge(troubles, [*exits(3)][1:], 1).hopeless) == [1]


def test_what_is_carried_is_bounded() -> None:
    troubles: tuple[Trouble, ...] = ()
    for rank in range(setbacks.NUM_KEPT + 5):
        troubles = judge(troubles, [WorkerExit(rank, 0, 7, -9, "h")], 1).troubles
    assert len(troubles) == setbacks.NUM_KEPT and troubles[-1].rank == setbacks.NUM_KEPT + 4


def test_a_worker_that_could_not_be_started_is_told_by_its_cause_and_restarts_nobody() -> None:
    troubles: tuple[Trouble, ...] = ()
    why = "it cannot be started: [Errno 24] Too many open files"
    for number in (2, 3, 4):
        verdict = judge(troubles, [WorkerExit(1, 1, 0, 127, "h", why, 1000 + number, generation=number)], 1)
        troubles = verdict.troubles
        assert not verdict.restart
    assert "3 failures" in verdict.hopeless[1] and verdict.movable == {1}
    assert f"(1) {why}, as a replacement, before an iteration (on h)" in setbacks.describe(troubles[0], "w")
