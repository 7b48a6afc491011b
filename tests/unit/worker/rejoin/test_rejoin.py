"""What ranks tell each other when all are connected again, and who repeats iterations before it joins."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_recovery.planning.planner import make_plan
from swift_recovery.planning.reports import RankReport


def rejoin_of(supervisor: Any = None, **place: Any) -> Rejoin:
    groups = SimpleNamespace(store=place.pop("store", None))
    tracked = SimpleNamespace(messages=place.pop("messages", None))
    made = (SimpleNamespace(**place), supervisor or SimpleNamespace(note=print), groups, tracked)
    return Rejoin(*cast(Any, made), torch.device("cpu"), lambda: None)


def test_a_rank_that_logs_does_not_wait_for_those_that_do_not() -> None:
    """Ranks 0 and 1 are replicas, a stage with DDP; rank 2 is a stage alone. Rank 1 was lost."""
    reports = [RankReport(0, "holding", 3, replicas=(0, 1)), RankReport(2, "holding", 3, replicas=(2,), logs=True)]
    plan = make_plan(reports, 3)
    assert plan.kind == "copy" and plan.sources == {1: 0} and not plan.stays and not plan.replays
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    go = cast(Any, SimpleNamespace(plan=plan, generation=2))
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    calls: list[str] = []
    messages = SimpleNamespace(told=lambda iteration: {}, start_over=lambda: calls.append("again"))
    try:
        for rank, of_rank in ((0, None), (1, None), (2, messages)):
            rejoin_of(rank=rank, replays=False, store=store, messages=of_rank)._go_on_with_messages(go)
    finally:
        dist.destroy_process_group()
    assert calls == ["again"]


def test_a_lone_replacement_that_is_stopped_once_it_has_joined_repeats_first() -> None:
    entered: list[int] = []
    supervisor = SimpleNamespace(
        note=print,
        peek_go=lambda: SimpleNamespace(generation=len(entered) + 2, leaves=False, keeps=False),
        enter_go=lambda go: True,
        interrupted=True,
    )
    rejoin = rejoin_of(supervisor, replays=True, replays_alone=True)
    rejoin._enter = lambda go: entered.append(go.generation)  # type: ignore[method-assign]
    assert rejoin.run() and entered == [2]
