"""Keeps a `View` of one job up to date and tells its listeners.

One listing, then one watch that goes on from the listing's revision; if the watch cannot be resumed without a gap (the
store was compacted meanwhile) the job is listed again. While the store is away the last view stays: training goes on.

This module must never decide anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.view import Change, Damaged, View, apply, view_of_entries
from swift_rendezvous.store.kv import Compacted, KeyValueStore, Watch, WatchResponse
from swift_rendezvous.threads import OnFailure, only_logged, start, thread

log = logging.getLogger(__name__)


class Scope(IntEnum):
    """How much of a job is followed."""

    FORMING = 0
    """What sorts before `Keys.for_members`. It is known which nodes were there at the listing."""
    MEMBER = 1
    """What sorts before `Keys.for_coordinator`."""
    WHOLE = 2


def scope_of(view: View, me: str | None) -> Scope:
    """What a node of incarnation *me* has to follow, as far as *view* tells; None: a spectator, it wants all. Pure."""
    if me is None or (view.coordinator is not None and view.coordinator.incarnation == me):
        return Scope.WHOLE
    return Scope.FORMING if view.generation is None and view.result is None else Scope.MEMBER


def knows_coordinator(view: View) -> bool:
    """Whether the node of the coordinator is in *view*. While a job forms it may have come after the listing. Pure."""
    coordinator = view.coordinator
    node = None if coordinator is None else view.nodes.get(coordinator.node_id)
    return coordinator is None or (node is not None and node.incarnation == coordinator.incarnation)


def followed_before(keys: Keys, scope: Scope) -> str | None:
    """The key at which *scope* ends; None: it is all of the job. Pure."""
    return {Scope.FORMING: keys.for_members, Scope.MEMBER: keys.for_coordinator, Scope.WHOLE: None}[scope]


class JobWatcher:
    """Follows the keys of one job in a daemon thread. `listener` runs in that thread with every new view: keep it
    short.

    A node follows only what it needs (`scope_of`): what all write and all read is work for the square of their number.
    When it needs more, at the first generation or because it is the coordinator now, the job is listed again, and
    followed so from then on. While the job forms it is also listed again when a node becomes coordinator that has come
    later, which the others then watch.
    """

    def __init__(
        self, store: KeyValueStore, keys: Keys, listener: Callable[[View], None], me: str | None = None,
        on_failure: OnFailure = only_logged,
    ) -> None:  # fmt: skip
        self._me = me
        self._store = store
        self._keys = keys
        self._listener = listener
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._named: dict[str, Damaged] = {}
        self._lock = threading.Lock()
        self._thread = thread("swift-job-watch", self._run, on_failure)

    def start(self) -> View:
        """List the job, start to follow it and return the first view. Raises what the store raises."""
        self._first = self._list(Scope.FORMING, None)
        start(self._thread)
        return self._first[0]

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._watch is not None:
                self._watch.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _list(self, at_least: Scope, known: View | None) -> tuple[View, int, Scope]:
        """The view of a listing, its revision, and how much has to be followed from there on. *known*: the last one."""
        scope = Scope.WHOLE if self._me is None else max(at_least, Scope.MEMBER)
        while True:
            entries, revision = self._store.get_prefix(self._keys.prefix, before=followed_before(self._keys, scope))
            view = view_of_entries(self._keys, entries, known)
            self._name_damaged(view)
            wanted = max(at_least, scope_of(view, self._me))
            if wanted <= scope:
                # Deletions leave no key: the listing may be newer than its newest record.
                return replace(view, revision=max(view.revision, revision)), revision, wanted
            scope = wanted

    def _run(self) -> None:
        view, revision, scope = self._first
        listed = True
        while not self._stopped.is_set():
            try:
                if not listed:
                    view, revision, scope = self._list(scope, view)
                    listed = True
                    self._listener(view)
                with self._lock:
                    if self._stopped.is_set():
                        return
                    before = followed_before(self._keys, scope)
                    self._watch = self._store.watch_prefix(self._keys.prefix, revision + 1, before=before)
                for response in self._watch:
                    view = self._fold(view, response)
                    revision = response.revision
                    wanted = scope_of(view, self._me)
                    if wanted > scope or (scope is Scope.FORMING and not knows_coordinator(view)):
                        # Not told: a node would act on half of what there is.
                        self._watch.cancel()
                        scope, listed = max(scope, wanted), False
                        break
                    self._listener(view)
            except Compacted:
                log.info("the history of the store was compacted: listing the job again")
                listed = False
            except RendezvousError as error:
                log.warning("the watch on the job ended: %s", error)
                self._stopped.wait(0.5)

    def _fold(self, view: View, response: WatchResponse) -> View:
        for event in response.events:
            kv = event.kv
            value = kv.value if event.kind == "put" else None
            view = apply(view, self._keys, Change(kv.key, value, kv.mod_revision, kv.create_revision))
            if kv.key == self._keys.result and view.result is not None:
                # It may be deleted in the same response, by a job that has ended while we were away.
                self._listener(view)
        self._name_damaged(view)
        return view

    def _name_damaged(self, view: View) -> None:
        """Once each."""
        for name, damaged in view.damaged.items():
            if self._named.get(name) != damaged:
                log.error("the record %s%s %s", self._keys.prefix, name, damaged.why)
        self._named = dict(view.damaged)
