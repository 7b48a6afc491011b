"""Which messages of its channels a rank has sent and received, and what follows from that after a cut. Pure.

A message is known by its channel and its number there. A cut loses what was under way between any two ranks, and some
begin an iteration again, with what their logs give, while others stay where they were. So each rank tells where it
stands and how many messages of each channel it has (`told`), and each sender then sends again, from its log, what lies
between that and what it has sent (`rejoin`); what it sends itself from then on, and the receiver has, is left out
(`is_had`).

Nothing is sent in an iteration once all agree to its update. So a rank that has made it has sent all that the next
iteration's begin finds sent, and the sender's word on this counts: a receiver that was cut between its update and a
receive after it never takes what it has left out (`follow`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from swift_logging_store.format.record import Channel

Stand = Literal["begin", "middle", "end"]


@dataclass(frozen=True)
class Inventory:
    """Of the messages of one rank, when all are connected again and go on with one iteration.

    *stands*: at its "begin", in its "middle", or still at the "end" of the one before, after that one's update. *has*:
    so many messages of each channel need not come any more. *sent*: so many were sent before that iteration.
    """

    stands: Stand
    has: Mapping[Channel, int]
    sent: Mapping[Channel, int]


class Counts:
    """Of one rank. Numbers of a channel begin at 0.

    *sent*: messages that were sent, or left out. *asked*: receives that have begun; *here*: those that are done.
    """

    def __init__(self) -> None:
        self.sent: dict[Channel, int] = {}
        self.asked: dict[Channel, int] = {}
        self.here: dict[Channel, int] = {}
        self._had: dict[Channel, int] = {}
        self._late: frozenset[int] = frozenset()
        self._has_left_out = False
        self._begun: tuple[dict[Channel, int], dict[Channel, int]] = ({}, {})

    def set(self, sent: Mapping[Channel, int], received: Mapping[Channel, int]) -> None:
        """Go on counting from there."""
        self.sent, self.asked, self.here = dict(sent), dict(received), dict(received)
        self.begin()

    def set_as_seen(self, rank: int, others: Collection[Inventory]) -> None:
        """Go on where *others* are, which begin the same iteration as this *rank*, which knows of no message. Of two
        such ranks both begin at 0."""
        self.set(
            {channel: num for told in others for channel, num in told.has.items() if channel.source == rank},
            {channel: num for told in others for channel, num in told.sent.items() if channel.destination == rank},
        )

    def begin(self) -> None:
        """An iteration begins."""
        self._begun = (self.sent.copy(), self.asked.copy())

    def end(self) -> None:
        """It is over: all that it has asked for is here."""
        if self.here != self.asked:
            self.here = self.asked.copy()
        self._has_left_out = False

    def pass_over(self) -> None:
        """It is over, but for receives that were left out."""
        self.end()
        self._has_left_out = True

    def rewind(self) -> None:
        """It will be run again from its start."""
        self.set(*self._begun)

    def send(self, channel: Channel) -> int:
        """The number of a message that is sent now."""
        number = self.sent.get(channel, 0)
        self.sent[channel] = number + 1
        return number

    def is_had(self, channel: Channel, number: int) -> bool:
        """Whether its receiver has that message already."""
        return number < self._had.get(channel, 0)

    def is_waited_for(self, channel: Channel, number: int) -> bool:
        """Whether its receiver stands at the end of the iteration before the plan's, and does not have it."""
        return channel.destination in self._late and not self.is_had(channel, number)

    def ask(self, channel: Channel) -> int:
        """The number of a message for which a receive begins now."""
        number = self.asked.get(channel, 0)
        self.asked[channel] = number + 1
        return number

    def receive(self, channel: Channel) -> None:
        """The first of the receives that have begun is done."""
        self.here[channel] = self.here.get(channel, 0) + 1

    def told(self, stands: Stand, taken: Mapping[Channel, int]) -> Inventory:
        """For the `rejoin` of the others. *taken*: so many messages are in logs that were taken."""
        has = {channel: max(self.here.get(channel, 0), taken.get(channel, 0)) for channel in {**self.here, **taken}}
        return Inventory(stands, has, self._sent_before(stands))

    def rejoin(self, stands: Stand, told: Mapping[int, Inventory], replays: Collection[int]) -> dict[Channel, range]:
        """All are connected again; *told*: by each of the others, but for those that repeat iterations, *replays*:
        they were given all that was sent, and go on with what comes next. Which messages are to be sent again; those
        that a receiver has are left out from now on."""
        self._had = {channel: count for other in told.values() for channel, count in other.has.items()}
        self._late = frozenset(rank for rank, other in told.items() if other.stands == "end")
        before, missing = self._sent_before(stands), {}
        for channel, sent in self.sent.items():
            if channel.destination in replays:
                continue
            had = self._had.get(channel, 0)
            if told[channel.destination].stands == "begin":  # it has left out what it lacks of earlier ones
                had = self._had[channel] = max(had, before.get(channel, 0))
            if had < sent:
                missing[channel] = range(had, sent)
        return missing

    def follow(self, stands: Stand, sent: Mapping[Channel, int]) -> Channel | None:
        """*sent*: to this rank before the plan's iteration, on all channels of one sender. A rank at its begin that
        has left out receives counts on from there. Returns a channel on which others have counted otherwise, if there
        is one: a message was not received in the iteration in which it was sent."""
        if stands == "end":
            return None
        if stands == "begin" and self._has_left_out:
            self.asked.update(sent)
            self.here.update(sent)
        asked = self.asked if stands == "begin" else self._begun[1]
        return next((channel for channel, count in sent.items() if asked.get(channel, 0) != count), None)

    def _sent_before(self, stands: Stand) -> dict[Channel, int]:
        return dict(self._begun[0] if stands == "middle" else self.sent)
