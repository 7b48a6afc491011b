"""What a new process repeats the iterations of its predecessor with: the messages that others have logged for it, and
what it sends again is compared with.

    link of each source --thread--> files --> fill: waits for a message that has not come yet

Iterations that were complete are repeated with what is taken alone. Where survivors stay in the one that was cut, that
is then used as far as it goes; by then all has come. Must never decide what is repeated, or send anything.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import dtype_name, fill
from swift_logging_store.log import transfer
from swift_logging_store.log.digests import Digests
from swift_logging_store.log.predecessor import SentBefore
from swift_logging_store.log.prefetch import Stopped
from swift_logging_store.log.reader import LogReader
from swift_logging_store.log.transfer import BytesLink
from swift_recovery.errors import CannotReplay, CutReplay, LostLog, NotInLog
from swift_rendezvous.threads import has_started

# Given a function that raises when there is no reason to go on, which is to be called while the other side is slow.
Connect = Callable[[Callable[[], None]], AbstractContextManager[BytesLink]]
_CHECK_S = 0.05
# The longest that is waited for threads of which nothing is wanted any more.
_END_S = 1.0


class Repetition:
    """With what is taken into *directory*. *sent_before*: by predecessors on this node; *note* tells people.

    *waited_s*: for messages that had not come yet.
    """

    def __init__(self, directory: Path, sent_before: SentBefore, note: Callable[[str], None]) -> None:
        self._directory, self._sent_before, self._note = directory, sent_before, note
        self._theirs = Digests()  # of what this rank, in an earlier life, has sent
        self.together: frozenset[int] = frozenset()
        """The ranks that repeat iterations, this one among them."""
        self.is_on = False
        """There is something to repeat with."""
        self.is_whole = False
        """All of an iteration is repeated."""
        self.waited_s = 0.0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._source: LogReader | None = None
        self._coming: set[int] = set()  # from these ranks
        self._error: Exception | None = None
        self._is_closed = threading.Event()  # of what is taken now
        self._check: Callable[[], object] = lambda: None

    def take(self, links: Mapping[int, Connect]) -> None:
        """What these ranks give (`transfer.send`), in threads; it can be used as it comes. Raises `CannotReplay` if
        there is no place for it, `CutReplay` if there are not as many threads."""
        directory, is_closed = self._directory / uuid.uuid4().hex[:8], threading.Event()
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise _no_room(directory, error) from None
        self._source, self._coming, self._is_closed = LogReader(directory), set(links), is_closed
        self._error, self.waited_s = None, 0.0
        for source, connect in links.items():
            thread = threading.Thread(
                target=self._take, args=(source, connect, directory, is_closed), name=f"swift-log-from-{source}",
                daemon=True,
            )  # fmt: skip
            if not has_started(thread):
                is_closed.set()  # of those that have; all of it is of no use
                raise CutReplay(f"the log of rank {source} cannot be taken: this process has no thread left for it")
            self._threads.append(thread)

    def _take(self, source: int, connect: Connect, directory: Path, is_closed: threading.Event) -> None:
        def check() -> None:
            if is_closed.is_set():
                raise Stopped

        error: Exception | None = None
        try:
            with connect(check) as link:
                for path in transfer.receive(directory, f"from{source}", link):
                    with self._changed:
                        check()
                        assert self._source is not None
                        try:
                            self._source.add(path)
                        except LogError as why:
                            raise CannotReplay(f"what has come of the log of rank {source}: {why}") from None
                        self._changed.notify_all()
        except CannotReplay as why:
            error = why
        except LogError as why:
            error = CannotReplay(f"rank {source} cannot read what it has sent: {why}")
        except OSError as why:  # of this side's disk
            error = _no_room(directory, why)
        except Exception as why:  # whatever it is: a thread waits for this
            error = LostLog(f"the log of rank {source} did not come to its end: {why}")
        with self._changed:
            if is_closed.is_set():
                return
            if error is None:
                self._coming.discard(source)
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def is_lost(self) -> bool:
        """Whether it is known that not all will come. Any thread may ask."""
        return self._error is not None

    def wait(self, check: Callable[[], object]) -> None:
        """Until all has come. Raises `LostLog` if it does not, and what *check* does."""
        self._check = check
        self._wait_for(lambda: not self._coming)

    def _wait_for(self, is_there: Callable[[], object]) -> None:
        began_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or is_there(), _CHECK_S)
                # What has come is of no use without the rest: the sooner this is known, the sooner another one begins.
                if self._error is not None:
                    raise self._error
                if is_there():
                    break
            self._check()
        self.waited_s += time.monotonic() - began_s

    def compare_with(self, digests: bytes) -> None:
        """Also with what another rank has received (`Digests.to_bytes`). Raises `ValueError`."""
        self._theirs.take(digests)

    def begin(self, together: Collection[int], check: Callable[[], object]) -> None:
        """From now on, but for messages of and to the ranks *together*, which repeat theirs, too. *check* raises when
        it is of no use to wait. Raises `LostLog`, and nothing has begun, if it is known that not all will come."""
        if self._error is not None:
            raise self._error
        self._check = check
        self.waited_s = 0.0  # so far nothing was repeated
        self.together = frozenset(together)
        self._sent_before.open(self._note)
        self.is_on = self.is_whole = True

    def end_whole(self) -> None:
        """The iterations that were complete are repeated; of the next one, as much as there is. Raises `LostLog` if not
        all comes, and what *check* does."""
        self._wait_for(lambda: not self._coming)
        self.is_whole = False

    def close(self) -> None:
        """Nothing more is repeated, or taken."""
        with self._changed:
            self._is_closed.set()
            if self._source is not None:
                self._source.close()
                self._source = None
        deadline_s = time.monotonic() + _END_S
        for thread in self._threads:
            # One may still try to connect to a machine that is gone.
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._threads.clear()
        self._sent_before.close()
        self._theirs = Digests()
        self.is_on = self.is_whole = False
        shutil.rmtree(self._directory, ignore_errors=True)

    def is_over(self, peer: int) -> bool:
        """Whether the messages of this iteration were exchanged before, by *peer* and the predecessor."""
        return self.is_whole and peer not in self.together

    def gives(self, channel: Channel, number: int) -> bool:
        """Whether that message comes from what was taken (`fill`)."""
        if self.is_whole:
            return channel.source not in self.together
        return self._source is not None and self._source.has(channel, number)

    def ends(self, begins: Mapping[Channel, int]) -> dict[Channel, int]:
        """The first number of each channel that was not taken, from *begins* on."""
        source = self._source
        if source is None:
            return {}
        return {channel: source.first_missing(channel, begins.get(channel, 0)) for channel in source.channels}

    def has(self, channel: Channel, number: int) -> bool:
        """Whether that message was taken, or comes. Raises as `fill` does."""
        source = self._source
        assert source is not None
        self._wait_for(lambda: source.has(channel, number) or channel.source not in self._coming)
        return source.has(channel, number)

    def check_sent(self, channel: Channel, number: int, iteration: int, tensor: Tensor) -> None:
        """Raise `CannotReplay` if another message of that number was sent before."""
        if self._theirs.differs(channel, number, tensor) or self._sent_before.differs(
            channel, number, iteration, tensor
        ):
            raise CannotReplay(
                f"message {number} of {channel} is not what was sent before: the repetition differs from what was "
                "done (job.track(deterministic=True) names the operations of torch that do)"
            )

    def fill(self, tensor: Tensor, channel: Channel, number: int, iteration: int, *, what: str = "") -> None:
        """With that message, when it has come; *what* it is, for people. Raises `CannotReplay`, `NotInLog` if it was
        not logged, `LostLog` if not all that was to come does, and what *check* does."""
        source = self._source
        assert source is not None
        what = what or f"message {number} of {channel}"
        self._wait_for(lambda: source.has(channel, number) or channel.source not in self._coming)
        try:
            with self._changed:
                header, payload = source.read(channel, number)
        except KeyError:
            raise NotInLog(f"{what} is in nobody's log") from None
        except LogError as error:
            raise CannotReplay(str(error)) from None
        if header.iteration != iteration:
            raise CannotReplay(f"{what} was sent in iteration {header.iteration}, and is waited for in {iteration}")
        # Not the shape: a process group takes any of as many elements, as in the first step of a pipeline of torch's.
        if header.dtype != dtype_name(tensor.dtype) or math.prod(header.shape) != tensor.numel():
            raise CannotReplay(
                f"{what} is {header.dtype} {list(header.shape)}, and what waits for it {tensor.dtype} "
                f"{list(tensor.shape)}: the repetition differs from what was done"
            )
        fill(tensor, header, payload)


def _no_room(directory: Path, error: OSError) -> CannotReplay:
    return CannotReplay(f"logs of other ranks cannot be kept in {directory}: {error.strerror or error}")
