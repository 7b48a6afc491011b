"""The log of what this process sends: on a disk of its node, and copied to a store if the user has named one.

It takes no more room than it may: when half of that is used the oldest of what is in the store is deleted on the node,
and comes back, two segments at a time, for each reader. A log that lacks something is of no use to a rank that repeats
iterations; so when there is no room left, or the disk fails, it is given up as a whole, until the next checkpoint.
Training never waits for the store; a reader does.

Must never decide which rank is given what was sent.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.log.archive import Archive
from swift_logging_store.log.checked_segment import SegmentReader, SentSegment
from swift_logging_store.log.predecessor import SENT
from swift_logging_store.log.prefetch import ahead
from swift_logging_store.log.rate import LogFigures, Rate
from swift_logging_store.log.writer import SEGMENT_BYTES, LogWriter

# Of a log that is copied to a store, in the room on its node, at least: what is being written has no copy yet.
_NUM_SEGMENTS = 8
# Of training for the disk, in all, that is worth a word; then twice as much, and so on.
_FIRST_WAIT_S = 1.0


class SentLog:
    """By rank *rank*, below *directory*, which is this process's own. *num_bytes*: what it may take there, and *limit*:
    what that is, in words. *note* tells people. *is_ours*: see `Archive`.
    *copied_to*: the URL of a store and this log's directory in it; None: no copies.

    *incomplete*: why it lacks something, '' if it has all.
    """

    def __init__(
        self, rank: int, directory: Path, num_bytes: int, limit: str, note: Callable[[str], None],
        is_ours: Callable[[], bool] = lambda: True, copied_to: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.incomplete = ""
        self._rank, self._note = rank, note
        self._directory, self._brought = directory / SENT, directory / "brought"
        self._bytes, self._limit = num_bytes, limit
        self._bytes_left = num_bytes
        self._for_good = False  # given up
        self._next_note_at_s = _FIRST_WAIT_S
        self._archive = Archive(*copied_to, note, is_ours) if copied_to else None
        self._num_logs = 0
        self._lock = threading.Lock()
        self._num_readers = 0  # guarded by the lock
        self._any_writer: LogWriter | None = None
        self._past = LogFigures()  # of writers before that one
        with self._giving_up():  # a full disk is no reason for the job to end
            self._any_writer = self._new_writer()

    @property
    def written(self) -> Rate:
        """To the disk of the node, since this log was begun last."""
        return self._any_writer.written if self._any_writer is not None else Rate()

    @property
    def copied(self) -> Rate | None:
        """To the store; None: to none."""
        return self._archive.copied if self._archive is not None else None

    @property
    def figures(self) -> LogFigures:
        """Since this process began, also of logs that were given up."""
        past, writer, archive = self._past, self._any_writer, self._archive
        copied = archive.copied if archive is not None else Rate()
        fetched = archive.fetched if archive is not None else Rate()
        return LogFigures(
            past.written_bytes + (writer.written.num_bytes if writer is not None else 0),
            past.waited_ns + (int(writer.wait_s * 1e9) if writer is not None else 0),
            copied.num, copied.num_bytes, int(copied.seconds * 1e9),
            fetched.num, fetched.num_bytes, int(fetched.seconds * 1e9),
            archive.num_failures if archive is not None else 0,
            bool(self.incomplete),
        )  # fmt: skip

    @property
    def _writer(self) -> LogWriter:
        """Of a log that was not given up."""
        assert self._any_writer is not None
        return self._any_writer

    def append(self, channel: Channel, number: int, tensor: Tensor, *, iteration: int, generation: int) -> None:
        """A message that is sent; nothing if this log was given up."""
        if self.incomplete:
            return
        self._bytes_left -= tensor.numel() * tensor.element_size()
        with self._giving_up():
            if self._bytes_left < 0 and not self._make_room():
                self.give_up(f"{self._limit} is used up")
                return
            self._writer.append(channel, number, tensor, iteration=iteration, generation=generation)

    def end_iteration(self) -> None:
        """A good moment for what takes time."""
        if self.incomplete:
            return
        writer = self._writer
        writer.wake()
        if writer.wait_s >= self._next_note_at_s:
            self._next_note_at_s = 2 * writer.wait_s
            self._note(
                f"training has waited {writer.wait_s:.1f} s so far for the log of messages: they are sent faster than "
                f"the disk of {self._directory} takes them (--message-log DIR: another one)"
            )
        if self._archive is not None and self._bytes_left < self._bytes // 2:
            with self._giving_up(), self._lock:
                if not self._num_readers:  # else there will be another moment
                    self._make_room()

    def begin_checkpoint(self, iteration: int) -> bool:
        """A checkpoint of the state before *iteration* is taken. Whether a log that was given up begins again."""
        if not self.incomplete:
            with self._giving_up():
                self._writer.roll()
            return False
        if self._for_good:
            return False
        with self._giving_up():
            self._any_writer = self._new_writer()
            self._bytes_left, self.incomplete = self._bytes, ""
            self._note(f"messages are logged again; with the checkpoint of iteration {iteration} they are of use again")
        return not self.incomplete

    def drop(self, before: int) -> None:
        """What was sent before that iteration is not needed any more."""
        if self.incomplete:
            return
        with self._giving_up():
            freed, names = self._writer.drop(before)
            self._bytes_left += freed
            if self._archive is not None:
                self._archive.remove(names)

    def give_up(self, why: str, *, for_good: bool = False) -> None:
        """Log no more until the next checkpoint; what was logged is of no use without the rest."""
        self.incomplete, self._for_good = why, for_good
        until = "" if for_good else "; with job.checkpoint() until the next one counts"
        self._note(
            f"messages are logged no more: {why}. If a rank without a replica is lost all workers start again{until}."
        )
        if self._any_writer is not None:
            with contextlib.suppress(LogError):
                self._any_writer.close()
        if self._archive is not None:
            self._archive.remove_all()
        shutil.rmtree(self._directory, ignore_errors=True)

    def segments(self) -> list[SentSegment]:
        """Of all that was sent so far, the oldest first. To be called by the sender. Raises `LogError`."""
        if self.incomplete:  # since it was counted on
            raise LogError(f"messages are logged no more: {self.incomplete}")
        num_bytes = self._writer.flush()
        ends: dict[Channel, int] = {}
        found: list[SentSegment] = []
        for path, firsts in reversed(self._writer.segments()):
            found.append(SentSegment(path, ends.copy(), -1 if found else num_bytes))
            for channel, first in firsts.items():
                ends[channel] = min(first, ends.get(channel, first))
        return found[::-1]

    def read(
        self, segments: Iterable[SentSegment], check: Callable[[], object], *, all_of_them: bool
    ) -> Generator[tuple[SegmentReader, SentSegment], None, None]:
        """Each is to be used until the next one is asked for. What is in the store only is brought; if *all_of_them*
        are wanted, while the one before is used. What turns out to be damaged on this node is brought, too. To be
        closed, or used up; by any thread. Raises `LogError`, and what *check* does, which may be called in another
        thread."""
        brought = self._brought / uuid.uuid4().hex[:8]
        locate = partial(self._located, segments, brought, check)
        with self._lock:
            self._num_readers += 1
        try:
            with (
                contextlib.closing(ahead(locate, 1) if all_of_them else locate(lambda: None)) as located,
                self._copying(brought, check) as copy,
            ):
                for path, segment in located:
                    is_copy = path.parent == brought
                    with SegmentReader(path, segment, None if is_copy else partial(copy, path.name)) as log:
                        yield log, segment
                    (brought / path.name).unlink(missing_ok=True)
        finally:
            with self._lock:
                self._num_readers -= 1
            shutil.rmtree(brought, ignore_errors=True)  # not what it is in, which others may be about to use

    def _located(
        self, segments: Iterable[SentSegment], brought: Path, check: Callable[[], object], stopped: Callable[[], None]
    ) -> Generator[tuple[Path, SentSegment], None, None]:
        """Where each of *segments* is now: in its place, or brought from the store."""

        def checks() -> None:
            stopped()
            check()

        archive, has_told = self._archive, False
        with archive.fetching(checks) if archive is not None else contextlib.nullcontext() as fetch:
            for segment in segments:
                path = segment.path
                if fetch is not None and not path.exists():
                    if not has_told:
                        has_told = True
                        self._note(f"what was sent is not all on this node: the rest comes from {archive}")
                    path = _fetched(fetch, path.name, brought)
                yield path, segment

    @contextlib.contextmanager
    def _copying(
        self, brought: Path, check: Callable[[], object]
    ) -> Iterator[Callable[[str, LogError], Path | None]]:
        """A function that brings a segment of that name, which is damaged here, from the store; None: it is not there.
        """
        archive, has_told = self._archive, False
        with archive.fetching(check) if archive is not None else contextlib.nullcontext() as fetch:

            def copy(name: str, error: LogError) -> Path | None:
                nonlocal has_told
                if archive is None or fetch is None or name not in archive.stored:
                    return None
                path = _fetched(fetch, name, brought)
                if not has_told:
                    has_told = True
                    self._note(f"{error}: it comes from {archive}, as does what else turns out to be damaged here")
                return path

            yield copy

    def forget_predecessors(self) -> None:
        """What those that had this rank before have in the store is not needed any more."""
        if self._archive is not None:
            self._archive.remove_predecessors()

    def close(self) -> None:
        """Nothing of it is needed any more. What is on the node goes with the agent."""
        if self._archive is not None:
            self._archive.close()

    def _make_room(self) -> bool:
        """Delete what is in the store; whether there is room on this node now."""
        if self._archive is not None:
            wanted = self._bytes * 3 // 4 - self._bytes_left
            self._bytes_left += self._writer.evict(self._archive.stored, wanted)
        return self._bytes_left >= 0

    def _new_writer(self) -> LogWriter:
        self._directory.mkdir(parents=True, exist_ok=True)
        figures = self.figures
        self._past, self._any_writer = LogFigures(figures.written_bytes, figures.waited_ns), None
        self._num_logs += 1
        self._next_note_at_s = _FIRST_WAIT_S
        name = f"rank{self._rank}.{self._num_logs:04d}"
        if self._archive is None:
            return LogWriter(self._directory, name)
        segment_bytes = min(SEGMENT_BYTES, self._bytes // _NUM_SEGMENTS)
        return LogWriter(self._directory, name, segment_bytes=segment_bytes, on_closed=self._archive.add)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except (LogError, OSError) as error:
            self.give_up(str(error))


def _fetched(fetch: Callable[[str, Path], None], name: str, directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"segment {name} of the log cannot be brought to {directory}: {error}") from error
    fetch(name, directory / name)
    return directory / name
