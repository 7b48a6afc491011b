"""One segment of what this process has sent, as it is read: on its node or, if it is damaged there, its copy.

Must never decide which messages count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel, Header
from swift_logging_store.log.reader import LogReader


@dataclass(frozen=True)
class SentSegment:
    """*ends*: by channel, the number from which on messages count not here, but in newer segments, as their iterations
    were run again. *num_bytes*: of the newest one, how much was written; else -1, and it has its end mark."""

    path: Path
    ends: Mapping[Channel, int]
    num_bytes: int

    def check_whole(self, path: Path, log: LogReader) -> None:
        """Raises `LogError` if *log*, in *path*, is not what was written."""
        if self.num_bytes < 0:
            if not log.is_closed:
                raise LogError(f"{path} is not whole any more")
            return
        # Without an end mark it may be whole up to anywhere, for all that it says itself.
        whole = path.stat().st_size - sum(tail.num_bytes for tail in log.torn)
        if whole < self.num_bytes:
            raise LogError(f"{path} is whole up to byte {whole} only, of {self.num_bytes} that were written")


class SegmentReader:
    """Of *segment*, in the file *path*. *copy*: brings its copy, or says None if there is none; it is asked once, with
    what is wrong here. A context manager; payloads must not be used after its end. Raises `LogError`."""

    def __init__(
        self, path: Path, segment: SentSegment, copy: Callable[[LogError], Path | None] | None = None
    ) -> None:
        self._segment, self._copy = segment, copy
        self._open = contextlib.ExitStack()
        try:
            self._log = self._opened(path)
        except LogError as error:
            self._log = self._instead(error)

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def newest(self) -> Iterator[tuple[Channel, int, int]]:
        """See `LogReader.newest`."""
        return self._log.newest()

    def has(self, channel: Channel, number: int) -> bool:
        """Whether that message is there."""
        return self._log.has(channel, number)

    def read_last(self, channel: Channel, number: int) -> tuple[Header, memoryview]:
        """See `LogReader.read_last`."""
        try:
            return self._log.read_last(channel, number)
        except LogError as error:
            self._log = self._instead(error)
        return self._log.read_last(channel, number)

    def _instead(self, error: LogError) -> LogReader:
        copy, self._copy = self._copy, None
        try:
            path = copy(error) if copy is not None else None
            if path is not None:
                return self._opened(path)
        except LogError as of_copy:
            raise LogError(f"{error}; and its copy: {of_copy}") from of_copy
        raise error

    def _opened(self, path: Path) -> LogReader:
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(LogReader(path))
            self._segment.check_whole(path, log)
            self._open.push(opened.pop_all())
        return log
