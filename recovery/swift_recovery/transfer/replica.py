"""Copy the state of a worker to others over links: chunk size and manifest first, then all bytes.

    chunk size, checksum of the manifest, manifest | chunk | chunk | ... | checksum of all chunks

Both sides work out the same sequence of chunks from the manifest, so nothing but bytes is sent: large tensors as
slices of their own memory, small ones packed together. Several chunks are under way at a time. Checksums find what is
altered on its way, whatever it is: a replica is compared with others by its parameters only. Must never send or receive
anything that has not been planned, and must never leave a transfer open behind on success.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup

from swift_recovery.errors import StateError, TransferError
from swift_recovery.state.checksum import checksum
from swift_recovery.state.incoming import Incoming
from swift_recovery.state.tensors import Layout, copy_all, memory_bytes, wire_bytes
from swift_recovery.state.training_state import Outgoing

CHUNK_BYTES = 16 << 20
# Below this a tensor is packed: a message of its own costs more than copying it once.
SMALL_BYTES = 256 << 10
_MAX_MANIFEST_BYTES = 1 << 30
# Chunks under way: the next ones are packed or posted while earlier ones travel.
_WINDOW = 4


class Pending(Protocol):
    """A transfer under way; ``wait`` returns when it is done and raises if it failed."""

    def wait(self) -> Any: ...


class Sendable(Protocol):
    """What can be copied: a `TrainingState`, or a part of one (`patch.PatchState`)."""

    def collect(self, extra: Any = None) -> Outgoing: ...

    def prepare(self, manifest: bytes, staged: bool) -> Incoming: ...


class Link(Protocol):
    """An ordered connection to one other worker.

    ``device``: where tensors must lie to be sent or received (the CPU for gloo, a GPU for NCCL). ``send`` and ``recv``
    start the transfer of a contiguous one-dimensional uint8 tensor, in the order of the calls, and do not wait for it.
    """

    @property
    def device(self) -> torch.device: ...

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def send(self, tensor: Tensor) -> Pending: ...

    def recv(self, tensor: Tensor) -> Pending: ...


class GroupLink:
    """:class:`Link` to *peer*, a rank within *group*, by point-to-point messages of one *tag*."""

    def __init__(self, group: ProcessGroup, peer: int, device: torch.device | None = None, tag: int = 0) -> None:
        self._group, self._peer, self._tag = group, peer, tag
        self._device = device or torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def send(self, tensor: Tensor) -> Pending:
        work: Pending = self._group.send([tensor], self._peer, self._tag)
        return work

    def recv(self, tensor: Tensor) -> Pending:
        work: Pending = self._group.recv([tensor], self._peer, self._tag)
        return work

    def send_bytes(self, data: bytes) -> None:
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        self.send(size.view(torch.uint8)).wait()
        if data:
            self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)).wait()

    def recv_bytes(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.recv(size.view(torch.uint8)).wait()
        num_bytes = int(size.item())
        if not 0 <= num_bytes <= _MAX_MANIFEST_BYTES:
            raise StateError(f"a peer announced a message of {num_bytes} bytes")
        data = bytearray(num_bytes)
        if data:
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.recv(payload).wait()
            torch.frombuffer(data, dtype=torch.uint8).copy_(payload)
        return bytes(data)


@dataclass(frozen=True)
class Chunk:
    """One message: whole small tensors one after the other, or bytes ``start`` to ``stop`` of one large tensor."""

    indices: tuple[int, ...]
    start: int
    stop: int
    is_packed: bool

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def plan_chunks(layouts: Sequence[Layout], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Messages that carry tensors of *layouts*; a pure function, so both sides agree. Empty tensors need none.

    A packed chunk holds tensors of one type of device only, so that it can be packed and unpacked there.
    """
    chunks: list[Chunk] = []
    packs: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for index, layout in enumerate(layouts):
        size, device = layout.num_bytes, layout.device_type
        if size > min(SMALL_BYTES, chunk_bytes):
            starts = range(0, size, chunk_bytes)
            chunks += [Chunk((index,), start, min(start + chunk_bytes, size), False) for start in starts]
        elif size:
            if filled.get(device, 0) + size > chunk_bytes:
                chunks.append(Chunk(tuple(packs.pop(device)), 0, filled.pop(device), True))
            packs.setdefault(device, []).append(index)
            filled[device] = filled.get(device, 0) + size
    chunks += [Chunk(tuple(indices), 0, filled[device], True) for device, indices in packs.items()]
    return chunks


class Digest:
    """Of the chunks that go through the links of one device, in their order: XXH3-64 on the CPU, else a sum that is
    made where they are (see `checksum`)."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, chunk: Tensor) -> None:
        if chunk.device.type == "cpu":
            self._hash.update(memoryview(chunk.numpy()))  # type: ignore[arg-type]
        else:
            self._hash.update(checksum([chunk]).to_bytes(8, "big", signed=True))

    def bytes(self) -> bytes:
        return self._hash.digest()


def send_state(
    state: Sendable, extra: Any, links: Sequence[Link], *, chunk_bytes: int = CHUNK_BYTES, checked: bool = True
) -> int:
    """Send the state as it is now, and *extra*, over every one of *links*; returns the bytes sent to each.

    *extra*: a tree for the codec, such as ``Snapshot.tree()``. The state must not change until this returns, which is
    when every link has taken everything. *checked* False: without checksums, for a link that has its own. Raises
    :class:`StateError` before anything is sent if the state cannot be described, and what a link raises if it fails;
    the transfers to the others are then unfinished.
    """
    outgoing = state.collect(extra)
    for link in links:
        link.send_bytes(_with_plan(outgoing.manifest, chunk_bytes, checked))
    devices = {link.device for link in links}
    digests = {device: Digest() for device in devices} if checked else {}
    under_way: deque[tuple[list[Pending], list[Tensor]]] = deque()
    source = _Source(outgoing)
    chunks = plan_chunks(outgoing.layouts, chunk_bytes)
    for chunk in chunks:
        if len(under_way) == _WINDOW:
            _wait(under_way.popleft()[0])
        payload = source.payload(chunk)
        # One copy for each device, not for each link.
        copies = {device: payload.to(device) for device in devices}
        for device, digest in digests.items():
            digest.add(copies[device])
        # The tensors are held until their transfer is over.
        under_way.append(([link.send(copies[link.device]) for link in links], [*copies.values()]))
    for pending, _ in under_way:
        _wait(pending)
    for link in links if checked else ():
        link.send_bytes(digests[link.device].bytes())
    return sum(chunk.num_bytes for chunk in chunks)


def receive(state: Sendable, link: Link, *, staged: bool) -> Incoming:
    """Receive what :func:`send_state` sends, without installing it: the caller commits (``TrainingState.prepare``).

    Returns when all bytes are there. Raises :class:`StateError` for a manifest that does not fit (before any live state
    has changed; the sender then waits in vain and the link has to be closed), :class:`TransferError` if something has
    not come as it was sent, and what the link raises if it fails.
    """
    chunk_bytes, manifest, checked = _without_plan(link.recv_bytes())
    digest = Digest() if checked else None
    incoming = state.prepare(manifest, staged)
    targets = incoming.tensors
    rings = _Rings()
    under_way: deque[tuple[Pending, Chunk, Tensor]] = deque()
    for chunk in plan_chunks(incoming.layouts, chunk_bytes):
        if len(under_way) == _WINDOW:
            _finish(*under_way.popleft(), targets, digest)
        if chunk.is_packed:
            buffer = rings.next(link.device, chunk.num_bytes)
        else:
            target = _memory(targets[chunk.indices[0]])[chunk.start : chunk.stop]
            buffer = target if target.device == link.device else torch.empty_like(target, device=link.device)
        under_way.append((link.recv(buffer), chunk, buffer))
    for pending, chunk, buffer in under_way:
        _finish(pending, chunk, buffer, targets, digest)
    if digest is not None and link.recv_bytes() != digest.bytes():
        raise TransferError("a state was altered on its way: its checksum differs")
    return incoming


def receive_state(state: Sendable, link: Link, *, staged: bool) -> Any:
    """:func:`receive`, then commit; returns the ``extra`` that was sent."""
    return receive(state, link, staged=staged).commit()


class _Rings:
    """Buffers for packed chunks, used again once ``_WINDOW`` later ones were asked for: by then they are free."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._turn = 0

    def next(self, device: torch.device, num_bytes: int) -> Tensor:
        ring = self._buffers.setdefault(device, [torch.empty(0, dtype=torch.uint8, device=device)] * _WINDOW)
        self._turn = (self._turn + 1) % _WINDOW
        if ring[self._turn].numel() < num_bytes:
            ring[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return ring[self._turn][:num_bytes]


class _Source:
    """Payloads of chunks, in the order of the plan."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._tensors = outgoing.tensors
        self._rings = _Rings()
        self._open: tuple[int, Tensor] | None = None

    def payload(self, chunk: Chunk) -> Tensor:
        if not chunk.is_packed:
            index = chunk.indices[0]
            if self._open is None or self._open[0] != index:
                # Kept over the chunks of one tensor: the bytes of a tensor with gaps are a copy.
                self._open = (index, wire_bytes(self._tensors[index]))
            return self._open[1][chunk.start : chunk.stop]
        device = self._tensors[chunk.indices[0]].device
        flat = self._rings.next(device, chunk.num_bytes)
        return torch.cat([wire_bytes(self._tensors[index]).to(device) for index in chunk.indices], out=flat)


def _finish(
    pending: Pending, chunk: Chunk, buffer: Tensor, targets: Sequence[Tensor], digest: Digest | None
) -> None:
    pending.wait()
    if digest is not None:
        digest.add(buffer)
    views = [_memory(targets[index]) for index in chunk.indices]
    if not chunk.is_packed:
        if views[0].device != buffer.device:
            views[0][chunk.start : chunk.stop].copy_(buffer)
        return
    pieces = buffer.to(views[0].device).split_with_sizes([view.numel() for view in views])
    copy_all(views, pieces)


def _memory(target: Tensor) -> Tensor:
    view = memory_bytes(target)
    assert view is not None, "prepare() gives tensors without gaps only"
    return view


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()


def _with_plan(manifest: bytes, chunk_bytes: int, checked: bool) -> bytes:
    digest = f" {xxhash.xxh3_64_hexdigest(manifest)}" if checked else ""
    return f"{chunk_bytes}{digest}\n".encode() + manifest


def _without_plan(message: bytes) -> tuple[int, bytes, bool]:
    head, _, manifest = message.partition(b"\n")
    size, is_checked, digest = head.partition(b" ")
    if not size.isdigit() or not 0 < int(size) <= _MAX_MANIFEST_BYTES:
        raise StateError("a peer sent a manifest without a chunk size")
    if is_checked and digest != xxhash.xxh3_64_hexdigest(manifest).encode():
        raise TransferError("the description of a state was altered on its way: its checksum differs")
    return int(size), manifest, bool(is_checked)
