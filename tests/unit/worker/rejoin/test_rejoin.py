"""Who repeats iterations before it joins the others."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swift_agent.wire import messages as msg
from swift_agent.worker.rejoin import rejoin
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


def test_who_finds_no_room_to_keep_its_state_lives_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*what: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rejoin.node_file, "keep", full)
    sent: list[object] = []
    one = rejoin_of(SimpleNamespace(note=print, send=sent.append), offer=dict)
    one._tracked = cast(Any, SimpleNamespace(updates=None, state=None))
    one._keep(cast(Any, SimpleNamespace(kept="/tmp/swift-agent-x", plan=SimpleNamespace(iteration=3, sections=0))))
    (unfit,) = sent
    assert isinstance(unfit, msg.Unfit) and not unfit.hopeless
    assert unfit.why.startswith("its state cannot be kept in /tmp/swift-agent-x (No space left on device)")
