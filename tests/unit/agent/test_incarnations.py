"""A node that comes back asks until it may, or until nobody is there any more who could let it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent import incarnations
from swift_agent.agent.incarnations import Incarnations
from swift_rendezvous.roster.records import ResultRecord
from swift_rendezvous.store.kv import StoreUnavailable


def test_it_does_not_wait_for_an_etcd_that_is_gone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def away(*parts: Any) -> None:
        tries.append(1)
        raise StoreUnavailable("connection refused")

    monkeypatch.setattr(incarnations, "Presence", away)
    monkeypatch.setattr(incarnations, "RETRY_S", 0.0)
    monkeypatch.setattr(incarnations, "rejoin_delay_s", lambda before_s, stayed_s: 0.0)
    signals: Any = SimpleNamespace(exception=None)
    left: Any = SimpleNamespace(abandon=lambda: None, job=7)
    config, nothing = SimpleNamespace(node_id="n0"), None
    why = lambda: "it has ended 4 times" if len(tries) == 3 else ""  # noqa: E731
    back = Incarnations(config, nothing, nothing, "127.0.0.1", nothing, signals, why).come_back(left)  # type: ignore[arg-type]
    assert back == ResultRecord("stopped", "it has ended 4 times") and len(tries) == 3
