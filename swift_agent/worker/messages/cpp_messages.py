"""How many messages of an iteration C++ code has sent or received by itself, past Python, where nobody logs them.

The compiled library counts all of them, and this the ones that Python makes. Must never refuse one: who asks does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from swift_agent import native


class Unseen:
    """Sends and receives of an iteration that C++ code makes by itself. One per process."""

    def __init__(self) -> None:
        self._library = native.load()
        self._lock = threading.Lock()
        # Those that Python has begun to make, and those that it has made.
        self._begun = self._made = 0
        self._base = 0

    @property
    def _num(self) -> int:
        total: int = self._library.num_messages() if self._library is not None else 0
        return total

    @property
    def count(self) -> int:
        """So many, so far; never more, whatever other threads do."""
        return max(0, self._num - self._begun - self._base)

    def begin(self) -> None:
        """An iteration begins."""
        made = self._made  # first, as another thread may make one now
        self._base = self._num - made

    def make(self, operation: Callable[..., Any], *its: Any) -> Any:
        """What Python makes."""
        with self._lock:
            self._begun += 1
        try:
            return operation(*its)
        finally:
            with self._lock:
                self._made += 1

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, none is counted."""
        before = self._num
        before -= self._begun
        try:
            yield
        finally:
            made = self._made
            self._base += self._num - made - before
