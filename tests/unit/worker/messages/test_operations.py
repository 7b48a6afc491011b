"""Sends and receives of an iteration that outlive their connections; with operations that the test ends."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import deque
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from swift_agent.worker.messages.operations import Meter, Receive, Send


class Inner(dist.Work):
    """An operation of one connection: done, cut, or (None) still under way, which nobody here waits for."""

    def __init__(self, ends: bool | None) -> None:
        super().__init__()
        self.ends = ends

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert self.ends is not None, "who waits here waits for ever"
        if not self.ends:
            raise RuntimeError("connection closed")
        return True

    def is_completed(self) -> bool:
        return bool(self.ends)


class Owner:
    """Stays so often, and begins all receives again each time."""

    def __init__(self, stays: int = 1) -> None:
        self.reconnected = 0
        self.meter: Meter | None = None
        self.queue: deque[Receive] = deque()
        self.done: list[str] = []
        self._stays = stays
        self.threads: set[int] = set()

    def stay(self, error: Exception) -> None:
        if self.reconnected == self._stays:
            try:
                raise error
            finally:
                del error
        self.reconnected += 1
        for receive in self.queue:
            receive.post()

    def expect_cut(self, error: Exception) -> None:
        if self.reconnected == self._stays:
            try:
                raise error
            finally:
                del error

    def note_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def receive(self, name: str, *ends: bool | None) -> Receive:
        """*ends*: of the first connection, the second, ..."""
        rest = deque(ends)
        work = Receive(self, self.queue, lambda: Inner(rest.popleft()), lambda: self.done.append(name))
        work.post()
        return work


def test_a_receive_that_was_cut_goes_on_where_its_process_stays() -> None:
    owner = Owner(stays=2)
    work = owner.receive("a", False, False, True)
    assert work.wait() and work.is_completed() and owner.reconnected == 2 and owner.done == ["a"]
    assert work.wait(timedelta(seconds=1)) and owner.done == ["a"] and not owner.queue


def test_where_it_does_not_the_script_hears_of_it() -> None:
    owner = Owner(stays=0)
    with pytest.raises(RuntimeError, match="connection closed"):
        owner.receive("a", False).wait()
    assert owner.done == []


def test_who_waits_for_a_later_one_has_the_earlier_ones() -> None:
    owner = Owner()
    first, second = owner.receive("a", True, None), owner.receive("b", False, True)
    third = owner.receive("c", None, None)
    assert second.wait() and owner.done == ["a", "b"] and list(owner.queue) == [third]
    assert first.is_completed() and not third.is_completed()


def test_one_that_is_heard_to_be_complete_is_done() -> None:
    """Who polls uses the tensor: nothing may be received into it again."""
    owner = Owner()
    work = owner.receive("a", True)
    assert work.is_completed() and owner.done == ["a"] and not owner.queue


def test_after_the_iteration_it_is_a_receive_as_any_other() -> None:
    owner = Owner()
    work = owner.receive("a", False)
    owner.queue.popleft().let_go()
    with pytest.raises(RuntimeError, match="connection closed"):
        work.wait()
    assert owner.reconnected == 0


def test_a_send_that_a_failure_has_cut_is_over() -> None:
    """Its message is in the log. It waits for nobody."""
    owner = Owner()
    cut, other = Send(owner, Inner(False)), Send(owner, Inner(False))
    assert not other.is_completed() and cut.wait() and owner.reconnected == 0
    owner.reconnected = 1
    assert other.is_completed() and other.wait()
    assert Send(owner, Inner(True)).wait()
    with pytest.raises(RuntimeError, match="connection closed"):
        Send(owner, Inner(False)).wait()


@pytest.mark.parametrize("kind", ["send", "receive"])
def test_what_a_cut_iteration_held_is_freed_at_once(kind: str) -> None:
    """Not by the collector of cycles: an error whose traceback has the frame that holds it would keep all that the
    script had there, its activations too."""
    owner = Owner(stays=0)
    gc.disable()
    try:
        activation = torch.ones(1)
        gone = weakref.ref(activation)

        def iteration(activation: torch.Tensor) -> None:
            (owner.receive("a", False) if kind == "receive" else Send(owner, Inner(False))).wait()

        with contextlib.suppress(RuntimeError):
            iteration(activation)
        owner.queue.clear()
        del activation
        assert gone() is None
    finally:
        gc.enable()


def test_whoever_waits_is_noted() -> None:
    owner = Owner()
    works = [owner.receive("a", True), Send(owner, Inner(True))]
    for work in works:
        thread = threading.Thread(target=work.wait)
        thread.start()
        thread.join()
        assert thread.ident in owner.threads
    assert threading.get_ident() not in owner.threads


def test_a_wait_that_ends_when_the_iteration_was_run_again_counts_nothing() -> None:
    """In a thread, while the script's own one starts over."""
    owner = Owner()
    work = owner.receive("a", True)
    inner, wait = work.inner, work.inner.wait

    def wait_and_be_rewound(timeout: timedelta = timedelta(0)) -> bool:
        while owner.queue:
            owner.queue.popleft().let_go()
        return bool(wait(timeout))

    inner.wait = wait_and_be_rewound
    assert work.wait() and owner.done == []
