"""A training state in a file: what a replica would send (`replica.send_state`), with a checksum of all of it.

    8 bytes `SWIFTSTA` | what `send_state` gives a link | XXH3-64 of everything before, 8 bytes, little-endian

Without the checksums of a link, as it has its own. A message of a link is its length in 8 bytes, big-endian, and its
bytes; tensors are their bytes alone. Must never decide which state is kept, where, or for how long.
"""

from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch
import xxhash
from torch import Tensor

from swift_recovery.errors import StateError
from swift_recovery.state.tensors import copy_all, new_tensor
from swift_recovery.state.training_state import Outgoing, TrainingState
from swift_recovery.transfer.replica import Sendable, receive, send_state

_MAGIC = b"SWIFTSTA"
_SIZE_BYTES = 8
_MAX_MESSAGE_BYTES = 1 << 30
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Written:
    """*num_bytes*: the size of the file. *checksum*: XXH3-64 of what is before its last 8 bytes."""

    num_bytes: int
    checksum: int


class StateCopy:
    """The state as it was when this was made, on the CPU: `write` may take its time while training goes on.

    Costs the size of the state in memory, and the time to copy it.
    """

    def __init__(self, state: TrainingState, extra: Any) -> None:
        live = state.collect(extra)
        tensors = [new_tensor(layout, _CPU) for layout in live.layouts]
        with torch.no_grad():
            copy_all(tensors, [tensor.detach() for tensor in live.tensors])
        # Layouts say where tensors were, and so where they are to lie again.
        self._outgoing = Outgoing(live.manifest, tensors, live.layouts)

    def collect(self, extra: Any = None) -> Outgoing:
        return self._outgoing

    def prepare(self, manifest: bytes, staged: bool) -> NoReturn:
        raise StateError("a copy of a state receives none")


def write(stream: BinaryIO, state: Sendable, extra: Any = None) -> Written:
    """*extra*: see `send_state`; a `StateCopy` has its own. Raises `StateError` for a state that cannot be described,
    and what the stream raises; the file is then of no use."""
    link = _FileLink(stream, "")
    link.write(_MAGIC)
    send_state(state, extra, [link], checked=False)
    written = Written(link.num_bytes + _SIZE_BYTES, link.hash.intdigest())
    stream.write(written.checksum.to_bytes(_SIZE_BYTES, "little"))
    return written


def read(stream: BinaryIO, name: str, state: TrainingState, expected: Written | None = None) -> Any:
    """Install the state in *state*, which must hold nothing of worth: what is large is read straight into it. Returns
    the *extra* that was written.

    Raises `StateError`, with the file's *name*, if it is not what was written (*expected*, where that is known) or
    holds the state of another model, and what the stream raises; parameters and optimizer state are then mixed.
    """
    link = _FileLink(stream, name)
    if link.read(len(_MAGIC)) != _MAGIC:
        raise StateError(f"{name} holds no training state")
    incoming = receive(state, link, staged=False)
    found = Written(link.num_bytes + _SIZE_BYTES, link.hash.intdigest())
    said = int.from_bytes(stream.read(_SIZE_BYTES), "little")
    if found.checksum != said or stream.read(1) or expected not in (None, found):
        raise StateError(f"{name} is damaged: it is not what was written")
    return incoming.commit()


class _Done:
    def wait(self) -> None: ...


class _FileLink:
    """A `replica.Link` whose other side is a file. *hash*, *num_bytes*: of what went through it."""

    device = _CPU

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.hash = xxhash.xxh3_64()
        self.num_bytes = 0

    def send(self, tensor: Tensor) -> _Done:
        self.write(memoryview(tensor.numpy()))  # type: ignore[arg-type]
        return _Done()

    def send_bytes(self, data: bytes) -> None:
        self.write(len(data).to_bytes(_SIZE_BYTES, "big"))
        self.write(data)

    def recv(self, tensor: Tensor) -> _Done:
        self._fill(memoryview(tensor.numpy()))  # type: ignore[arg-type]
        return _Done()

    def recv_bytes(self) -> bytes:
        size = int.from_bytes(self.read(_SIZE_BYTES), "big")
        if size > _MAX_MESSAGE_BYTES:
            raise StateError(f"{self._name} is damaged: it announces {size} bytes")
        return self.read(size)

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._count(data)

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, memory: memoryview) -> None:
        left = memory
        while left:
            size = self._stream.readinto(left)  # type: ignore[attr-defined]
            if not size:
                raise StateError(f"{self._name} is damaged: it ends early")
            left = left[size:]
        self._count(memory)

    def _count(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.num_bytes += len(data)
