"""What this rank has received, as a checksum of each message: what is sent to it again must be the same.

Since the newest checkpoint that counts, eight bytes for each message, and of the newest ones only where there is none
for long. A replacement is told them, and compares what it would send to a rank that has it; the log of its predecessor
may be gone with the node. They find accidents, such as kernels whose sums have no order; they keep out no attacker.

Must never read a log, or decide what is sent.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import astuple

from torch import Tensor

from swift_logging_store.errors import NotLoggable
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import digest_of

_UNKNOWN = 0
_ITEM_BYTES = 8
MAX_VALUES = 1 << 18
"""Of a channel: 2 MiB. When there are so many the older half is let go."""


class Digests:
    """By channel, of messages from some number on without a gap."""

    def __init__(self) -> None:
        self._first: dict[Channel, int] = {}
        self._values: dict[Channel, array[int]] = {}

    def add(self, channel: Channel, number: int, tensor: Tensor) -> None:
        """A message has come; those of a channel in their order."""
        values = self._values.get(channel)
        if values is None or number != self._first[channel] + len(values):  # no wait for those between
            values = self._values[channel] = array("Q")
            self._first[channel] = number
        try:
            # Of another device it would have to be copied, and waited for.
            values.append(digest_of(tensor) if tensor.is_cpu else _UNKNOWN)
        except NotLoggable:
            values.append(_UNKNOWN)
        if len(values) >= MAX_VALUES:
            del values[: MAX_VALUES // 2]
            self._first[channel] += MAX_VALUES // 2

    def keep_before(self, counts: Mapping[Channel, int]) -> None:
        """Messages from these numbers on will come again."""
        for channel, values in self._values.items():
            del values[max(0, counts.get(channel, 0) - self._first[channel]) :]

    def keep_from(self, counts: Mapping[Channel, int]) -> None:
        """Those before these numbers will not be sent again."""
        for channel, values in self._values.items():
            if (num := min(len(values), counts.get(channel, 0) - self._first[channel])) > 0:
                del values[:num]
                self._first[channel] += num

    def differs(self, channel: Channel, number: int, tensor: Tensor) -> bool:
        """Whether another message of that number has come. False if that is unknown."""
        values = self._values.get(channel)
        at = number - self._first[channel] if values is not None else -1
        if values is None or not 0 <= at < len(values) or values[at] == _UNKNOWN:
            return False
        try:
            return digest_of(tensor) != values[at]
        except NotLoggable:
            return False

    def to_bytes(self, source: int) -> bytes:
        """Of what that rank has sent, for `from_bytes`: a line that says what follows, and the checksums."""
        mine = [channel for channel in self._values if channel.source == source]
        head = [[*astuple(channel), self._first[channel], len(self._values[channel])] for channel in mine]
        return b"\n".join([json.dumps(head).encode(), b"".join(self._values[channel].tobytes() for channel in mine)])

    def take(self, data: bytes) -> None:
        """What another rank has received. Raises `ValueError` for what `to_bytes` did not write."""
        head, _, body = data.partition(b"\n")
        at = 0
        for *fields, first, num in json.loads(head):
            channel, values = Channel(*fields), array("Q")
            values.frombytes(body[at : at + num * _ITEM_BYTES])
            if len(values) != num:
                raise ValueError(f"{len(values)} checksums of {num}")
            self._first[channel], self._values[channel] = first, values
            at += num * _ITEM_BYTES
