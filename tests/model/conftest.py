"""What holds for all worlds: no clock runs in them, and each record is read once.

Time must not pass between two steps: what an agent saw of a peer ages within half a second of its clock, and a search
takes longer. The same few records are read again and again; reading each once makes the search several times faster.
"""

from __future__ import annotations

import functools
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from swift_rendezvous import codec
from swift_rendezvous.roster import view


@pytest.fixture(autouse=True)
def records_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = functools.cache(codec.decode)
    monkeypatch.setattr(view, "decode", known)


@pytest.fixture(autouse=True)
def no_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no module that a world is made of: code that moves takes its clock with it."""
    stopped = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0)
    rooms = ("swift_agent.agent.", "swift_rendezvous.node.")
    with_a_clock = [
        name for name, module in sys.modules.items() if name.startswith(rooms) and vars(module).get("time") is time
    ]
    assert {"swift_agent.agent.loop", "swift_rendezvous.node.coordinator"} <= set(with_a_clock)
    for name in with_a_clock:
        monkeypatch.setattr(sys.modules[name], "time", stopped)
