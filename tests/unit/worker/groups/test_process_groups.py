"""What is connected in vain goes away in the background, and its store after it."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_agent.worker.groups import connecting
from swift_agent.worker.groups.errors import GroupsAborted
from swift_agent.worker.groups.process_groups import ProcessGroups


class Store:
    def __init__(self) -> None:
        self.is_closed = closed

    def cut(self) -> None: ...

    def close(self) -> None:
        self.is_closed.set()


closed = threading.Event()


def test_the_store_of_backends_that_nobody_will_use_outlives_them() -> None:
    closed.clear()
    may_end, is_ending = threading.Event(), threading.Event()

    def release() -> None:
        is_ending.set()
        may_end.wait(20)

    library = SimpleNamespace(Forward=lambda *what: SimpleNamespace(exchange=lambda backend: None, release=release))
    groups = ProcessGroups(library)
    attempt = connecting.Attempt(
        [], store=None, open_store=cast(Any, Store), timeout=timedelta(seconds=20), dispose=groups._dispose
    )
    attempt.run()
    store = weakref.ref(attempt.store)
    attempt.cancel("a peer is lost")
    with pytest.raises(GroupsAborted):
        groups._finish(attempt, [connecting.Built(object())])
    del attempt
    gc.collect()
    assert is_ending.wait(20) and store() is not None and not closed.is_set()
    may_end.set()
    assert closed.wait(20)
