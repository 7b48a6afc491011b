"""A state on its way to a replacement: whatever is altered is found, by checksums of what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swift_recovery.errors import StateError, TransferError
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer.replica import receive_state, send_state

EXTRA = {"position": {"iteration": 17, "batch": 3}, "seed": 12345}
Alter = Callable[[list[Any], nn.Module], None]


class Pipe:
    """A link to itself; *queue* is what is under way."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def send(self, tensor: Tensor) -> Pipe:
        self.queue.append(tensor.clone())
        return self

    def recv(self, tensor: Tensor) -> Pipe:
        tensor.copy_(self.queue.pop(0))
        return self

    def send_bytes(self, data: bytes) -> None:
        self.queue.append(bytes(data))

    def recv_bytes(self) -> bytes:
        data: bytes = self.queue.pop(0)
        return data

    def wait(self) -> None: ...


def trained() -> tuple[nn.Module, TrainingState]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, TrainingState({"model": model}, {"optimizer": optimizer}, {"scheduler": scheduler})


def text(old: bytes, new: bytes) -> Alter:
    def alter(queue: list[Any], model: nn.Module) -> None:
        assert queue[0].count(old) >= 1, queue[0]
        queue[0] = queue[0].replace(old, new, 1)

    return alter


def buffer(queue: list[Any], model: nn.Module) -> None:
    mean = dict(model.named_buffers())["1.running_mean"].numpy().tobytes()
    chunks = [item for item in queue if isinstance(item, Tensor)]
    (chunk,) = [chunk for chunk in chunks if mean in chunk.numpy().tobytes()]
    chunk[chunk.numpy().tobytes().index(mean) + 3] ^= 1


def slice_of_large(queue: list[Any], model: nn.Module) -> None:
    next(item for item in queue if isinstance(item, Tensor))[-1] ^= 128


def swapped(queue: list[Any], model: nn.Module) -> None:
    """Each is whole, but in the place of another."""
    places = [i for i, item in enumerate(queue) if isinstance(item, Tensor)]
    first, second = next((i, j) for i in places for j in places if i < j and len(queue[i]) == len(queue[j]))
    queue[first], queue[second] = queue[second], queue[first]


ALTERATIONS = {
    "learning rate": text(b'["lr",0.0001]', b'["lr",0.0801]'),
    "scheduler": text(b'["last_epoch",4]', b'["last_epoch",5]'),
    "position": text(b'["iteration",17]', b'["iteration",16]'),
    "seed": text(b"12345", b"12344"),
    "checksum of the manifest": lambda queue, model: queue.__setitem__(0, queue[0].replace(b" ", b" 0", 1)),
    "buffer": buffer,
    "large parameter": slice_of_large,
    "order": swapped,
    "checksum": lambda queue, model: queue.__setitem__(-1, bytes([queue[-1][0] ^ 1]) + queue[-1][1:]),
}


def transfer(alter: Alter, *, checked: bool = True) -> tuple[Any, nn.Module]:
    sender, source = trained()
    receiver, target = trained()
    pipe = Pipe()
    send_state(source, EXTRA, [pipe], chunk_bytes=90_000, checked=checked)
    alter(pipe.queue, sender)
    extra = receive_state(target, pipe, staged=False)
    assert not pipe.queue
    return extra, receiver


@pytest.mark.parametrize("checked", [True, False])
def test_what_arrives_as_it_was_sent_is_taken(checked: bool) -> None:
    extra, model = transfer(lambda queue, model: None, checked=checked)
    assert extra == EXTRA
    expected = trained()[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("what", ALTERATIONS)
def test_what_is_altered_on_its_way_is_not_taken(what: str) -> None:
    with pytest.raises(TransferError, match="altered on its way"):
        transfer(ALTERATIONS[what])


def test_a_chunk_size_that_is_none_is_refused() -> None:
    with pytest.raises(StateError, match="chunk size"):
        transfer(text(b"90000 ", b"9000x "))
