"""What ranks tell each other when all are connected again."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent.worker.rejoin.replays import Replays
from swift_recovery.planning.planner import make_plan
from swift_recovery.planning.reports import RankReport


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
            parts: Any = (
                SimpleNamespace(rank=rank, replays=False), SimpleNamespace(note=print), SimpleNamespace(store=store),
                SimpleNamespace(messages=of_rank), torch.device("cpu"), SimpleNamespace(),
            )  # fmt: skip
            Replays(*parts).go_on(go)
    finally:
        dist.destroy_process_group()
    assert calls == ["again"]
