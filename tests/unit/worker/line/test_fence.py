"""What holds a report back, and what a stop holds back. By a fence alone: no agent, no channel."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from swift_agent.errors import PeerFailure
from swift_agent.worker.line.fence import Fence


class Stop:
    """A stop of *generation*, by a thread: what was done, in order."""

    def __init__(self, fence: Fence, generation: int = 1) -> None:
        self.done: list[str] = []
        self._fence, self._generation = fence, generation
        self._aborted = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._aborted.wait(10.0)

    def _run(self) -> None:
        with self._fence.stopping(self._generation, self._abort):
            self.done.append("report")

    def _abort(self) -> None:
        self.done.append("abort")
        self._aborted.set()

    def is_held_back(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def reported(self) -> list[str]:
        self._thread.join(10.0)
        return self.done


@pytest.fixture
def fence() -> Fence:
    made = Fence()
    made._entered = 1
    return made


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(("enter", "leave"), [
    (Fence.enter_step, Fence.leave), (Fence.enter, Fence.leave), (Fence.begin_update, Fence.end_update),
    (lambda fence: fence.enter_update(1), Fence.leave),
], ids=["step", "change", "update of another thread", "update of a generation"])  # fmt: skip
def test_a_report_waits_for_who_is_inside(
    fence: Fence, enter: Callable[[Fence], object], leave: Callable[[Fence], object]
) -> None:
    in_thread(lambda: enter(fence))
    stop = Stop(fence)
    assert stop.is_held_back() and stop.done == ["abort"]
    fence.wait_aborted()
    in_thread(lambda: leave(fence))
    assert stop.reported() == ["abort", "report"]


def test_after_a_stop_nothing_begins(fence: Fence) -> None:
    assert Stop(fence).reported() == ["abort", "report"]
    with pytest.raises(PeerFailure, match="generation 1 was stopped"):
        fence.enter_step()
    assert not fence.begin_update() and not fence.enter_update(1) and fence.enter_update(2)
    fence.leave()
    assert fence.interrupted and Stop(fence, 2).reported() == ["abort", "report"]


def test_a_step_that_is_refused_holds_no_report_back(fence: Fence) -> None:
    Stop(fence).reported()
    with pytest.raises(PeerFailure):
        fence.enter_step()
    assert Stop(fence, 2).reported() == ["abort", "report"]


def test_before_the_first_generation_nothing_is_interrupted() -> None:
    fence = Fence()
    assert Stop(fence).reported() == ["abort", "report"]
    assert not fence.interrupted and fence.generation == 0
    fence.check()


def test_who_waits_for_updates_waits_for_all_of_them(fence: Fence) -> None:
    assert fence.begin_update() and fence.begin_update()
    waits = threading.Thread(target=fence.wait_updates, daemon=True)
    waits.start()
    fence.end_update()
    waits.join(0.1)
    assert waits.is_alive()
    fence.end_update()
    waits.join(10.0)
    assert not waits.is_alive()
