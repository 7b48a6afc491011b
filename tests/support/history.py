"""All that is ever written into one job's keys, in order, as etcd tells it: for tests that ask who wrote what when."""

from __future__ import annotations

import json
import threading
from typing import Any

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Event


class History:
    """Watches the job from the moment it is made until it is closed. Names are those of keys without their prefix."""

    def __init__(self, endpoint: str, job_id: str) -> None:
        config = EtcdConfig.from_environment({}, endpoints=endpoint)
        assert config is not None
        self._prefix = Keys(job_id).prefix
        self._store = EtcdStore(config)
        self._events: list[Event] = []  # only ever grows, at its end
        self._now: dict[str, bytes] = {}
        self._watch = self._store.watch_prefix(self._prefix)
        self._thread = threading.Thread(target=self._follow, name="history", daemon=True)
        self._thread.start()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watch.cancel()
        self._thread.join(5.0)
        self._store.close()

    def _follow(self) -> None:
        try:
            for response in self._watch:
                for event in response.events:
                    if event.kind == "put":
                        self._now[self._name(event.kv.key)] = event.kv.value
                    else:
                        self._now.pop(self._name(event.kv.key), None)
                self._events.extend(response.events)
        except RendezvousError:
            return

    def revision(self) -> int:
        """That of the store, now."""
        return self._store.get_prefix(self._prefix)[1]

    def now(self, name: str) -> dict[str, Any] | None:
        """The record under *name*, as far as the watch has told; it works while etcd is away, too."""
        value = self._now.get(name)
        return None if value is None else json.loads(value)

    def mark(self) -> int:
        """The end of what has been told so far; see `names_since`."""
        return len(self._events)

    def names_since(self, mark: int) -> list[str]:
        """The name of each put after *mark*, oldest first."""
        return [self._name(event.kv.key) for event in self._events[mark:] if event.kind == "put"]

    def left(self) -> list[str]:
        """Names of the keys that are there now."""
        return [self._name(entry.key) for entry in self._store.get_prefix(self._prefix)[0]]

    def puts(self, name: str, since: int = 0) -> list[dict[str, Any]]:
        """The records (not the bare values of `preload` and `release`) that were written under *name* after revision
        *since*, each with its `revision`."""
        return [
            {**json.loads(event.kv.value), "revision": event.kv.mod_revision}
            for event in self._events
            if event.kind == "put" and self._name(event.kv.key) == name and event.kv.mod_revision > since
        ]

    def written(self, since: int) -> set[str]:
        """Names of all keys that were put after revision *since*."""
        changed = [event for event in self._events if event.kv.mod_revision > since]
        return {self._name(event.kv.key) for event in changed if event.kind == "put"}

    def deleted(self, since: int) -> set[str]:
        changed = [event for event in self._events if event.kv.mod_revision > since]
        return {self._name(event.kv.key) for event in changed if event.kind == "delete"}

    def names(self) -> list[str]:
        """The name of each put, oldest first."""
        return [self._name(event.kv.key) for event in self._events if event.kind == "put"]

    def coordinator(self) -> str | None:
        """The node that coordinates now."""
        for event in reversed(self._events):
            if self._name(event.kv.key) == "coordinator":
                return str(json.loads(event.kv.value)["node_id"]) if event.kind == "put" else None
        return None

    def is_here(self, node_id: str) -> bool:
        for event in reversed(self._events):
            if self._name(event.kv.key) == f"nodes/{node_id}":
                return event.kind == "put"
        return False

    def _name(self, key: str) -> str:
        return key[len(self._prefix) :]
