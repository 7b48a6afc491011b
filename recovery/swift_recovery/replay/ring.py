"""What the processes of a team send each other: frames, and sums of gradients along a ring of connections.

    frame: a head of JSON, then the bytes of its tensors | sum: from the left, own gradients added, to the right

Nothing that comes is unpickled. This module must never decide who is in the ring.
"""

from __future__ import annotations

import contextlib
import json
import select
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from swift_logging_store.errors import LinkLost
from swift_recovery.errors import StateError
from swift_recovery.state.tensors import Layout, layout_of, memory_bytes, new_tensor, wire_bytes
from swift_recovery.transfer.socket_link import Listener, SocketLink, connected

_CPU = torch.device("cpu")

Frame = tuple[dict[str, Any], list[Tensor]]
Pieces = Sequence[Mapping[int, Tensor]]
"""Gradients of parameters, by number, in the order in which they are to be added."""


# ---- frames ----


def send_frame(link: SocketLink, head: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
    on_cpu = [tensor.detach().cpu() for tensor in tensors]
    link.send_bytes(json.dumps({**head, "tensors": [layout_of(one).to_text() for one in on_cpu]}).encode())
    for one in on_cpu:
        link.send(wire_bytes(one))


def recv_frame(link: SocketLink) -> Frame:
    """Raises `LinkLost`, also for what is none."""
    head, layouts = _head(link)
    return head, [_recv_tensor(link, layout) for layout in layouts]


def _head(link: SocketLink) -> tuple[dict[str, Any], list[Layout]]:
    try:
        head = json.loads(link.recv_bytes())
        return head, [Layout.from_text(text) for text in head.pop("tensors")]
    except (ValueError, KeyError, TypeError, AttributeError, StateError) as error:
        raise LinkLost(f"what came from another process of the team is not understood: {error}") from None


def _recv_tensor(link: SocketLink, layout: Layout, into: Tensor | None = None) -> Tensor:
    """Into that memory, if it is of the kind: new one takes as long as what comes."""
    tensor, view = into, None
    if tensor is not None and tensor.is_cpu and layout_of(tensor) == layout:
        view = memory_bytes(tensor)  # None if it has gaps
    if tensor is None or view is None:
        tensor = new_tensor(layout, _CPU)
        view = memory_bytes(tensor)
    assert view is not None
    link.recv(view)
    return tensor


# ---- gradients ----


def pass_on(
    left: SocketLink | None, right: SocketLink | None, own: Pieces, parameters: Sequence[Tensor],
    into: Mapping[int, Tensor] = MappingProxyType({}),
) -> list[Tensor | None]:  # fmt: skip
    """Add *own* to the sums that come from the left, if there is a left, and pass the new ones on to the right, one
    parameter after the other. Returns them, None for a parameter without gradient. Tensors have the shape and device of
    the parameters. *into*: tensors that nobody needs any more when the sums come."""
    theirs = _layouts(_head(left)[0], parameters) if left is not None else {}
    layouts = {number: layout_of(one) for piece in reversed(own) for number, one in piece.items()} | theirs
    if right is not None:
        has = {number: layout.to_text() for number, layout in sorted(layouts.items())}
        right.send_bytes(json.dumps({"has": has, "tensors": []}).encode())
    sums: list[Tensor | None] = [None] * len(parameters)
    for number in sorted(layouts):
        total = None
        if number in theirs:
            assert left is not None
            total = _recv_tensor(left, theirs[number], into.get(number)).to(parameters[number].device)
        for piece in own:
            if number in piece:
                # As autograd does: the first one is taken, the others are added to it in place.
                total = piece[number] if total is None else total.add_(piece[number])
        assert total is not None
        sums[number] = total
        if right is not None:
            right.send(wire_bytes(total.detach().cpu()))
    return sums


def _layouts(head: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[int, Layout]:
    """Gradients may have another type and order in memory than their parameters; what sums them up sees both."""
    try:
        found = {int(number): Layout.from_text(text) for number, text in head["has"].items()}
        if any(layout.shape != tuple(parameters[number].shape) for number, layout in found.items()):
            raise ValueError("a gradient has not the shape of its parameter")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, StateError) as error:
        raise LinkLost(f"sums that came are not understood: {error}") from None
    return found


class Ring:
    """The connections of one process to its neighbours. A context manager."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._stack = contextlib.ExitStack()
        self.left: SocketLink | None = None
        self.right: SocketLink | None = None

    def connect(self, where: str, attempt: int, check: Callable[[], None]) -> None:
        """The left one, who listens *where*; then the right one, which does the same here. Raises `LinkLost`, and what
        *check* does."""
        self.close()
        self.left = self._stack.enter_context(connected(where, "a process of the team", check))
        send_frame(self.left, {"attempt": attempt})
        while True:
            link = self._stack.enter_context(self._listener.accepted(check))
            if recv_frame(link)[0].get("attempt") == attempt:  # else of an attempt that is over
                break
        self.right = link

    def close(self) -> None:
        self._stack.close()
        self.left = self.right = None


def is_readable(link: SocketLink) -> bool:
    return bool(select.select([link], [], [], 0)[0])
