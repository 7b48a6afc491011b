"""Which messages of its channels a rank has sent and received, and what follows from that after a cut. Pure.

A message is known by its channel and its number there. A cut loses what was under way between any two ranks, and some
begin an iteration anew, with what their logs give, while others stay where they were. So each rank tells how many
messages of each channel it has (`told`), and each sender then sends again, from its log, what lies between that and
what it has sent (`rejoin`); what it sends itself from then on, and the receiver has, is left out (`is_had`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swift_logging_store.record import Channel


class Counts:
    """Of one rank. Numbers of a channel begin at 0.

    *sent*: messages that were sent, or left out. *asked*: receives that have begun; *here*: those that are done.
    """

    def __init__(self) -> None:
        self.sent: dict[Channel, int] = {}
        self.asked: dict[Channel, int] = {}
        self.here: dict[Channel, int] = {}
        self._had: Mapping[Channel, int] = {}
        self._begun: tuple[dict[Channel, int], dict[Channel, int]] = ({}, {})

    def set(self, sent: Mapping[Channel, int], received: Mapping[Channel, int]) -> None:
        """Go on counting from there."""
        self.sent, self.asked, self.here = dict(sent), dict(received), dict(received)
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self._begun = (self.sent.copy(), self.asked.copy())

    def end(self) -> None:
        """It is over: all that it sent was received in it, and the other way round."""
        if self.here != self.asked:
            self.here = self.asked.copy()

    def rewind(self) -> None:
        """It will be run again from its start."""
        self.set(*self._begun)

    def forget(self) -> None:
        """What others have does not count: all begin the iteration anew."""
        self._had = {}

    def send(self, channel: Channel) -> int:
        """The number of a message that is sent now."""
        number = self.sent.get(channel, 0)
        self.sent[channel] = number + 1
        return number

    def is_had(self, channel: Channel, number: int) -> bool:
        """Whether its receiver has that message already."""
        return number < self._had.get(channel, 0)

    def ask(self, channel: Channel) -> int:
        """The number of a message for which a receive begins now."""
        number = self.asked.get(channel, 0)
        self.asked[channel] = number + 1
        return number

    def receive(self, channel: Channel) -> None:
        """The first receive of those that have begun is done."""
        self.here[channel] = self.here.get(channel, 0) + 1

    def told(self, taken: Mapping[Channel, int]) -> dict[Channel, int]:
        """How many messages of each channel need not come any more. *taken*: so many are in logs that were taken."""
        return {
            channel: max(self.here.get(channel, 0), taken.get(channel, 0)) for channel in {**self.here, **taken}
        }

    def rejoin(self, told: Mapping[int, Mapping[Channel, int]], replays: Collection[int]) -> dict[Channel, range]:
        """All ranks are connected anew; *told*: what each of the others has, but for those that repeat iterations,
        *replays*: they were given all that was sent, and go on with what comes next. Which messages are to be sent
        again; those that a receiver has are left out from now on."""
        self._had = {channel: count for counts in told.values() for channel, count in counts.items()}
        missing = {}
        for channel, sent in self.sent.items():
            if channel.destination not in replays and (had := self._had.get(channel, 0)) < sent:
                missing[channel] = range(had, sent)
        return missing
