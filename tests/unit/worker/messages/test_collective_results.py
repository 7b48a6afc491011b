"""Results of collectives are kept by all, and given to who repeats; on torch's fake backend, which leaves to each rank
what it brings, so that one process can stand for several ranks, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from swift_agent.worker.messages.collective_results import Collective, giver_of
from swift_agent.worker.messages.cpp_messages import Unseen
from swift_agent.worker.messages.messages import Messages
from swift_recovery.errors import CannotReplay, NotInLog
from tests.unit.worker.messages.test_messages import (  # noqa: F401 - fixtures
    Pipe,
    environment,
    make,
    notes,
    receive,
    repeated,
    send,
)


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9)), st.data())
def test_one_who_lives_gives_what_all_had(members: set[int], others_lost: set[int], data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(sorted(members)))
    giver = giver_of(sorted(members), lost, others_lost | {lost})
    living = members - others_lost - {lost}
    assert giver in living if living else giver is None


def test_the_next_one_gives() -> None:
    assert [giver_of([0, 1, 2, 3], rank, {rank}) for rank in range(4)] == [1, 2, 3, 0]
    assert giver_of([0, 1, 2, 3], 2, {2, 3}) == 0 and giver_of([7, 2, 5], 2, {2}) == 5


def hand_over(givers: list[Messages], destination: int, before: int, lost: list[int]) -> dict[int, Callable[..., Any]]:
    """For the `take` of a replacement, whatever these have for it."""
    links: dict[int, Callable[..., Any]] = {}
    for giver in givers:
        gift, link = giver.gift(destination, before, lost), Pipe()
        if gift is not None:
            gift(link, lambda: None)  # type: ignore[arg-type]
            links[giver.rank] = lambda check, link=link: contextlib.nullcontext(link)
    return links


def reduced(value: float, *, wait: bool = True) -> torch.Tensor:
    tensor = torch.full((3,), float(value))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if wait:
        work.wait()
    return tensor


@pytest.fixture
def replacement(make: Callable[[int], Messages]) -> Callable[..., Messages]:  # noqa: F811
    """Of rank 2, which repeats the iterations before *before* with what *givers* have."""

    def one(givers: list[Messages], before: int, lost: list[int]) -> Messages:
        links = hand_over(givers, 2, before, lost)
        made = make(2)
        made.take(links)
        made.wait_taken()
        made.begin_replay(lost)
        return made

    return one


def test_what_all_had_comes_again(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """Each operation for itself, whatever was between them, from one of the others only."""
    makers = []
    for rank in (0, 1):
        makers.append(make(rank))
        for iteration in range(3):
            makers[-1].begin(iteration, 1)
            reduced(100 * rank + iteration).zero_()  # the script may use it from then on
            gathered = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(gathered, torch.full((2,), 100.0 * rank + 5))
            dist.barrier()
            dist.all_gather_single(torch.zeros(6), torch.full((2,), 7.0 + iteration))
            reduced(50 + iteration)
            word = torch.full((1,), 9 + iteration)
            dist.broadcast(word, 1)
            makers[-1].end()
    made = replacement(makers, 3, [2])
    for iteration in range(3):
        with repeated(made, iteration):
            word, whole = torch.zeros(1, dtype=torch.int64), torch.zeros(6)
            dist.broadcast(word, 1)
            assert word.item() == 9 + iteration
            assert reduced(-1.0).tolist() == [iteration] * 3  # rank 0's
            assert reduced(-1.0).tolist() == [50 + iteration] * 3
            dist.all_gather_single(whole, torch.zeros(2))
            assert whole.tolist() == [7 + iteration] * 6
            gathered = [torch.zeros(2) for _ in range(3)]
            dist.all_gather(gathered, torch.zeros(2))
            assert [one[0].item() for one in gathered] == [5] * 3
            dist.barrier()
    # What it was given is in its own log: now it can give it.
    made.end_replay(stays=False)
    other = hand_over([made], 1, 3, [0, 1])
    again = make(1)
    again.take(other)
    again.begin_replay([0, 1])
    with repeated(again, 2):
        assert reduced(-1.0).tolist() == [2] * 3


def test_of_an_iteration_that_was_run_again_the_last_time_counts(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    giver = make(0)
    for value in (1.0, 2.0):
        giver.begin(0, 1)
        reduced(value)
        giver.log._writer.roll()  # into another segment
        reduced(10 + value)
        giver.rewind()
    giver.begin(0, 2)
    reduced(3.0)
    reduced(13.0)
    giver.end()
    giver.begin(1, 2)
    reduced(4.0)  # of the iteration that is cut: it is made live
    giver.rewind()
    made = replacement([giver], 1, [1, 2])
    with repeated(made, 0):
        assert [reduced(-1.0)[0].item(), reduced(-1.0)[0].item()] == [3.0, 13.0]
    made.end_replay(stays=True)
    with repeated(made, 1):
        assert reduced(-1.0)[0].item() == -1.0


def test_what_is_not_kept(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """Of other threads, of collectives that are none of the script's, and of who never hears that they are done."""
    giver = make(0)
    reduced(1.0)  # between iterations
    giver.begin(0, 1)
    reduced(2.0, wait=False)
    thread = threading.Thread(target=reduced, args=(3.0,))
    thread.start()
    thread.join()
    with giver.aside():
        reduced(4.0)
    giver.agreeing(lambda: (reduced(5.0), None)[1])()
    dist.all_reduce(torch.zeros(2, dtype=torch.float64))
    reduced(6.0)
    giver.end()
    assert not giver.log.incomplete
    made = replacement([giver], 1, [2])
    with repeated(made, 0):
        with pytest.raises(NotInLog, match=r"what the 1\. allreduce of group .* gave is in nobody's log"):
            reduced(-1.0)
        dist.all_reduce(torch.zeros(2, dtype=torch.float64))
        assert reduced(-1.0)[0].item() == 6.0
        with pytest.raises(NotInLog):
            reduced(-1.0)
    other = replacement([giver], 1, [2])
    with repeated(other, 0):
        with pytest.raises(NotInLog):
            reduced(-1.0)
        with pytest.raises(CannotReplay, match=r"float64 \[2\], and what waits for it torch.float32 \[3\]"):
            reduced(-1.0)


def test_what_was_cut_stays_as_it_is(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """Where the giver has passed over the rest of an iteration; also for who repeats it from a replacement's log."""
    giver = make(0)
    for iteration in range(3):
        giver.begin(iteration, 1)
        reduced(10.0 + iteration)
        reduced(20.0 + iteration, wait=iteration != 1)
        if iteration == 1:
            giver.pass_over()
        else:
            giver.end()
    made = replacement([giver], 3, [2])
    found = []
    for iteration in range(3):
        with repeated(made, iteration):
            found += [reduced(-1.0)[0].item(), reduced(-1.0)[0].item()]
    assert found == [10, 20, 11, -1, 12, 22]
    made.end_replay(stays=False)
    again = make(1)
    again.take(hand_over([made], 1, 3, [0, 1]))
    again.begin_replay([0, 1])
    with repeated(again, 1):
        assert [reduced(-1.0)[0].item(), reduced(-1.0)[0].item()] == [11, -1]


class Own(torch.Tensor):
    """It may do anything."""


def too_late(giver: Messages) -> None:
    giver.begin(0, 1)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    giver.end()
    giver.begin(5, 1)
    assert work is not None
    work.wait()


def of_its_own_kind(giver: Messages) -> None:
    giver.begin(5, 1)
    dist.broadcast(torch.ones(3).as_subclass(Own), 0)


@pytest.mark.parametrize("sloppy", [too_late, of_its_own_kind])
def test_what_is_not_kept_is_not_taken_for_cut(
    sloppy: Callable[[Messages], None], make: Callable[[int], Messages],  # noqa: F811
    replacement: Callable[..., Messages],
) -> None:  # fmt: skip
    giver = make(0)
    sloppy(giver)
    reduced(1.0)
    giver.pass_over()
    made = replacement([giver], 6, [2])
    with repeated(made, 5):
        assert reduced(-1.0)[0].item() == 1.0
        with pytest.raises(NotInLog):
            reduced(-1.0)


def test_what_should_have_been_done_before_the_update_is_not_taken_for_cut(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """A replacement would update with something else."""
    giver = make(0)
    for iteration, wait in enumerate((True, False, True)):
        giver.begin(iteration, 1)
        reduced(1.0, wait=wait)
        giver.agreeing(lambda: None)()
        reduced(2.0, wait=False)
        giver.pass_over()
    made = replacement([giver], 3, [2])
    for iteration in (0, 2):
        with repeated(made, iteration):
            assert [reduced(-1.0)[0].item(), reduced(-1.0)[0].item()] == [1, -1]
    with repeated(made, 1), pytest.raises(NotInLog):
        reduced(-1.0)


def test_results_that_are_waited_for_in_another_order(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """A log has them in that in which they were begun, whatever segment they come to."""
    giver = make(0)
    giver.begin(0, 1)
    works = [dist.all_reduce(torch.full((3,), float(value)), async_op=True) for value in range(4)]
    for number in (1, 0, 3):
        assert works[number] is not None
        works[number].wait()  # type: ignore[union-attr]
        giver.log._writer.roll()
    giver.end()
    made = replacement([giver], 1, [2])
    with repeated(made, 0):
        assert [reduced(-1.0)[0].item() for _ in range(2)] == [0, 1]
        with pytest.raises(NotInLog):
            reduced(-1.0)
        assert reduced(-1.0)[0].item() == 3


def test_all_ways_to_gather(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """Lists of tensors, lists of lists, scalars, and several at once."""

    def gather(value: float) -> list[torch.Tensor]:
        group: Any = dist.group.WORLD
        scalars, rows = [torch.zeros(()) for _ in range(3)], [[torch.zeros(2)] * 1 for _ in range(3)]
        group.allgather(scalars, torch.tensor(value)).wait()
        group.allgather([[row[0] for row in rows]], [torch.full((2,), value + 1)]).wait()
        both = [torch.full((2,), value), torch.full((1, 3), value + 2)]
        group.allreduce_coalesced(both).wait()
        return [*scalars, *(row[0] for row in rows), *both]

    giver = make(0)
    giver.begin(0, 1)
    had = gather(5.0)
    giver.end()
    made = replacement([giver], 1, [2])
    with repeated(made, 0):
        found = gather(-1.0)
    assert [one.tolist() for one in found] == [one.tolist() for one in had]
    assert made.passes_over  # it knows that the script has collectives


@pytest.mark.parametrize("how", ["future", "result", "synchronize"])
def test_works_can_be_used_as_ever(
    how: str, make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """The fake group's have no futures; those of gloo are in tests/integration/test_results.py."""
    giver = make(0)
    giver.begin(0, 1)
    reduced(4.0)
    giver.end()
    made = replacement([giver], 1, [2])
    with repeated(made, 0):
        work: Any = dist.all_reduce(torch.zeros(3), async_op=True)
        assert work.is_completed() and work.is_success() and work.exception() is None
        if how == "future":
            assert work.get_future().then(lambda done: done.value()[0] + 1).wait().tolist() == [5.0] * 3
        elif how == "result":
            assert work.result()[0].tolist() == [4.0] * 3
        else:
            work.synchronize()


def test_messages_of_other_threads_are_never_taken_for_those_of_compiled_code() -> None:
    """Whenever they are made."""

    class Library:
        num = 0
        hook: Callable[[], object] | None = None

        def num_messages(self) -> int:
            num, hook, self.hook = self.num, self.hook, None
            if hook is not None:
                hook()
            return num

        def send(self) -> None:
            self.num += 1

    unseen = Unseen()
    library = unseen._library = Library()  # type: ignore[assignment]
    library.hook = lambda: unseen.make(library.send)
    unseen.begin()
    assert unseen.count == 0
    with unseen.aside():
        library.send()
        library.hook = lambda: unseen.make(library.send)
    assert unseen.count == 0
    library.send()
    unseen.make(library.send)
    library.send()
    assert unseen.count >= 1  # (one may be missed for each that came in between)


def test_one_that_has_failed_is_no_result() -> None:
    """It is completed, says torch; what is in the tensors is anything."""

    class Failed:
        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: Any) -> bool:
            raise RuntimeError("Connection closed by peer")

    recorded: list[str] = []
    work = Collective(Failed(), lambda: recorded.append(""))
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.is_completed()
    assert not recorded


def test_is_completed_is_as_good_as_a_wait(
    make: Callable[[int], Messages], replacement: Callable[..., Messages], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    giver = make(0)
    giver.begin(0, 1)
    tensor = torch.full((3,), 8.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    # (torch's fake work never says so.)
    monkeypatch.setattr(work._inner.__class__, "is_completed", lambda self: True)
    assert work.is_completed() and work.is_completed()
    tensor.zero_()
    giver.end()
    made = replacement([giver], 1, [2])
    with repeated(made, 0):
        assert reduced(-1.0)[0].item() == 8.0


def test_a_group_of_which_nobody_is_left(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """Its members make their collectives together once more; those of other groups are given as ever."""
    giver = make(0)
    pair = dist.new_group([1, 2])
    giver.begin(0, 1)
    reduced(5.0)
    giver.end()
    made = replacement([giver], 1, [1, 2])
    pair = dist.new_group([1, 2])
    with repeated(made, 0):
        assert reduced(-1.0)[0].item() == 5.0
        mine = torch.full((2,), 3.0)
        dist.all_reduce(mine, group=pair)  # the fake group leaves what it finds
        assert mine.tolist() == [3.0, 3.0] and list(made.repeating) == [1, 2]


def test_messages_and_results_of_one_rank(
    make: Callable[[int], Messages], replacement: Callable[..., Messages]  # noqa: F811
) -> None:
    """In one log, in their order; those of other destinations stay where they are."""
    sender = make(1)
    for iteration in range(2):
        sender.begin(iteration, 1)
        send(iteration)
        send(40 + iteration, to=0)
        reduced(20.0 + iteration)
        sender.end()
    made = replacement([sender], 2, [0, 2])  # so that 1 is the next one
    for iteration in range(2):
        with repeated(made, iteration):
            assert reduced(-1.0)[0].item() == 20.0 + iteration
            assert receive()[0, 0].item() == iteration
    assert {channel.destination for channel in made._repetition._source.channels} == {1, 2}  # type: ignore[union-attr]
