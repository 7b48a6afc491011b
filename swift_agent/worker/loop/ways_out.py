"""The ways out of a state that nothing in place helps: another process in the place of this one, or all workers again.

It must never be the first thing that is tried: the caller has nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from swift_agent.wire import messages as msg
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.checks.checks import elsewhere
from swift_agent.worker.line import in_script
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place


class WaysOut:
    """One per worker. *begin_with*: what all workers would begin with that are started again."""

    def __init__(self, place: Place, supervisor: Supervisor, standing: MyStanding) -> None:
        self._place, self._supervisor, self._standing = place, supervisor, standing
        self.begin_with = "what the script loads"

    def have_replaced(self, why: str, *, by_itself: bool = False) -> NoReturn:
        """Only another process helps. It counts as a failure of this one's own if *by_itself*."""
        if not by_itself:
            self._standing.excuse()
        self._supervisor.note(f"{why}: this worker has itself replaced")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("this process has ended")

    def give_up(self, why: str, *, is_hopeless: bool = False) -> NoReturn:
        """Nothing but a restart of all workers helps; nor does that, if it *is_hopeless*."""
        self._say_unfit(why, is_hopeless=is_hopeless)
        self._supervisor.wait_for_end()
        raise AssertionError("the agent ends this process")

    def restart_all(self, why: str) -> NoReturn:
        self.give_up(self._and_restart(why))

    def cannot_repeat(self, why: str) -> NoReturn:
        """What this replacement repeats is not what its predecessor did."""
        self.give_up(f"{why}{self._supervisor.may_be_why}")

    def tell_elsewhere(self, what: str, others: tuple[str, int, int] | None) -> NoReturn:
        """This replacement has come to step *what*, and the *others* have begun another one."""
        self.restart_all(elsewhere(what, others, in_script.place_of(sys._getframe())))

    def tell_deviation(self, why: str, is_hopeless: bool) -> None:
        """In a thread: replicas differ, and nothing in place helps. *is_hopeless*: nor does another start."""
        self._say_unfit(why if is_hopeless else self._and_restart(why), is_hopeless=is_hopeless)

    def tell_standstill(self, why: str) -> None:
        """In a thread: ranks wait for each other for ever."""
        why = (
            f"{why}. All ranks must run the same iterations and sections, equally many: take all batches of an update "
            "in its iteration, and decide by no condition that differs from rank to rank. If the script begins with a "
            "snapshot of its own, take the numbers of the loop from job.epochs() or job.iterations()"
        )
        # Where nothing has failed yet, workers that are started again come to the same.
        if has_recovered := self._place.has_recovered:
            why = self._and_restart(why)
        self._say_unfit(why, is_hopeless=not has_recovered)

    def _and_restart(self, why: str) -> str:
        return f"{why}{self._supervisor.may_be_why}. All workers have to start again, with {self.begin_with}"

    def _say_unfit(self, why: str, *, is_hopeless: bool) -> None:
        self._supervisor.send(msg.Unfit(why, is_hopeless))
