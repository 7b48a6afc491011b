"""What a new process repeats the iterations of its predecessor with: the messages that others have logged for it, and
what it sends again is compared with.

Iterations that were complete are repeated with what was taken alone. Where survivors stay in the one that was cut, that
is then used as far as it goes. Must never decide what is repeated, or send anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from swift_agent import log_transfer
from swift_agent.digests import Digests
from swift_agent.errors import CannotReplay
from swift_agent.log_transfer import BytesLink
from swift_agent.sent_before import SentBefore
from swift_logging_store.errors import LogError
from swift_logging_store.reader import LogReader
from swift_logging_store.record import Channel
from swift_logging_store.tensors import tensor_of


class Repetition:
    """With what is taken into *directory*. *sent_before*: by predecessors on this node; *note* tells people."""

    def __init__(self, directory: Path, sent_before: SentBefore, note: Callable[[str], None]) -> None:
        self._directory, self._sent_before, self._note = directory, sent_before, note
        self._theirs = Digests()  # of what this rank, in an earlier life, has sent
        self._source: LogReader | None = None
        self._together: frozenset[int] = frozenset()
        self.is_on = False
        """There is something to repeat with."""
        self.is_whole = False
        """All of an iteration is repeated."""

    def take(self, source: int, link: BytesLink) -> None:
        """What rank *source* gives (`log_transfer.send`)."""
        log_transfer.receive(self._directory, f"from{source}", link)

    def compare_with(self, digests: bytes) -> None:
        """Also with what another rank has received (`Digests.to_bytes`). Raises `ValueError`."""
        self._theirs.take(digests)

    def begin(self, together: Collection[int]) -> None:
        """From now on, but for messages of and to the ranks *together*, which repeat theirs, too."""
        self._together = frozenset(together)
        self._source = LogReader(self._directory)
        self._sent_before.open(self._note)
        self.is_on = self.is_whole = True

    def end_whole(self) -> None:
        """The iterations that were complete are repeated; of the next one, as much as there is."""
        self.is_whole = False

    def close(self) -> None:
        """Nothing more is repeated."""
        if self._source is not None:
            self._source.close()
            self._source = None
        self._sent_before.close()
        self._theirs = Digests()
        self.is_on = self.is_whole = False
        shutil.rmtree(self._directory, ignore_errors=True)

    def is_over(self, peer: int) -> bool:
        """Whether the messages of this iteration were exchanged before, by *peer* and the predecessor."""
        return self.is_whole and peer not in self._together

    def gives(self, channel: Channel, number: int) -> bool:
        """Whether that message comes from what was taken (`fill`)."""
        if self.is_whole:
            return channel.source not in self._together
        return self._source is not None and self._source.has(channel, number)

    def ends(self, begins: Mapping[Channel, int]) -> dict[Channel, int]:
        """The first number of each channel that was not taken, from *begins* on."""
        source = self._source
        if source is None:
            return {}
        return {channel: source.first_missing(channel, begins.get(channel, 0)) for channel in source.channels}

    def check_sent(self, channel: Channel, number: int, iteration: int, tensor: Tensor) -> None:
        """Raise `CannotReplay` if another message of that number was sent before."""
        if self._theirs.differs(channel, number, tensor) or self._sent_before.differs(
            channel, number, iteration, tensor
        ):
            raise CannotReplay(
                f"message {number} of {channel} is not what was sent before: the repetition differs from what was "
                "done (job.track(deterministic=True) names the operations of torch that do)"
            )

    def fill(self, tensor: Tensor, channel: Channel, number: int, iteration: int) -> None:
        """With that message. Raises `CannotReplay`."""
        assert self._source is not None
        try:
            header, payload = self._source.read(channel, number)
        except KeyError:
            raise CannotReplay(f"message {number} of {channel} is in nobody's log") from None
        except LogError as error:
            raise CannotReplay(str(error)) from None
        if header.iteration != iteration:
            raise CannotReplay(
                f"message {number} of {channel} was sent in iteration {header.iteration}, and is waited for in "
                f"{iteration}"
            )
        message = tensor_of(header, payload)
        if message.dtype != tensor.dtype or message.shape != tensor.shape:
            raise CannotReplay(
                f"message {number} of {channel} is {message.dtype} {list(message.shape)}, and what waits for it "
                f"{tensor.dtype} {list(tensor.shape)}: the repetition differs from what was done"
            )
        tensor.data.copy_(message)  # what waits for an activation is a leaf that requires a gradient
