"""A log goes from rank to rank in pieces, and nobody waits for one in an operation of the groups, which has a timeout:
who sends may have to bring it from a store first, and who receives may be busy with another rank's for long.

Must never decide what is sent, or to whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swift_recovery.replica import Link

# The first pause between two looks, and the longest; each is twice the one before.
_PAUSES_S = (0.0002, 0.005)


class TurnLink:
    """*link*, where each of both sides tells the other through *store*, of this transfer alone, when it is there.
    *check* raises when a recovery is cut."""

    def __init__(self, link: Link, store: Any, check: Callable[[], object]) -> None:
        self._link, self._store, self._check = link, store, check
        self._number = 0

    def send_bytes(self, data: bytes) -> None:
        if not self._number:
            self._wait_for("wanted")
        self._store.set(str(self._number), "")
        self._number += 1
        self._link.send_bytes(data)

    def recv_bytes(self) -> bytes:
        if not self._number:
            self._store.set("wanted", "")
        self._wait_for(str(self._number))
        self._number += 1
        return self._link.recv_bytes()

    def _wait_for(self, key: str) -> None:
        pause_s = _PAUSES_S[0]
        while not self._store.check([key]):
            self._check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
