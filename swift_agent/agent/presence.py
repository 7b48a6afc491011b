"""This node in its job, under one incarnation: lease and record in etcd, and the threads that see and are seen.

    enter: listener --> lease, record --> keep-alive, watch, liveness ring, coordinator
    leave: all of these stopped; with a goodbye, or silently if the others shall take this node for lost (it then
           watches on until it is back, or knows how the job ended)

A node that was given up by the others comes back with a new presence. One whose lease was lost while it lived (etcd
was away for too long, it was revoked) gets another lease under the same incarnation, if no other has its slot
meanwhile: `reclaim`. Must never touch workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swift_agent.agent.journal.writer import Journal, open_journal
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.launch import host
from swift_agent.launch.config import DEFAULT_ROLE, AgentConfig
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node.coordinator import Coordinator
from swift_rendezvous.node.liveness import Liveness
from swift_rendezvous.node.registration import Entry, JobOver, PlaceLost, enter_job, leave_job, reclaim_place
from swift_rendezvous.node.suspicion import Limits
from swift_rendezvous.node.watcher import JobWatcher
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import JobRecord, NodeRecord, Owner, ResultRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store import tenure
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.kv import KeepAlive, KeyValueStore, Lease
from swift_rendezvous.threads import has_started, thread

log = logging.getLogger(__name__)

# The time that a node whose lease is gone has to come back by itself: ever, and after etcd was away, when it may have
# to connect again first. See `membership.missing`.
RETURN_S = 1.0
OUTAGE_S = 3.0
RETRY_S = 0.2


@dataclass(frozen=True)
class Listeners:
    """Called from the threads of a presence, with its incarnation first where it matters which one it was."""

    view: Callable[[View], None]
    peer_lost: Callable[[str, str, bool], None]
    lease_lost: Callable[[str, str], None]
    reclaimed: Callable[[str], None]
    place_lost: Callable[[str, str], None]
    failed: Callable[[str, str], None]
    """One of its threads has ended by an error: see `swift_rendezvous.threads`."""
    place_read: Callable[[str, int], None]


class Presence:
    """Made by `enter`; ended by `leave` (for good) or by `abandon` (to come back as another) and `forget`."""

    def __init__(
        self, config: AgentConfig, store: KeyValueStore, keys: Keys, address: str, listeners: Listeners,
        known_job: int | None,
    ) -> None:  # fmt: skip
        """Enter the job. *known_job*: the job that this node was in before, which must still be there (see
        `registration.enter_job`). Raises what that raises; then nothing is left."""
        self._store, self._keys = store, keys
        self._nodes: Mapping[str, NodeRecord] | None = None
        self._slots: Sequence[Owner] = ()
        self._listeners = listeners
        self._result: ResultRecord | None = None
        self._told_differs = ""
        self._ended = threading.Event()
        self._abandoned = False
        with contextlib.ExitStack() as undo:
            self.liveness = Liveness(
                address,
                listeners.peer_lost,
                Limits(config.heartbeat_s),
                key=config.key.heartbeat,
                ask=self._ask_store,
                on_failure=self._on_failure,
            )
            undo.callback(self.liveness.stop)
            self.me = NodeRecord(
                node_id=config.node_id,
                incarnation=secrets.token_hex(8),
                host=address,
                watch_port=self.liveness.port,
                num_workers=config.nproc,
                fingerprint=host.fingerprint(config),
                role="" if config.role == DEFAULT_ROLE else config.role,
                node_rank=config.node_rank,
                takes_faults=config.allow_injection,
            )
            most = config.max_nodes if config.max_nodes > config.nnodes else 0
            job = JobRecord(
                config.nnodes, config.nproc, host.job_fingerprint(config), config.max_restarts, config.key.proof, most,
                config.recovery, config.log_groups, config.log_budget,
                "" if config.strategy == "auto" else config.strategy, config.helpers,
            )  # fmt: skip
            entry: Entry = enter_job(store, keys, job, self.me, config.lease_ttl_s, known_job)
            self.job: int = entry.job
            self._lease: Lease = entry.lease
            undo.callback(_revoke, self._lease)
            self._listeners, self._ttl_s = listeners, config.lease_ttl_s
            self._lock = threading.Lock()
            self._stopped, self._reclaiming, self._reclaim_due = False, False, False
            self._tenure = tenure.Tenure()
            self._reading_place = False
            self._keep_alive = self._keep(self._lease)
            undo.callback(self._keep_alive.stop)
            # A private server is a child of this agent: no other can be given its slot.
            self._is_alone = config.etcd is None
            self._members = None
            if isinstance(store, EtcdStore) and not self._is_alone:
                in_doubt = lambda: tenure.is_in_doubt(self._held(), now_s=time.monotonic())  # noqa: E731
                self._members = store.watch_members(self._learn, in_doubt)
                undo.callback(self._members.stop)
            rules = Rules(config.replacement_timeout_s, config.join_timeout_s, RETURN_S, OUTAGE_S, config.last_call_s)
            self.journal: Journal | None = open_journal(config.journal, config.job_id, self.me, rules)
            if self.journal is not None:
                undo.callback(self.journal.close)
            self.coordinator = Coordinator(
                store,
                keys,
                self.me,
                self._lease.id,
                plan_generation if self.journal is None else self.journal.planner(plan_generation),
                rules,
                lambda line: log.info("%s", line),
                self.journal,
                lambda: self._keep_alive.unbroken_s(),
                self._on_failure,
            )
            self._watcher = JobWatcher(store, keys, self._on_view, self.me.incarnation, self._on_failure)
            self.liveness.start(self.me)
            self.first_view = self._watcher.start()
            undo.callback(self._watcher.stop)
            self.coordinator.start()
            undo.pop_all()

    def update(self, view: View) -> None:
        """Tell the threads what the job looks like now."""
        self.coordinator.update(view)
        slots = view.generation.slots if view.generation is not None else ()
        # Most changes concern no node, and there may be a thousand of them.
        if view.nodes is not self._nodes or slots is not self._slots:
            self._nodes, self._slots = view.nodes, slots
            self.liveness.update(view.nodes.values(), {owner.incarnation for owner in slots})
            differs = host.another_command(self.me, view.nodes.values()) if view.generation is not None else ""
            if differs and differs != self._told_differs:
                log.info("%s", differs)
                self._told_differs = differs

    @property
    def lease_id(self) -> int:
        return self._lease.id

    # ---- whether the slot is still ours ----

    def holds(self, now_s: float) -> bool:
        """Whether no other can have this node's slot, as far as it can tell by its own clock: see `tenure`."""
        return self._is_alone or tenure.holds(self._held(), now_s=now_s)

    def acts_until_s(self) -> float:
        """When that ends, if nothing else is heard."""
        return math.inf if self._is_alone else self._held().acts_until_s

    def is_away(self) -> bool:
        """What holds it is the proof that etcd has no quorum: it cannot be asked, nor give anything."""
        held = self._held()
        return not self._is_alone and held.until_s > held.sent_s + held.ttl_s

    def why_not(self, now_s: float) -> str:
        return tenure.why_not(self._held(), now_s=now_s)

    def _held(self) -> tenure.Tenure:
        """As of now: the keep-alive is asked what it has heard."""
        with self._lock:
            keeper, lease = self._keep_alive, self._lease
        return self._learn(tenure.Renewed(keeper.confirmed_s(), lease.ttl_s))

    def _learn(self, event: tenure.Event) -> tenure.Tenure:
        with self._lock:
            self._tenure = tenure.fold(self._tenure, event)
            return self._tenure

    def read_place(self) -> None:
        """Ask etcd, in a thread, for the job's generation; `place_read` of the listeners gets its revision."""
        with self._lock:
            if self._stopped or self._reading_place:
                return
            self._reading_place = True
        if not has_started(thread("swift-place", self._read_place, self._on_failure)):
            with self._lock:
                self._reading_place = False  # it is asked for again

    def _read_place(self) -> None:
        try:
            found = self._store.get(self._keys.generation)
            self._listeners.place_read(self.me.incarnation, 0 if found is None else found.mod_revision)
        except RendezvousError as error:
            log.debug("the generation could not be read: %s", error)
        finally:
            with self._lock:
                self._reading_place = False

    def _on_failure(self, why: str) -> None:
        self._listeners.failed(self.me.incarnation, why)

    def _ask_store(self) -> None:
        self._store.get(self._keys.generation)

    def reclaim(self) -> None:
        """Get another lease for this incarnation, in a thread; `reclaimed` or `place_lost` of the listeners says how it
        ended. The store is waited for without limit; meanwhile the workers train on."""
        with self._lock:
            if self._stopped or self._reclaiming:
                return
            self._reclaiming = True
        if not has_started(thread("swift-reclaim", self._reclaim, self._on_failure)):
            with self._lock:
                self._reclaiming, self._reclaim_due = False, True

    def tick(self) -> None:
        """Try again what there was no thread for."""
        due, self._reclaim_due = self._reclaim_due, False
        if due:
            self.reclaim()

    def _reclaim(self) -> None:
        away = False
        while not self._stopped:
            try:
                if self._takes(reclaim_place(self._store, self._keys, self.me, self.job, self._ttl_s)):
                    self._listeners.reclaimed(self.me.incarnation)
                return
            except (PlaceLost, JobOver) as error:
                self._listeners.place_lost(self.me.incarnation, str(error))
                return
            except RendezvousError as error:
                if not away:
                    log.warning("cannot get another lease yet: %s", error)
                away = True
                time.sleep(RETRY_S)

    def _takes(self, lease: Lease) -> bool:
        """Whether that is the lease of this node now; False if it has left meanwhile. Raises NoThread if nothing can
        keep it."""
        with contextlib.ExitStack() as undo:
            undo.callback(_revoke, lease)
            with self._lock:
                if self._stopped:
                    return False
                keep_alive = self._keep(lease)
                undo.pop_all()
                self._reclaiming = False
                self._keep_alive.stop()
                self._lease, self._keep_alive = lease, keep_alive
                self.coordinator.lease_id = lease.id
            return True

    def _keep(self, lease: Lease) -> KeepAlive:
        def lost(why: str) -> None:
            self._learn(tenure.Ended(time.monotonic()))
            self._listeners.lease_lost(self.me.incarnation, why)

        return lease.keep_alive(lost)

    def leave(self) -> None:
        """Tell the others and remove this node's records; the last node removes the job's."""
        self._stop(goodbye=True)
        self._watcher.stop()
        leave_job(self._store, self._keys, self.me, self._lease)

    def abandon(self) -> None:
        """Be gone as if this process had died: the others act at once. Still watches the job, for its result. Never
        raises."""
        self._abandoned = True
        self._stop(goodbye=False)
        _revoke(self._lease)

    def forget(self) -> None:
        """Watch no more."""
        self._watcher.stop()

    def result(self, timeout_s: float) -> ResultRecord | None:
        """How the job ended, if that can be learnt within *timeout_s*: the records may be gone, the watch tells what
        they were."""
        self._ended.wait(timeout_s)
        return self._result

    def _on_view(self, view: View) -> None:
        # Once the job's record is gone, what comes under its id is another job's.
        if not self._ended.is_set() and (view.result is not None or view.job is None):
            self._result = view.result
            self._ended.set()
        if not self._abandoned:
            self._listeners.view(view)

    def _stop(self, goodbye: bool) -> None:
        with self._lock:
            self._stopped = True
        self.coordinator.stop()
        self._keep_alive.stop()
        if self._members is not None:
            self._members.stop()
        self.liveness.stop(goodbye)
        if self.journal is not None:
            self.journal.close()


def _revoke(lease: Lease) -> None:
    try:
        lease.revoke()
    except RendezvousError as error:
        log.debug("the lease was not revoked, it will run out: %s", error)
