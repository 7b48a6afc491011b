"""How much was moved, and how long that took. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    num_bytes: int = 0
    seconds: float = 0.0

    def more(self, num_bytes: int, seconds: float) -> Rate:
        return Rate(self.num_bytes + num_bytes, self.seconds + seconds)
