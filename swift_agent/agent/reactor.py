"""What the agent's loop waits for: descriptors that are ready, and what other threads have it do.

All handlers run in the thread of the loop, one after the other. This module must never know what any of them means.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections.abc import Callable

from swift_agent.agent.processes.standby import StandbyServer

Ready = list[tuple[selectors.SelectorKey, int]]


class Reactor:
    """*selector*: for all that register descriptors of their own. The data of a key is called when it is ready."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._post_lock = threading.Lock()
        self.selector.register(self._wake_fd, selectors.EVENT_READ, self._drain_inbox)

    def post(self, action: Callable[[], None]) -> None:
        """Have *action* run in the loop; from any thread."""
        self._inbox.put(action)
        with self._post_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def post_in_signal_handler(self, action: Callable[[], None]) -> None:
        """As `post`, whose lock the main thread may hold. Not once this is closed."""
        self._inbox.put(action)
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float) -> Ready:
        """What is ready; nothing is called yet."""
        return self.selector.select(timeout_s)

    def handle(self, ready: Ready) -> None:
        # The standby server first: it announces a process before that process can speak.
        for key, _ in sorted(ready, key=lambda item: not isinstance(item[0].fileobj, StandbyServer)):
            if self._is_registered(key):
                key.data()

    def close(self) -> None:
        try:
            self.selector.close()
        finally:
            with self._post_lock:
                self._closed = True
                os.close(self._wake_fd)

    def _is_registered(self, key: selectors.SelectorKey) -> bool:
        """Not if an earlier handler of this turn has closed it, and maybe given its number to something new."""
        try:
            return self.selector.get_key(key.fileobj).data is key.data
        except (KeyError, ValueError):
            return False

    def _drain_inbox(self) -> None:
        os.eventfd_read(self._wake_fd)
        while not self._inbox.empty():
            self._inbox.get()()
