"""Who repeats iterations before it joins the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from swift_agent.worker.rejoin.rejoin import Rejoin


def rejoin_of(supervisor: Any = None, **place: Any) -> Rejoin:
    made = (SimpleNamespace(**place), supervisor or SimpleNamespace(note=print), SimpleNamespace(), SimpleNamespace())
    return Rejoin(*cast(Any, made), torch.device("cpu"), lambda: None)


def test_a_lone_replacement_that_is_stopped_once_it_has_joined_repeats_first() -> None:
    entered: list[int] = []
    supervisor = SimpleNamespace(
        note=print,
        peek_go=lambda: SimpleNamespace(generation=len(entered) + 2, leaves=False, keeps=False, share=0),
        enter_go=lambda go: True,
        interrupted=True,
    )
    rejoin = rejoin_of(supervisor, replays=True, replays_alone=True)
    rejoin._enter = lambda go: entered.append(go.generation)  # type: ignore[method-assign]
    assert rejoin.run() and entered == [2]
