"""The incarnations of this node, one after the other: it enters the job, and comes back after it was given up.

    enter --> presence --given up--> a while --> come_back --> presence, or the job's result

A node that comes back does so as a spare, later and later if that happens again and again. Meanwhile nothing else
happens in this agent: without a place in the job there is nothing to look after. Must never touch workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from swift_agent.agent.lifecycle.isolation import rejoin_delay_s
from swift_agent.agent.presence import RETURN_S, Listeners, Presence
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.signals import CaughtSignals
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node.registration import JobOver
from swift_rendezvous.node.suspicion import Limits
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import ResultRecord
from swift_rendezvous.store.kv import KeyValueStore

log = logging.getLogger(__name__)

# For the watch to tell how a job ended whose records are gone.
RESULT_TIMEOUT_S = 2.0
RETRY_S = 1.0


class Incarnations:
    """*address*: at which other nodes reach this one. *signals*: one that comes ends the waiting, as does *why_gone*
    once it says that the store is gone for good."""

    def __init__(
        self, config: AgentConfig, store: KeyValueStore, keys: Keys, address: str, listeners: Listeners,
        signals: CaughtSignals, why_gone: Callable[[], str],
    ) -> None:  # fmt: skip
        self._config, self._store, self._keys, self._address = config, store, keys, address
        self._listeners, self._signals, self._why_gone = listeners, signals, why_gone
        self._entered_s, self._delay_s = 0.0, 0.0

    def enter(self) -> Presence:
        """Become a node of the job. What it looks like is `first_view` of the presence."""
        config = self._config
        presence = self._enter(None)
        if config.on_etcd_loss == "train" and config.etcd is not None:
            log.warning(
                "--on-etcd-loss train: this node trains on while it cannot reach etcd; if another one has got its "
                "places meanwhile, both train the same ranks until etcd answers again"
            )
        if config.max_nodes + config.spares > 1:
            least_s, most_s = Limits(config.heartbeat_s).detection_s
            ttl_s = config.lease_ttl_s
            log.info(
                "noticed: a dead process at once, a dead machine or link in %.2g to %.2g s (--heartbeat %g), "
                "a frozen agent in %d to %d s (--lease-ttl %d)",
                *(least_s, most_s, config.heartbeat_s, ttl_s + RETURN_S, 2 * ttl_s + RETURN_S, ttl_s),
            )
        return presence

    def come_back(self, left: Presence) -> Presence | ResultRecord:
        """A presence in the place of *left*, which is abandoned, as soon as the store lets us; or how the job ended."""
        left.abandon()
        self._delay_s = rejoin_delay_s(self._delay_s, time.monotonic() - self._entered_s)
        self._wait_for_signal(self._delay_s)
        while self._signals.exception is None:
            if why := self._why_gone():
                return ResultRecord("stopped", why)
            try:
                presence = self._enter(left.job)
                left.forget()
                return presence
            except JobOver as error:
                return left.result(RESULT_TIMEOUT_S) or ResultRecord("stopped", str(error))
            except (RendezvousError, OSError) as error:
                # Another node of this name; the store is away, or takes no writes; no descriptor is left.
                log.warning("cannot come back yet: %s", error)
                self._wait_for_signal(RETRY_S)
        return ResultRecord("stopped", "stopped while it was away from the job", cause=self._signals.exception.cause)

    def _enter(self, known_job: int | None) -> Presence:
        config = self._config
        presence = Presence(config, self._store, self._keys, self._address, self._listeners, known_job)
        self._entered_s = time.monotonic()
        log.info("node %s joined job %s (%s)", config.node_id, config.job_id, self._address)
        return presence

    def _wait_for_signal(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._signals.exception is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
