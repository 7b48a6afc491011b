"""The worker's line to its agent: hears stop and go, answers for the main thread, which may be blocked in a collective.

    agent: Go(1) ............ Stop(1) ............ Go(2) ... Release
    worker:      trains in 1          Report(1)          enters 2

For a drain the agents first have all workers stop before the same iteration; the thread answers where this one is, and
the main thread waits in `hold`:

    agent: Pause(1) ......................... Boundary(1, i) .................... Stop(1) ...
    worker:         Promised(1, at most i)                   Parked(1) before i

A thread reads the channel. On `Stop` it raises the flag first, so that no optimizer step can begin any more, then
aborts the process groups, then reports: what it reports stays true while the main thread leaves what it was in.
End-of-file means that the agent is dead; its worker must not live on.

What may not be cut is fenced (`fence`). This module must never touch training state.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, assert_never

from swift_agent.errors import UsageError
from swift_agent.wire import messages as msg
from swift_agent.wire.channel import ChannelClosed, WorkerChannel
from swift_agent.wire.environment import NO_AGENT, WorkerEnvironment
from swift_agent.wire.standing import MyStanding
from swift_agent.wire.vocabulary import written
from swift_agent.worker.line.fence import Fence
from swift_agent.worker.line.go import Go
from swift_agent.worker.line.pace import Pace
from swift_agent.worker.line.suspension import Suspension
from swift_rendezvous.threads import thread

log = logging.getLogger(__name__)

# A collective may fail before the agents know why. Longer than any detection takes; then the error is the user's own.
# The time runs in slices: that in which this process was paused does not count.
CONFIRM_TIMEOUT_S = 30.0
CONFIRM_SLICE_S = 0.5
# Groups that could not be connected: so long for the word that a peer is the reason, then another try is asked for. A
# dead peer is told of much sooner; for a slower word the try is in vain, and does no harm.
AGAIN_AFTER_S = 5.0
# Tries that are asked for within this time, before it is this process that has to be replaced.
MOST_AGAIN = 3
AGAIN_WITHIN_S = 600.0
# An agent that does not answer for so long may be one that was given up.
ASK_PLACE_S = 5.0


class Supervisor(Fence):
    """The fence whose generations an agent stops. *pausing*: its workers are to stop at a common boundary."""

    def __init__(
        self, channel: WorkerChannel, rank: int, standing: MyStanding | None = None,
        environment: WorkerEnvironment = NO_AGENT,
    ) -> None:  # fmt: skip
        super().__init__()
        self._channel = channel
        self.environment = environment
        self._suspension = Suspension(standing or MyStanding(), lambda: self._entered)
        self._rank = rank
        self.pausing = False
        self._pause_in = 0
        self._promised = 0
        self.takes_checkpoints = False
        self.saves_at: int | None = None
        """All have to go: a last checkpoint is to be taken before that iteration."""
        self.log_group: frozenset[int] = frozenset()
        """The ranks to which messages are not logged, from the next iteration on."""
        self._boundary: int | None = None
        self._parked = False
        self._go: Go | None = None
        self._released = False
        self._refused = ""
        self._patience_s = 0.0
        self._asked_again_s: list[float] = []
        self._place_asked, self._place_told = 0, dict[int, str]()
        self.may_be_why = ""
        """A clause, said with what a replacement finds to be otherwise than in its predecessor: see `Kernels`."""
        self._report: Callable[[], dict[str, Any]] = dict
        self._abort: Callable[[str, int], None] = lambda why, generation: None
        self._position: Callable[[], int] = int
        self.pace = Pace()
        self._thread = thread("swift-supervisor", self._read, _die)

    def start(
        self, hello: msg.Hello, report: Callable[[], dict[str, Any]], abort: Callable[[str, int], None],
        position: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        """Say hello and begin to listen. *report*, *abort* and *position* (the first iteration that has not begun) are
        called in the reading thread."""
        self._report, self._abort, self._position = report, abort, position
        self._channel.send(written(hello))
        self._thread.start()
        # Not the reading thread: that waits while an update of the script's is under way.
        thread("swift-time", self._suspension.watch_the_time, self._blind, lambda: self._released).start()

    # ---- main thread ----

    @property
    def generation(self) -> int:
        """The one this worker is in; before it has entered any, the one it was told to enter."""
        return self._entered or (self._go.generation if self._go else 0)

    @property
    def entered(self) -> Go | None:
        """That one; None if there is a newer one to enter."""
        go = self._go
        return go if go is not None and go.generation == self._entered else None

    def wait_go(self) -> Go:
        """Block until there is a generation to enter that has not been stopped already, and enter it."""
        while True:
            go = self.peek_go()
            if self.enter_go(go):
                return go

    def enter_go(self, go: Go) -> bool:
        """Enter that generation; False if it was stopped, or followed by another one, meanwhile."""
        with self.changed:
            if go is not self._go or go.generation <= max(self._stopped, self._entered):
                return False
            self._entered = go.generation
            self.interrupted = False
            self.pausing = self._pause_in == self._entered
            if not self.pausing:
                self.saves_at = None  # a failure has come first; on the replacement of who is lost it was never set
            return True

    def peek_go(self) -> Go:
        """Like `wait_go`, without entering: the decision is needed before the main thread is ready to join. Raises
        `UsageError` if the agent does not take this process as that rank."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self._refused
                    or (self._go is not None and self._go.generation > max(self._stopped, self._entered))
                )
            )
            if self._refused:
                raise UsageError(self._refused)
            assert self._go is not None
            return self._go

    def is_ahead(self, go: Go) -> bool:
        """Whether that generation is still to come. To be called with the lock."""
        return go.generation > self._stopped

    def confirm(self, error: BaseException) -> bool:
        """A collective failed: ask whether a peer did. True once the stop has come, False if it does not come.

        As long as the agent says that it cannot know (see `patience`) the time does not run. Where this process was
        paused a moment ago its collective, or that of a peer, may have run over the timeout of its group without any
        failure: another generation is asked for, as in `reconnect`.
        """
        if not self._suspension.was_a_moment_ago() or not self._may_ask_again():
            return self._hear_of(error, CONFIRM_TIMEOUT_S)
        return self._hear_of(error, AGAIN_AFTER_S) or self._ask_again(f"{_text(error)} (it had been paused)")

    def reconnect(self, error: BaseException) -> bool:
        """The groups could not be connected, or a state has not come as it was sent. As `confirm`; but if no peer
        failed, another generation is asked for, in which all try again. False: that was asked for too often, and it is
        this process that has to be replaced."""
        if self._hear_of(error, AGAIN_AFTER_S):
            return True
        return self._may_ask_again() and self._ask_again(_text(error))

    def _may_ask_again(self) -> bool:
        now_s = time.monotonic()
        self._asked_again_s = [at_s for at_s in self._asked_again_s if now_s - at_s < AGAIN_WITHIN_S]
        return len(self._asked_again_s) < MOST_AGAIN

    def _ask_again(self, why: str) -> bool:
        self._asked_again_s.append(time.monotonic())
        self.send(msg.Again(self._entered, why))
        return self._wait_interrupted(CONFIRM_TIMEOUT_S)

    def _hear_of(self, error: BaseException, patience_s: float) -> bool:
        if not self.interrupted:
            self.send(msg.Suspect(_text(error)))
        return self._wait_interrupted(patience_s)

    def _wait_interrupted(self, patience_s: float) -> bool:
        with self.changed:
            self._patience_s = patience_s
            while not self.interrupted and self._patience_s > 0:
                self.changed.wait_for(lambda: self.interrupted, CONFIRM_SLICE_S)
                self._patience_s -= CONFIRM_SLICE_S
            return self.interrupted

    def hold(self, iteration: int) -> None:
        """*iteration* is about to begin: return once it may, or once this generation is stopped."""
        with self.changed:
            while self.pausing and not self.interrupted and self._is_due(iteration):
                self.changed.wait()

    def _is_due(self, iteration: int) -> bool:
        """Whether a worker before *iteration* has to wait; says so where that is the boundary. Under the lock."""
        if self._boundary is None:
            return iteration >= self._promised
        if self.saves_at is not None:
            return False  # no point has come yet at which that could be done; at the end of the run there is none
        if iteration >= self._boundary and not self._parked:
            self._parked = True
            self.send(msg.Parked(self._entered))
        return self._parked

    def wait_release(self, iteration: int) -> bool:
        """At the end of the run, after *iteration* iterations: True when the job is over, False when it has to be
        recovered once more."""
        with self.changed:
            while not (self._released or self.interrupted):
                if self.pausing:
                    self._is_due(iteration)
                self.changed.wait()
            return self._released

    def send(self, message: msg.ToAgent) -> None:
        """Tell the agent; if it is gone this process ends. Nothing more after `close`, when it may still ask."""
        try:
            self._channel.send(written(message))
        except ChannelClosed:
            if not self._released:
                _die("its agent is gone")

    def note(self, text: str) -> None:
        """A line for people, shown by the agent."""
        self.send(msg.Note(self._rank, text))

    def give_up(self, why: str) -> NoReturn:
        """Nothing but a restart of all workers helps."""
        self.send(msg.Unfit(why))
        self.wait_for_end()

    def wait_for_end(self) -> NoReturn:
        """The agent has been asked to end this process; nothing else may happen here."""
        while True:
            time.sleep(1.0)

    def close(self) -> None:
        with self.changed:
            self._released = True
        self._channel.close()

    # ---- any thread ----

    def ask_place(self, generation: int) -> str:
        """Ask the agent whether the place of this worker is still its own in *generation*: why it is not, '' if it is.
        What is answered is true when it is given; the agent pauses its workers before it may not be any more."""
        with self.changed:
            self._place_asked += 1
            number = self._place_asked
        self.send(msg.AskPlace(number, generation))
        with self.changed:
            if not self.changed.wait_for(lambda: number in self._place_told, ASK_PLACE_S):
                return f"the agent has not said within {ASK_PLACE_S:g} s whether this place is still its own"
            return self._place_told.pop(number)

    def _blind(self, why: str) -> None:
        """Nothing would stop this process in time any more."""
        self.note(f"{why}; this worker ends")
        _die(why)

    # ---- reading thread ----

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed:
                if self._released or self._refused:
                    return
                _die("its agent is gone")
            try:
                self._follow(msg.TO_WORKER.read(message))
            except Exception as error:
                # Deaf, it would hold up all others for ever.
                traceback.print_exc()
                why = f"{str(message.get('op'))!r} of its agent cannot be followed: {error!r}"
                self.note(f"{why}; this worker ends")
                _die(why)

    def _follow(self, message: msg.ToWorker) -> None:
        match message:
            case msg.Stop(generation, why):
                self._on_stop(generation, why)
            case msg.Go():
                go = Go.of(message)
                with self.changing():
                    self._go = go
            case msg.Place(number, why):
                with self.changing():
                    self._place_told[number] = why
            case msg.Wait():
                with self.changed:
                    self._patience_s = CONFIRM_TIMEOUT_S
            case msg.Pause(generation):
                self._on_pause(generation)
            case msg.Boundary(generation, iteration, saves):
                with self.changing():
                    if self._pause_in == generation:
                        self._boundary, self.saves_at = iteration, iteration if saves else None
            case msg.LogGroup(ranks):
                self.log_group = frozenset(ranks)
            case msg.Where():
                with self.fence:
                    iteration = self._position()
                self.send(msg.At(iteration, self.pace.take()))
            case msg.Refused(why):
                with self.changing():
                    self._refused = (
                        f"swift_agent.init(): this process ({os.getpid()}) does not count as rank {self._rank}: "
                        f"{why}. swift-run starts a process for each rank: leave multiprocessing.spawn and "
                        "the like out, and give their number by --nproc-per-node."
                    )
            case msg.Release():
                with self.changing():
                    self._released = True
            case _:
                assert_never(message)

    def _on_pause(self, generation: int) -> None:
        with self.changing():
            self._pause_in, self._boundary, self._parked, self.saves_at = generation, None, False, None
            # Before looking where the main thread is: it says that it begins an iteration, then looks at this.
            self.pausing = generation == self._entered
            self._promised = self._position()
        self.send(msg.Promised(generation, self._promised, self.takes_checkpoints))

    def _on_stop(self, generation: int, why: str) -> None:
        with self.stopping(generation, lambda: self._abort(why, generation)):
            report = self._report()
        self.send(msg.Report(generation, report))


def _text(error: BaseException) -> str:
    """What pybind11 appends to an error that has passed through Python is of no use to people."""
    return str(error).partition("\n\nAt:\n")[0][-300:]


def _die(why: str) -> NoReturn:
    # One write: those of several workers would mix, since these run with -u.
    sys.stderr.write(f"swift-agent worker {os.getpid()} ends: {why}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process has ended")
