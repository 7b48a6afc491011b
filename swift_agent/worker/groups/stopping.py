"""Stop the backends of all groups at once, and know when nothing of them runs any more.

What waits is freed in milliseconds; what it leaves (threads, descriptors, memory) goes away in the background. It must
never block its caller, and never decide that a stop is due.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from swift_agent.worker.groups import gloo_sockets
from swift_agent.worker.groups.group import Group

_PAUSE_S = 0.001
_ASLEEP_TIMES = 3
# What is under way between survivors gets so long to end by itself.
_SETTLE_S = 0.05
# How long gloo gets to see that its connections have ended, and to free its own threads.
_MUTE_AFTER_S = 0.05
_GIVE_UP_AFTER_S = 60.0


class Stop:
    """One stop of all groups; made when it is due."""

    def __init__(self, groups: Sequence[Group], why: str) -> None:
        """Returns at once. Who waited for gloo has been freed then, if gloo has not forgotten it (see `backend_swap`);
        operations of NCCL are being aborted."""
        self._quiet = threading.Event()
        self._sockets = [one for group in groups for one in group.sockets]
        self._threads = {one for group in groups for one in group.threads}
        self._gloo = [one for group in groups for kind, one in group.by_kind() if kind != "nccl"]
        # Refuse first, cut then: an operation started in between would wait for nobody.
        for one in self._gloo:
            one.stop(why)
        self._may_settle = all(one.frees_waiters for one in self._gloo)
        if not self._may_settle:
            gloo_sockets.shut_down(self._sockets, socket.SHUT_RD)
        # All communicators at the same time: NCCL may not finish aborting one while another still runs.
        self._aborts: list[threading.Thread] = []
        for group in groups:
            for kind, one in group.by_kind():
                if kind == "nccl":

                    def abort(one=one) -> None:  # type: ignore[no-untyped-def]
                        one.abort()
                        one.stop(why)

                    self._aborts.append(in_background(abort))
                    # Destroying a communicator may block; it has a thread of its own.
                    in_background(lambda one=one, abort=self._aborts[-1]: (abort.join(), one.release()))  # type: ignore[misc]
        in_background(self._bury)

    def wait_quiet(self, timeout: timedelta) -> bool:
        """Until nothing of the stopped backends touches a tensor any more; False: not within `timeout`."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        for thread in self._aborts:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                return False
        return self._quiet.wait(max(0.0, deadline_s - time.monotonic()))

    def _bury(self) -> None:
        # gloo forgets the thread that waits for a message of which a part has passed (see native/forward.cpp), and that
        # thread then stays until the group's timeout. So let messages between survivors pass before the cut.
        if self._may_settle:
            self._sleeping(time.monotonic() + _SETTLE_S)
            gloo_sockets.shut_down(self._sockets, socket.SHUT_RD)
        mute_at_s = time.monotonic() + _MUTE_AFTER_S
        # The sockets are shut, so a thread that sleeps has nothing to do any more, or waits for what never comes.
        if self._sleeping(mute_at_s):
            self._quiet.set()
        time.sleep(max(0.0, mute_at_s - time.monotonic()))
        gloo_sockets.mute(self._sockets)
        gloo_sockets.shut_down(self._sockets)
        if self._quiet.is_set() or self._sleeping(mute_at_s + _GIVE_UP_AFTER_S):
            self._quiet.set()
        for one in self._gloo:
            one.release()

    def _sleeping(self, deadline_s: float) -> bool:
        """Wait until all of gloo's threads sleep. Look more than once: one may just have been waiting for a lock."""
        times_asleep = 0
        while times_asleep < _ASLEEP_TIMES:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_PAUSE_S)
            times_asleep = times_asleep + 1 if gloo_sockets.all_asleep(self._threads) else 0
        return True


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="swift-release", daemon=True)
    thread.start()
    return thread
