"""What holds for all worlds: no clock runs in them, and each record is read once.

Time must not pass between two steps: what an agent saw of a peer ages within half a second of its clock, and a search
takes longer. The same few records are read and written again and again; doing it once for each makes the search several
times faster.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent import transactions
from swift_rendezvous import codec
from swift_rendezvous.roster import view

ROOMS = ("swift_agent.agent.", "swift_rendezvous.", "tests.model.")


@pytest.fixture(autouse=True)
def records_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, encode = codec.decode, codec.encode
    read: Any = functools.cache(decode)
    known: Any = functools.cache(encode)

    def written(record: Any) -> Any:
        try:
            return known(record)
        except TypeError:  # it has mappings
            return encode(record)

    for module in [module for name, module in sys.modules.items() if name.startswith(ROOMS)]:
        if vars(module).get("decode") is decode:
            monkeypatch.setattr(module, "decode", read)
        if vars(module).get("encode") is encode:
            monkeypatch.setattr(module, "encode", written)
    assert vars(view)["decode"] is read and vars(transactions)["encode"] is written
    for kinds in (view._SIMPLE, view._PER_GENERATION, view._PER_SLOT):
        for name, kind in kinds.items():
            monkeypatch.setitem(kinds, name, replace(kind, read=functools.cache(kind.read)))


@pytest.fixture(autouse=True)
def nobody_reads_what_is_logged() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


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
