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

from swift_rendezvous.keys import Keys, RecordError
from swift_rendezvous.kv import Compacted, KeyValueStore, RendezvousError, Watch, WatchResponse
from swift_rendezvous.view import Change, View, apply, view_of_entries

log = logging.getLogger(__name__)


class JobWatcher:
    """Follows the keys of one job in a daemon thread. `listener` runs in that thread with every new view: keep it
    short.

    With *me*, an incarnation, what only the coordinator reads (`Keys.for_coordinator`) is left out until that is *me*:
    every slot writes it in every generation, and all nodes reading it would be work for the square of their number.
    When *me* becomes the coordinator the job is listed again, whole, and followed so from then on.
    """

    def __init__(
        self, store: KeyValueStore, keys: Keys, listener: Callable[[View], None], me: str | None = None
    ) -> None:
        self._me = me
        self._follows_all = me is None
        self._store = store
        self._keys = keys
        self._listener = listener
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="swift-job-watch", daemon=True)

    def start(self) -> View:
        """List the job, start to follow it and return the first view. Raises what the store raises."""
        view, revision = self._list()
        self._first = (view, revision)
        self._thread.start()
        return view

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._watch is not None:
                self._watch.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _list(self) -> tuple[View, int]:
        entries, revision = self._store.get_prefix(self._keys.prefix)
        view = view_of_entries(self._keys, entries)
        # Deletions leave no key: the listing may be newer than its newest record.
        return replace(view, revision=max(view.revision, revision)), revision

    def _wants_all(self, view: View) -> bool:
        return self._follows_all or (view.coordinator is not None and view.coordinator.incarnation == self._me)

    def _run(self) -> None:
        view, revision = self._first
        self._follows_all = self._wants_all(view)
        whole = True  # the view is that of a listing, or was followed as it is to be followed now
        while not self._stopped.is_set():
            try:
                if not whole:
                    view, revision = self._list()
                    self._follows_all, whole = self._wants_all(view), True
                    self._listener(view)
                with self._lock:
                    if self._stopped.is_set():
                        return
                    before = None if self._follows_all else self._keys.for_coordinator
                    self._watch = self._store.watch_prefix(self._keys.prefix, revision + 1, before=before)
                for response in self._watch:
                    view = self._fold(view, response)
                    revision = response.revision
                    if self._wants_all(view) and not self._follows_all:
                        # Not told: the coordinator would decide on half of what there is.
                        self._watch.cancel()
                        whole = False
                        break
                    self._listener(view)
            except Compacted:
                log.info("the history of the store was compacted: listing the job again")
                whole = False
            except (RendezvousError, RecordError) as error:
                log.warning("the watch on the job ended: %s", error)
                self._stopped.wait(0.5)

    def _fold(self, view: View, response: WatchResponse) -> View:
        for event in response.events:
            kv = event.kv
            value = kv.value if event.kind == "put" else None
            try:
                view = apply(view, self._keys, Change(kv.key, value, kv.mod_revision, kv.create_revision))
            except RecordError as error:
                # Ending this thread would blind the agent for good; one record is the smaller loss.
                log.error("ignored the record %s: %s", kv.key, error)
            if kv.key == self._keys.result and view.result is not None:
                # It may be deleted in the same response, by a job that has ended while we were away.
                self._listener(view)
        return view
