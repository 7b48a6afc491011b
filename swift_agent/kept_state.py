"""The state of a worker in a file of its node, for new workers of a job that changes its size.

In it is what a replica would send (`swift_recovery.replica`), before it the checksum of what all replicas share. The
file gets its name when it is complete. Must never decide who keeps, and never leave half a file under that name.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Any, BinaryIO

import torch
from torch import Tensor

from swift_agent.errors import ReplicaMismatch
from swift_agent.handover import Done
from swift_agent.tracking import Tracked
from swift_recovery.replica import receive_state, send_state

_SIZE = struct.Struct(">Q")


_NAME = "kept-state"


def remove(directory: str, but: int | None = None) -> None:
    """Remove the files below *directory*. With *but*: not that of this iteration, nor what is being written."""
    for name in os.listdir(directory):
        spared = but is not None and (name == f"{_NAME}.{but}" or name.endswith(".part"))
        if name.startswith(f"{_NAME}.") and not spared:
            os.remove(os.path.join(directory, name))


def path_of(directory: str, iteration: int) -> str:
    """Files of several iterations may be there: the agent may not have heard of the newest."""
    return os.path.join(directory, f"{_NAME}.{iteration}")


def keep(directory: str, iteration: int, tracked: Tracked, offer: dict[str, Any]) -> None:
    """Write the state before *iteration* and *offer*, see `Place.offer`. Raises OSError; then there is no such file."""
    path = path_of(directory, iteration)
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb", buffering=1 << 20) as stream:
            stream.write(_SIZE.pack(tracked.checksum() & (1 << 64) - 1))
            send_state(tracked.state, offer, [_FileLink(stream)])
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def load(directory: str, iteration: int, tracked: Tracked) -> Any:
    """Receive the state into *tracked*; the offer that was kept with it. Raises `ReplicaMismatch` if it differs from
    what was kept, OSError or EOFError."""
    with open(path_of(directory, iteration), "rb", buffering=1 << 20) as stream:
        wanted = _SIZE.unpack(_read(stream, _SIZE.size))[0]
        offer = receive_state(tracked.state, _FileLink(stream), staged=False)
    found = tracked.checksum() & (1 << 64) - 1
    if found != wanted:
        raise ReplicaMismatch(f"the state that was kept has checksum {wanted:016x}, what was loaded has {found:016x}")
    return offer


class _FileLink:
    """A `swift_recovery.replica.Link` whose other side is a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, tensor: Tensor) -> Done:
        self._stream.write(memoryview(tensor.numpy()))  # type: ignore[arg-type]
        return Done()

    def recv(self, tensor: Tensor) -> Done:
        memory = memoryview(tensor.numpy())  # type: ignore[arg-type]
        while memory:
            size = self._stream.readinto(memory)  # type: ignore[attr-defined]
            if not size:
                raise EOFError("a kept state ends early")
            memory = memory[size:]
        return Done()

    def send_bytes(self, data: bytes) -> None:
        self._stream.write(_SIZE.pack(len(data)) + data)

    def recv_bytes(self) -> bytes:
        return _read(self._stream, _SIZE.unpack(_read(self._stream, _SIZE.size))[0])


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("a kept state ends early")
    return data
