"""What an agent tells, in the words of Prometheus: one metric for each line of docs/observability.md. Pure.

All have the label `job_id`. Those of the job are the same on all nodes, which came at different times: `max by
(job_id)` is the job's. This module must never look at anything but what it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics.figures import FAILURES, WAYS, Figures, Spread
from swift_logging_store.log.rate import LogFigures
from swift_rendezvous.roster.view import View

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | SummaryMetricFamily


@dataclass(frozen=True)
class Requests:
    """To etcd, by the name of the request: how long they took, and how many came to nothing."""

    took: Mapping[str, Spread] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Of one agent, as of *now_s*. *lease_s*: seconds that its lease has left, infinite where no other node can have
    its place. *num_standbys*: that are ready; *num_spares_wanted*: by `--spares`. *log_bytes*: of logs of messages on
    its disk; *logs*: what was done with them."""

    now_s: float
    figures: Figures
    state: AgentState
    strategy: str
    is_ready: bool
    is_away: bool
    lease_s: float
    num_standbys: int
    num_spares_wanted: int
    log_bytes: int
    logs: LogFigures
    requests: Requests


def families(job_id: str, seen: Snapshot) -> Iterator[Family]:
    """All metrics of *seen*. Those that are not known yet are left out."""
    yield from _of_job(job_id, seen)
    yield from _of_recoveries(job_id, seen.figures)
    yield from _of_node(job_id, seen)


class Metrics(Collector):
    """What a registry of prometheus_client asks. *seen*: of one moment."""

    def __init__(self, job_id: str, seen: Snapshot) -> None:
        self._job_id, self._seen = job_id, seen

    def collect(self) -> Iterator[Family]:
        return families(self._job_id, self._seen)


def _of_job(job_id: str, seen: Snapshot) -> Iterator[Family]:
    figures, view = seen.figures, seen.state.view
    known = {"job_id": job_id, "node_id": seen.state.node_id, "strategy": _strategy(view, seen.strategy)}
    info = GaugeMetricFamily("swift_job_info", "The job of this node, and how it recovers.", labels=list(known))
    info.add_metric(list(known.values()), 1.0)
    yield info
    yield _gauge("swift_generation", "The current generation.", job_id, view.number)
    yield _gauge("swift_world_size", "Ranks of the job.", job_id, view.generation.world_size if view.generation else 0)
    nodes = GaugeMetricFamily("swift_nodes", "Nodes and places, by what they do.", labels=["job_id", "state"])
    for what, number in nodes_by_state(view).items():
        nodes.add_metric([job_id, what], number)
    yield nodes
    yield _gauge("swift_spares_wanted", "Spare nodes that --spares asks for.", job_id, seen.num_spares_wanted)
    if figures.training_since_s is not None:
        yield _gauge("swift_iteration", "The first one that was not begun, as last told.", job_id, figures.iteration)
        yield _gauge("swift_iterations_per_second", "As last told.", job_id, figures.per_s)
    yield _counter("swift_iterations", "Iterations done, those among them that were done again.", job_id,
                   figures.num_iterations)  # fmt: skip
    yield _gauge("swift_stalled", "1 while something is lost and not recovered.", job_id,
                 figures.stalled_since_s is not None)  # fmt: skip
    yield _counter("swift_stalled_seconds", "Time without training because of failures.", job_id,
                   figures.stalled_until(seen.now_s))  # fmt: skip
    yield _counter("swift_lost_iterations", "Iterations that had to be done again.", job_id, figures.lost_iterations)
    yield _counter("swift_lost_seconds", "The time that these had taken.", job_id, figures.lost_s)
    goodput = figures.goodput(seen.now_s)
    if goodput is not None:
        yield _gauge("swift_goodput_ratio", "Time that was neither stalled nor lost, since it first trained.", job_id,
                     goodput)  # fmt: skip


def _of_recoveries(job_id: str, figures: Figures) -> Iterator[Family]:
    failures = CounterMetricFamily("swift_failures", "What was lost, by kind.", labels=["job_id", "kind"])
    # Also what has not happened yet: increase() counts from the first value, and would miss one that begins with 1.
    for kind in FAILURES:
        failures.add_metric([job_id, kind], figures.failures.get(kind, 0))
    yield failures
    recoveries = CounterMetricFamily(
        "swift_recoveries", "By the way in which the state came back, and by cause.", labels=["job_id", "kind", "cause"]
    )
    for cause, ways in WAYS.items():
        for way in ways:
            recoveries.add_metric([job_id, way, cause], figures.recoveries.get((way, cause), 0))
    yield recoveries
    seconds = HistogramMetricFamily(
        "swift_recovery_seconds", "Time of each phase of a recovery.", labels=["job_id", "phase"]
    )
    for phase, spread in figures.phases.items():
        seconds.add_metric([job_id, phase], buckets=spread.cumulated(), sum_value=spread.sum_s)
    yield seconds


def _of_node(job_id: str, seen: Snapshot) -> Iterator[Family]:
    workers = GaugeMetricFamily("swift_workers", "Processes of this node, by state.", labels=["job_id", "state"])
    for phase, number in sorted(Counter(worker.phase for worker in seen.state.workers.values()).items()):
        workers.add_metric([job_id, phase], number)
    yield workers
    yield _gauge("swift_ready", "1 if this node does its part, as /readyz has it.", job_id, seen.is_ready)
    yield _gauge("swift_standbys", "Warm processes of this node.", job_id, seen.num_standbys)
    yield _gauge("swift_lease_remaining_seconds", "Until another node may get the places of this one.", job_id,
                 seen.lease_s)  # fmt: skip
    yield _gauge("swift_etcd_away", "1 if etcd is known to have no quorum.", job_id, seen.is_away)
    yield _gauge("swift_message_log_bytes", "Of logged messages on the disk of this node.", job_id, seen.log_bytes)
    yield from _of_logs(job_id, seen.logs)
    took = HistogramMetricFamily("swift_etcd_request_seconds", "Requests to etcd.", labels=["job_id", "request"])
    for name, spread in sorted(seen.requests.took.items()):
        took.add_metric([job_id, name], buckets=spread.cumulated(), sum_value=spread.sum_s)
    yield took
    failed = CounterMetricFamily(
        "swift_etcd_request_errors", "Requests that got no answer or were refused.", labels=["job_id", "request"]
    )
    for name in sorted({*seen.requests.took, *seen.requests.failed}):
        failed.add_metric([job_id, name], seen.requests.failed.get(name, 0))
    yield failed


def _of_logs(job_id: str, logs: LogFigures) -> Iterator[Family]:
    yield _counter("swift_message_log_written_bytes", "Of messages, to the disk of this node.", job_id,
                   logs.written_bytes)  # fmt: skip
    yield _counter("swift_message_log_wait_seconds", "That training has waited for that disk, all workers together.",
                   job_id, logs.waited_ns / 1e9)  # fmt: skip
    yield _gauge("swift_message_logs_given_up", "Workers of this node that log no more: no room, or no disk.", job_id,
                 logs.num_given_up)  # fmt: skip
    labels = ["job_id", "operation"]
    took = SummaryMetricFamily("swift_log_store_seconds", "Copies of logs to the store, and from there.", labels=labels)
    moved = CounterMetricFamily("swift_log_store_bytes", "In these copies.", labels=labels)
    for operation, num, num_bytes, nanoseconds in (
        ("put", logs.num_copies, logs.copied_bytes, logs.copies_ns),
        ("get", logs.num_fetches, logs.fetched_bytes, logs.fetches_ns),
    ):
        took.add_metric([job_id, operation], num, nanoseconds / 1e9)
        moved.add_metric([job_id, operation], num_bytes)
    yield took
    yield moved
    yield _counter("swift_log_store_errors", "Copies that have failed; they are tried again.", job_id,
                   logs.num_failures)  # fmt: skip


def nodes_by_state(view: View) -> dict[str, int]:
    """*active*: has a place; *vacant*: a place without its node; *leaving*: one that is to leave; *spare*: waits."""
    owners = view.generation.slots if view.generation is not None else ()
    here = {node.incarnation for node in view.nodes.values()}
    leaving = {one.incarnation for one in view.drains.values()} & here
    active = {owner.incarnation for owner in owners} & here
    return {
        "active": len(active - leaving),
        "leaving": len(leaving),
        "vacant": sum(owner.incarnation not in here for owner in owners),
        "spare": len(here - active - leaving),
    }


def _strategy(view: View, wanted: str) -> str:
    return view.profile.way if view.profile is not None and view.profile.way else wanted


def _gauge(name: str, help: str, job_id: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=["job_id"])
    family.add_metric([job_id], float(value))
    return family


def _counter(name: str, help: str, job_id: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=["job_id"])
    family.add_metric([job_id], float(value))
    return family
