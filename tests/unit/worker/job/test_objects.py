"""Objects that another rank sends, after the loop has begun; on torch's fake groups, where nobody sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent.worker.job.objects import Objects
from swift_agent.worker.tracked.object_results import ObjectResults


class GivenUp(Exception):
    pass


class Worker:
    """Rank 1 of two. *sent*: what the other one sends, in a real run."""

    def __init__(self) -> None:
        self.results = ObjectResults(2)
        self.place: Any = SimpleNamespace(tracked=None, rank=1, is_past_section=False)
        self.in_place: Any = SimpleNamespace(is_dry_run=False, give_up=self._give_up)
        self.objects = Objects(self.place, self.in_place)
        self.sent: list[Any] = []

    def _give_up(self, why: str) -> NoReturn:
        raise GivenUp(why)

    def broadcast(self, objects: list[Any], *, src: int = 0) -> list[Any]:
        call: Callable[..., Any] = dist.broadcast_object_list
        if not self.in_place.is_dry_run:
            call = lambda filled, *, src: filled.__setitem__(slice(None), self.sent)  # noqa: E731
        self.objects.make("broadcast_object_list", call, (objects,), {"src": src})
        return objects

    def scatter(self) -> list[Any]:
        filled: list[Any] = [None]
        call: Callable[..., Any] = dist.scatter_object_list
        if not self.in_place.is_dry_run:
            call = lambda output, given, src: output.__setitem__(0, self.sent[1])  # noqa: E731
        self.objects.make("scatter_object_list", call, (filled, None, 0), {})
        return filled

    def begin(self, *, dry_run: bool) -> None:
        self.in_place.is_dry_run = dry_run
        self.results.begin("section", 0, dry_run=dry_run)


@pytest.fixture
def worker() -> Iterator[Worker]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    one = Worker()
    one.place.tracked = SimpleNamespace(objects=one.results)
    yield one
    dist.destroy_process_group()


def test_a_run_for_the_result_is_given_what_another_rank_had_sent(worker: Worker) -> None:
    worker.begin(dry_run=False)
    worker.sent = [{"loss": 0.5}, "b"]
    assert worker.broadcast([None, None]) == [{"loss": 0.5}, "b"] and worker.scatter() == ["b"]
    worker.begin(dry_run=True)
    assert worker.broadcast([None, None]) == [{"loss": 0.5}, "b"] and worker.scatter() == ["b"]


def test_what_is_not_known_has_all_start_again(worker: Worker) -> None:
    """Torch would take the size of what comes from memory that nobody has written to."""
    for call in (lambda: worker.broadcast([None]), worker.scatter):
        worker.begin(dry_run=True)
        with pytest.raises(GivenUp, match="nobody sends rank 0's objects, and none are kept"):
            call()
    worker.begin(dry_run=False)
    worker.sent = [1, 2]
    worker.broadcast([None, None])
    worker.begin(dry_run=True)
    with pytest.raises(GivenUp):
        worker.broadcast([None])  # another call


def test_its_own_objects_it_has(worker: Worker) -> None:
    worker.begin(dry_run=True)
    assert worker.broadcast(["mine"], src=1) == ["mine"]


def test_groups_that_are_stopped_say_so(worker: Worker) -> None:
    worker.begin(dry_run=False)
    worker.place.is_past_section, worker.sent = True, ["what the stopped group says"]
    assert worker.broadcast([None]) == ["what the stopped group says"]
    assert worker.results.offer() == [2, []]


def test_nothing_is_kept_before_there_is_state(worker: Worker) -> None:
    worker.place.tracked, worker.sent = None, [5]
    assert worker.broadcast([None]) == [5]
    gathered: list[Any] = [None, None]
    worker.objects.make("all_gather_object", dist.all_gather_object, (gathered, 3), {})
    assert gathered == [3, 3]
