"""First steps of pipeline schedules: heard once, and served to whoever comes later. On torch's fake backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent import torch_private
from swift_agent.errors import SwiftError
from swift_agent.pipelines import Pipelines


class Schedule:
    """As far as its first step goes."""

    _n_microbatches = 4


class Other(Schedule):
    pass


@pytest.fixture
def sent() -> list[int]:
    return []


@pytest.fixture
def make(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Pipelines]]:
    """The pipelines of rank 1 of three; the n-th message that it gets is full of the number n."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)

    def recv(group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        sent.append(src)
        for tensor in tensors:
            tensor.fill_(len(sent))
        return torch_private.finished_work()

    def send(group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        sent.append(-dst)
        return torch_private.finished_work()

    def one() -> Pipelines:
        monkeypatch.setattr(dist.ProcessGroup, "recv", recv)
        monkeypatch.setattr(dist.ProcessGroup, "send", send)
        monkeypatch.setattr(dist.ProcessGroup, "recv_anysource", dist.ProcessGroup.recv_anysource)
        for owner, name in ((schedules.PipelineScheduleSingle, "_initialize_stage"),
                            (schedules.PipelineScheduleMulti, "_initialize_stages")):  # fmt: skip
            monkeypatch.setattr(owner, name, getattr(owner, name))
        resets.clear()
        return Pipelines()

    resets: list[Any] = []
    monkeypatch.setattr(torch_private, "reset_schedule", lambda schedule, first: resets.append((schedule, first)))
    yield one
    dist.destroy_process_group()


def first_step(pipelines: Pipelines, schedule: Any) -> list[float]:
    """What rank 1 heard in it, from rank 0 and then from rank 2; it tells rank 2 something in between."""
    shapes = [torch.zeros(2), torch.zeros(2)]
    with pipelines._on_step(schedule, True):
        dist.recv(shapes[0], 0)
        dist.send(shapes[0], 2)
        dist.recv(shapes[1], 2)
    heard = [shape[0].item() for shape in shapes]
    for shape in shapes:
        shape.zero_()  # the stage may use that memory for something else
    return heard


def test_a_first_step_is_heard_by_a_newcomer_as_its_predecessor_did(
    make: Callable[[], Pipelines], sent: list[int]
) -> None:
    first = make()
    assert first_step(first, Schedule()) == [1, 3]
    assert first_step(first, Other()) == [4, 6]
    assert first.offer() == {}  # this iteration may be run again
    first.end()
    offered = first.offer()
    before = len(sent)
    newcomer = make()
    newcomer.give(offered)
    other, one = Other(), Schedule()
    assert first_step(newcomer, other) == [4, 6]
    assert first_step(newcomer, one) == [1, 3]
    assert len(sent) == before
    with newcomer._on_step(one, False):
        dist.recv(torch.zeros(2), 0)
    assert len(sent) == before + 1  # only the first step is repeated
    newcomer.end()
    assert newcomer.offer().keys() == offered.keys()


def test_the_second_schedule_of_a_kind_has_its_own_first_step(make: Callable[[], Pipelines], sent: list[int]) -> None:
    first = make()
    heard = [first_step(first, Schedule()), first_step(first, Schedule())]
    first.end()
    newcomer = make()
    newcomer.give(first.offer())
    before = len(sent)
    assert [first_step(newcomer, Schedule()), first_step(newcomer, Schedule())] == heard
    assert len(sent) == before
    assert first_step(newcomer, Schedule())[0] > before  # one that the others make now, too


def test_a_first_step_of_a_cut_iteration_did_not_happen(make: Callable[[], Pipelines], sent: list[int]) -> None:
    pipelines, schedule = make(), Schedule()
    first_step(pipelines, schedule)
    pipelines.rewind()
    assert pipelines.offer() == {}
    again = first_step(pipelines, schedule)
    assert again == [4, 6]
    pipelines.pass_over()
    assert [[float(one[0]) for one in step] for step in pipelines.offer()["Schedule of 4"]] == [again]


def test_another_script_is_noticed(make: Callable[[], Pipelines]) -> None:
    first = make()
    first_step(first, Schedule())
    first.end()
    newcomer = make()
    newcomer.give(first.offer())
    with pytest.raises(SwiftError, match="the same schedules"), newcomer._on_step(Schedule(), True):
        dist.recv(torch.zeros(3), 0)
    with pytest.raises(SwiftError, match="the same schedules"), newcomer._on_step(Schedule(), True):
        for _ in range(3):
            dist.recv(torch.zeros(2), 0)
