"""What the processes that this one replaces have sent, as far as their logs are on this node: what is sent again must
be the same.

Must never hold up a recovery: what cannot be read is not compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import copy_of, dtype_name
from swift_logging_store.log.reader import LogReader

SENT = "sent"
"""The directory of a process's log, below the one that is its own."""


class SentBefore:
    """By predecessors of *rank*, below *directory*, since the last of the *restart_count* restarts of all workers. What
    was sent before that is deleted, since nothing of it is sent again."""

    def __init__(self, directory: Path, rank: int, restart_count: int = 0) -> None:
        everything = f"messages-{rank}-"
        self.prefix = f"{everything}{restart_count}-"
        """Of the names of directories whose processes belong together, this one's too."""
        self._directories = list(directory.glob(f"{self.prefix}*"))
        for other in set(directory.glob(f"{everything}*")).difference(self._directories):
            shutil.rmtree(other, ignore_errors=True)
        self._logs: list[LogReader] = []

    def open(self, note: Callable[[str], None]) -> None:
        """Iterations are to be repeated. *note* tells people."""
        for directory in self._directories:
            try:
                self._logs.append(LogReader(directory / SENT))
            except LogError as error:
                note(f"what is sent again is not compared with what was sent before: {error}")

    def differs(self, channel: Channel, number: int, iteration: int, tensor: Tensor) -> bool:
        """Whether that message was another one when it was sent in that iteration. False if that is unknown."""
        for log in self._logs:
            try:
                if log.iteration_of(channel, number) != iteration:
                    continue
                header, payload = log.read_last(channel, number)
                again = copy_of(tensor)
            except (KeyError, LogError):
                continue  # it was not written any more, or is damaged
            kind = (dtype_name(tensor.dtype), tuple(tensor.shape))
            return (header.dtype, header.shape) != kind or again != bytes(payload)
        return False

    def close(self) -> None:
        """They have been repeated, or will be from the start."""
        while self._logs:
            self._logs.pop().close()

    def forget(self) -> None:
        """Nothing will be repeated: delete what is left."""
        while self._directories:
            shutil.rmtree(self._directories.pop(), ignore_errors=True)
