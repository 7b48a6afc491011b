"""Messages of an iteration that go where they are not logged: past Python, by C++ code, or past process groups.

The compiled library counts all messages of process groups, and this the ones that Python makes. It must never refuse
one that Python makes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from swift_agent import native
from swift_agent.errors import UsageError
from swift_agent.torch_private import messages as torch_messages


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


def ways_past() -> UsageError | None:
    """The error, if messages go where they are not seen."""
    ways = torch_messages.ways_past_c10d()
    if not ways:
        return None
    return UsageError(
        f"this job logs the messages between its stages, and the script has set up {' and '.join(ways)}: what "
        "goes that way is not logged, so a lost rank could not repeat it. Use dist.isend and dist.irecv."
    )


class Ways:
    """Refuses an iteration that has sent or received something unseen: before its update, when nothing is lost yet; or
    when the next one begins, if it came after that. *refuse*: with an error, which it need not raise."""

    def __init__(self, unseen: Unseen, refuse: Callable[[UsageError], None]) -> None:
        self._unseen, self._refuse = unseen, refuse
        self._has_checked = False
        self._num_unseen = 0  # in the last iteration

    def begin(self) -> None:
        """An iteration begins."""
        count, self._num_unseen = self._num_unseen, 0
        if count:
            self._refuse(_made_by_cpp(count))
        self._unseen.begin()

    def check_seen(self) -> None:
        """Before the update."""
        if not self._has_checked:
            self._has_checked = True
            if error := ways_past():
                self._refuse(error)
        if count := self._unseen.count:
            self._refuse(_made_by_cpp(count))

    def end(self) -> None:
        """The iteration counts."""
        self._num_unseen = self._unseen.count


def _made_by_cpp(count: int) -> UsageError:
    return UsageError(
        f"{count} sends or receives of an iteration were made by C++ code (torch.ops.c10d, an extension), past the "
        "Python side of torch.distributed: they are not logged, so a lost rank could not repeat them. Make them "
        "with dist.isend and dist.irecv."
    )
