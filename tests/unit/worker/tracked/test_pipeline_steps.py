"""First steps of pipeline schedules: heard once, and served to whoever comes later. On torch's fake backend."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import _utils, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent.errors import SwiftError, UsageError
from swift_agent.torch_private import pipelining
from swift_agent.torch_private import works as torch_works
from swift_agent.worker.in_place import InPlace
from swift_agent.worker.tracked.pipeline_steps import Pipelines
from tests.support.asked import Asked


class Schedule:
    """As far as its first step goes."""

    _n_microbatches = 4

    _loss_fn = print

    def __init__(self, *, p2p_per_edge: bool = False) -> None:
        self._stage = SimpleNamespace(p2p_per_edge=p2p_per_edge)  # not there before torch 2.15
        self._has_backward = True
        self._stage_forward_initialized = self._stage_backward_initialized = False


class Other(Schedule):
    pass


@pytest.fixture
def sent() -> list[int]:
    return []


@pytest.fixture
def make(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pipelines]]:
    """The pipelines of rank 1 of three; the n-th message that it gets is full of the number n."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)

    def recv(group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        sent.append(src)
        for tensor in tensors:
            tensor.fill_(len(sent))
        return torch_works.finished_work()

    def send(group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        sent.append(-dst)
        return torch_works.finished_work()

    def one(in_place: InPlace | None = None, **more: Any) -> Pipelines:
        monkeypatch.setattr(dist.ProcessGroup, "recv", recv)
        monkeypatch.setattr(dist.ProcessGroup, "send", send)
        monkeypatch.setattr(dist.ProcessGroup, "recv_anysource", dist.ProcessGroup.recv_anysource)
        for owner, name in ((schedules.PipelineScheduleSingle, "_initialize_stage"),
                            (schedules.PipelineScheduleMulti, "_initialize_stages")):  # fmt: skip
            monkeypatch.setattr(owner, name, getattr(owner, name))
        resets.clear()
        return Pipelines(in_place, **more)

    resets: list[Any] = []
    monkeypatch.setattr(pipelining, "reset_schedule", lambda schedule, first: resets.append((schedule, first)))
    yield one
    dist.destroy_process_group()


def step(pipelines: Pipelines, schedule: Any, mode: str = "training") -> list[float] | None:
    """As torch makes it: a first one, or one after another mode. What rank 1 heard in it, from rank 0 and then from
    rank 2; it tells rank 2 something in between. None: stages had nothing to tell each other."""
    schedule._has_backward = mode == "training"
    flags = schedule._stage_forward_initialized, schedule._stage_backward_initialized
    shapes = [torch.zeros(2), torch.zeros(2)]
    with pipelines._on_step(schedule, not flags[0] or flags[1] != schedule._has_backward):
        if schedule._stage_forward_initialized and schedule._stage_backward_initialized == schedule._has_backward:
            return None
        dist.recv(shapes[0], 0)
        dist.send(shapes[0], 2)
        dist.recv(shapes[1], 2)
        schedule._stage_forward_initialized, schedule._stage_backward_initialized = True, schedule._has_backward
    heard = [shape[0].item() for shape in shapes]
    for shape in shapes:
        shape.zero_()  # the stage may use that memory for something else
    return heard


def test_a_first_step_is_heard_by_a_replacement_as_its_predecessor_did(
    make: Callable[[], Pipelines], sent: list[int]
) -> None:
    first = make()
    assert step(first, Schedule()) == [1, 3]
    assert step(first, Other()) == [4, 6]
    assert all(one["mode"] is None for all_of in first.offer().values() for one in all_of)  # it may be run again
    first.end()
    offered = first.offer()
    replacement = make()
    replacement.give(offered)
    other, one = Other(), Schedule()
    assert step(replacement, other) == [4, 6] and step(replacement, one) == [1, 3] and len(sent) == 6
    assert step(replacement, one) is None
    replacement.end()
    assert replacement.offer().keys() == offered.keys()


def test_the_second_schedule_of_a_kind_has_its_own_first_step(make: Callable[[], Pipelines], sent: list[int]) -> None:
    first = make()
    heard = [step(first, Schedule()), step(first, Schedule())]
    first.end()
    replacement = make()
    replacement.give(first.offer())
    kept = [Schedule(), Schedule(), Schedule()]
    assert [step(replacement, kept[0]), step(replacement, kept[1])] == heard and len(sent) == 6
    assert step(replacement, kept[2]) == [7, 9]  # one that the others make now, too


def test_a_change_between_training_and_evaluation_is_one_of_all(
    make: Callable[..., Pipelines], sent: list[int]
) -> None:
    """Which a replacement makes with the others, and not alone; what it runs dry that they had behind them when it was
    told is nothing to them."""
    of_first, in_place = Asked(), Asked()
    first, schedule = make(of_first), Schedule()
    assert step(first, schedule) == [1, 3]
    of_first.now = 1, 0
    assert step(first, schedule, "evaluation") == [4, 6]
    of_first.now = 2, 0
    assert step(first, schedule) == [7, 9]
    first.end()
    in_place.dry, in_place.now = True, (1, 0)
    replacement, mine = make(in_place), Schedule()
    replacement.give(first.offer())
    assert step(replacement, mine, "evaluation") == [4, 6]
    replacement.end()
    in_place.dry, in_place.now = False, (3, 0)
    assert step(replacement, mine) == [7, 9] and len(sent) == 9  # the others train already
    in_place.now = 4, 0
    assert step(replacement, mine, "evaluation") == [10, 12]  # and change now
    replacement.end()
    late, his = make(in_place), Schedule()
    late.give(replacement.offer())
    in_place.dry, in_place.now = True, (3, 0)
    step(late, his)
    in_place.dry, in_place.now, before = False, (5, 0), len(sent)
    assert step(late, his) is not None and len(sent) == before + 3  # they change to training now, and so does he


def test_what_others_have_counted_and_this_process_runs_dry_is_the_mode_of_all(
    make: Callable[..., Pipelines], sent: list[int]
) -> None:
    """They evaluate in a section in which it was cut, and then all change back."""
    in_place = Asked()
    pipelines, schedule = make(in_place), Schedule()
    assert step(pipelines, schedule) == [1, 3]
    in_place.now = 1, 0
    assert step(pipelines, schedule, "evaluation") == [4, 6]
    in_place.now = 1, 1
    assert step(pipelines, schedule) == [7, 9]
    pipelines.end()
    in_place.now, in_place.dry, before = (9, 1), True, len(sent)
    assert step(pipelines, schedule, "evaluation") == [4, 6] and len(sent) == before
    pipelines.end()
    offered, in_place.now, in_place.dry = pipelines.offer(), (9, 2), False
    assert step(pipelines, schedule) == [10, 12]
    new, before = make(in_place), len(sent)  # one that comes between the two
    new.give(offered)
    assert step(new, Schedule()) is not None and len(sent) == before + 3


def test_a_first_step_that_only_others_have_made_cannot_be_run_dry(make: Callable[..., Pipelines]) -> None:
    in_place = Asked()
    pipelines, schedule = make(in_place), Schedule()
    step(pipelines, schedule)
    pipelines.end()
    in_place.dry, in_place.now = True, (5, 0)
    with pytest.raises(SwiftError, match="This rank lacks the shapes that the stages exchanged"):
        step(pipelines, schedule, "evaluation")


def test_a_step_outside_of_iterations_and_sections_counts_at_once(make: Callable[..., Pipelines]) -> None:
    in_place = Asked()
    pipelines = make(in_place)
    in_place.inside = False
    heard = step(pipelines, Schedule(), "evaluation")
    new = make(in_place)
    new.give(pipelines.offer())
    assert step(new, Schedule(), "evaluation") == heard


def test_a_first_step_of_a_cut_iteration_did_not_happen(
    make: Callable[[], Pipelines], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines, schedule = make(), Schedule()
    step(pipelines, schedule)
    pipelines.rewind()
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
    again = step(pipelines, schedule)
    assert again == [4, 6]
    pipelines.pass_over()
    (known,) = pipelines.offer()["Schedule, training, 4 micro-batches"]
    assert [float(one[0]) for one in known["received"]["training"]] == again


def test_after_a_restart_a_first_step_that_was_none_before_is_marked(make: Callable[..., Pipelines]) -> None:
    """Until it counts, also in a process that comes meanwhile; not the one that makes a change of modes."""
    before, mine, other = make(), Schedule(), Other()
    step(before, mine)
    step(before, other, "evaluation")
    before.end()
    entered: list[str] = []

    @contextlib.contextmanager
    def unreduced() -> Iterator[None]:
        entered.append("in")
        yield

    restarted, schedule, changes = make(unreduced=unreduced), Schedule(), Other()
    restarted.give(before.offer())
    restarted.begin_anew()
    assert step(restarted, schedule) == [7, 9] and entered == ["in"], "they tell each other once more"
    assert step(restarted, changes) is not None and entered == ["in"], "so they would have without the restart"
    restarted.rewind()
    meanwhile = restarted.offer()
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
    step(restarted, schedule)
    restarted.end()
    assert entered == ["in", "in"]
    late, entered = make(unreduced=unreduced), entered
    late.give(meanwhile)
    step(late, Schedule())
    assert entered == ["in"] * 3
    assert "before" not in restarted.offer()["Schedule, training, 4 micro-batches"][0]
    restarted.rewind()
    schedule._stage_forward_initialized = False
    step(restarted, schedule)
    assert len(entered) == 3


def test_another_script_is_noticed(make: Callable[[], Pipelines]) -> None:
    first = make()
    step(first, Schedule())
    first.end()
    replacement, kept = make(), [Schedule(), Schedule()]
    replacement.give(first.offer())
    with pytest.raises(SwiftError, match="the same schedules"), replacement._on_step(kept[0], True):
        dist.recv(torch.zeros(3), 0)
    replacement = make()
    replacement.give(first.offer())
    with pytest.raises(SwiftError, match="the same schedules"), replacement._on_step(kept[1], True):
        for _ in range(3):
            dist.recv(torch.zeros(2), 0)


def test_a_first_step_that_makes_process_groups_is_refused(make: Callable[[], Pipelines], sent: list[int]) -> None:
    """As `pipeline_per_edge_p2p` of torch 2.15 has it do: a replacement would make them alone."""
    with pytest.raises(UsageError, match="pipeline_per_edge_p2p is on"):
        step(make(), Schedule(p2p_per_edge=True))
    assert sent == []


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_what_torch_would_not_have_sent_is_not_unpickled(make: Callable[[], Pipelines]) -> None:
    """torch unpickles what it gets; a checkpoint may come from somebody else."""
    pipelines = make()
    meta = _utils._TensorMeta(torch.Size([2, 3]), (3, 1), torch.bfloat16, True)

    def offered(content: Any) -> Any:
        data = content if isinstance(content, bytes) else pickle.dumps(content)
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        known = {"mode": "training", "received": {"training": [torch.ones(1), payload]}}
        return {"Schedule, training, 4 micro-batches": [known]}

    pipelines.give(offered(meta))
    module, name = b"torch.distributed.pipelining._utils", b"torch.os.system"
    dotted = b"\x80\x04\x8c%c%b\x8c%c%b\x93." % (len(module), module, len(name), name)
    assert pickle.loads(dotted) is os.system
    for content in (Evil(), [os.system], torch.nn.Linear(1, 1), torch.load, dotted):
        with pytest.raises(SwiftError, match="it is not what torch sends"):
            pipelines.give(offered(content))
