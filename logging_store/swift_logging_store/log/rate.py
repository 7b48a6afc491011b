"""How much was moved, in how many calls, and how long that took. Pure. This module must never read a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rate:
    num_bytes: int = 0
    seconds: float = 0.0
    num: int = 0

    def more(self, num_bytes: int, seconds: float) -> Rate:
        return Rate(self.num_bytes + num_bytes, self.seconds + seconds, self.num + 1)


class LogFigures(NamedTuple):
    """*written_bytes*: to the disk of the node; *waited_ns*: that training waited for that. *copies*: to the store of
    copies, *fetches*: from there. *num_failures*: requests to the store that failed. *num_given_up*: 1 while nothing is
    logged, since there is no room or the disk fails."""

    written_bytes: int = 0
    waited_ns: int = 0
    num_copies: int = 0
    copied_bytes: int = 0
    copies_ns: int = 0
    num_fetches: int = 0
    fetched_bytes: int = 0
    fetches_ns: int = 0
    num_failures: int = 0
    num_given_up: int = 0

    def plus(self, other: LogFigures) -> LogFigures:
        return LogFigures(*(one + another for one, another in zip(self, other, strict=True)))
