"""Both sides of a transfer wait for each other outside of operations, and can be cut there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from swift_agent.turns import TurnLink


class Line:
    def __init__(self) -> None:
        self.pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.num_receives = 0

    def send_bytes(self, data: bytes) -> None:
        self.pieces.put(data)

    def recv_bytes(self) -> bytes:
        self.num_receives += 1
        return self.pieces.get(timeout=60.0)


def both(check: Callable[[], object] = lambda: None) -> tuple[TurnLink, TurnLink, Line]:
    line, store = Line(), dist.HashStore()
    link: Any = line
    return TurnLink(link, store, check), TurnLink(link, store, check), line


def test_pieces_come_in_their_order_and_nobody_waits_in_an_operation() -> None:
    source, destination, line = both()
    got: list[bytes] = []
    taker = threading.Thread(target=lambda: got.extend(destination.recv_bytes() for _ in range(3)))
    giver = threading.Thread(target=lambda: [source.send_bytes(b"%d" % number) for number in range(2)])
    giver.start()
    giver.join(0.05)
    assert giver.is_alive() and line.pieces.empty()  # nobody takes it yet
    taker.start()
    giver.join(60.0)
    taker.join(0.05)
    assert taker.is_alive() and line.num_receives <= 2  # the third is still being brought
    source.send_bytes(b"2")
    taker.join(60.0)
    assert got == [b"0", b"1", b"2"]


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_recovery_that_is_cut(side: str) -> None:
    def check() -> None:
        raise ZeroDivisionError

    source, destination, _ = both(check)
    with pytest.raises(ZeroDivisionError):
        source.send_bytes(b"x") if side == "source" else destination.recv_bytes()
