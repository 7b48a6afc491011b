"""What holds for all worlds: no clock runs in them, and each record is read once.

Time must not pass between two steps: what an agent saw of a peer ages within half a second of its clock, and a search
takes longer. The same few records are read again and again; reading each once makes the search several times faster.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent import executor, loop
from swift_rendezvous import codec
from swift_rendezvous.node import coordinator
from swift_rendezvous.roster import view


@pytest.fixture(autouse=True)
def records_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = functools.cache(codec.decode)
    monkeypatch.setattr(view, "decode", known)


@pytest.fixture(autouse=True)
def no_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0)
    monkeypatch.setattr(loop, "time", stopped)
    monkeypatch.setattr(executor, "time", stopped)
    monkeypatch.setattr(coordinator, "time", stopped)
