"""Keeps apart what a training thread changes and the stop of its generation: nothing begins after it or is cut by it.

    training thread:  enter .. changes .. leave        enter_step: PeerFailure
    line to the agent:            stopping ---- waits ----> aborts, reports

A report tells what the parameters hold. So none is made while a thread is inside, and once a stop has come no step
begins. This module must never communicate, nor know why a generation is stopped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from swift_agent.errors import PeerFailure


class Fence:
    """Shared by the thread that stops generations and those that train; every attribute but those of `enter` is written
    under *fence*, of which *changed* is the condition.

    *interrupted*: the generation that the main thread works in was stopped. Never before it has entered its first.
    What the main thread does in every iteration is kept down to a few operations: it runs with cold caches.
    """

    def __init__(self) -> None:
        self.fence = threading.RLock()
        self.changed = threading.Condition(self.fence)
        self.interrupted = False
        self._stopped = 0
        self._aborted = 0
        self._entered = 0
        self._inside = 0
        self._updating = 0
        self._waits_for_leave = False

    @property
    def generation(self) -> int:
        """The one that the main thread has entered, 0 before the first."""
        return self._entered

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Under the lock; threads that wait for a change are woken."""
        with self.changed:
            yield
            self.changed.notify_all()

    # ---- main thread ----

    def check(self) -> None:
        """Raise PeerFailure if interrupted."""
        if self.interrupted:
            raise PeerFailure(f"generation {self._entered} was stopped because a peer failed")

    def enter_step(self) -> None:
        """Pass the fence in front of an optimizer step. Until `leave` no report is made."""
        self._inside += 1
        if self.interrupted:
            self.leave()
            self.check()

    def enter(self) -> None:
        """Until as many calls of `leave`, which must be soon, no report is made: what it tells of is being changed.

        Instead of the lock, which would be cold in every iteration: this thread writes `_inside` and then reads
        `interrupted`, the stopping thread writes `interrupted` and then reads `_inside`. So whichever is first, a call
        that did not find `interrupted` set is through before the report. One that did takes the lock, or changes
        nothing.
        """
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        if self._waits_for_leave:  # written before `_inside` is read, as above
            with self.changed:
                self.changed.notify_all()

    def enter_update(self, generation: int) -> bool:
        """Like `enter`, for the update that *generation* counts on; False if it was stopped meanwhile. Until `leave` no
        report of a later stop is made."""
        with self.fence:
            if generation <= self._stopped:
                return False
            self._inside += 1
            return True

    def wait_aborted(self) -> None:
        """The stop has been heard: wait until the process groups are cut, too. A few microseconds."""
        with self.changed:
            self.changed.wait_for(lambda: self._aborted >= self._stopped)

    # ---- other threads ----

    def begin_update(self) -> bool:
        """Pass the fence in front of the update of some parameters; False: it must not be made. Until as many calls of
        `end_update` no report is made. For threads other than the main one, which has `enter_step`."""
        with self.fence:
            if self.interrupted:
                return False
            self._updating += 1
            return True

    def end_update(self) -> None:
        with self.changed:
            self._updating -= 1
            self.changed.notify_all()

    def wait_updates(self) -> None:
        """Until no other thread is inside an update."""
        with self.changed:
            self.changed.wait_for(lambda: not self._updating)

    # ---- the thread that stops generations ----

    @contextlib.contextmanager
    def stopping(self, generation: int, abort: Callable[[], None]) -> Iterator[None]:
        """Nothing begins any more in *generation*; call *abort*. Inside the block, under the lock, no thread changes
        anything."""
        with self.changing():
            self._stopped = max(self._stopped, generation)
            self.interrupted = 0 < self._entered <= self._stopped
        abort()
        with self.changed:
            self._aborted = max(self._aborted, generation)
            self.changed.notify_all()
            # A step that has passed the fence has all its gradients: it is let finish, and counts.
            self._waits_for_leave = True
            self.changed.wait_for(lambda: not self._inside and not self._updating)
            self._waits_for_leave = False
            yield
