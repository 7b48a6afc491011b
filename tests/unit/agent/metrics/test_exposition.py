"""What an agent exports before anything has happened: `increase()` counts from the first value that it has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics.exposition import Requests, Snapshot, families
from swift_agent.agent.metrics.figures import REQUEST_BOUNDS_S, WAYS, Cause, Figures, Spread, way_of
from swift_logging_store.log.rate import LogFigures
from tests.support.records import view

FRESH = Snapshot(
    now_s=10.0, figures=Figures(), state=AgentState("n0", "n0.1", view=view()), strategy="auto", is_ready=True,
    is_away=False, lease_s=3.0, num_standbys=1, num_spares_wanted=2, log_bytes=0, logs=LogFigures(),
    requests=Requests(),
)  # fmt: skip


def exported(seen: Snapshot) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "job_id")): sample.value
        for family in families("gpt", seen) for sample in family.samples
    }  # fmt: skip


def test_every_failure_is_counted_from_0() -> None:
    found = {key: value for key, value in exported(FRESH).items() if key[0] == "swift_failures_total"}
    assert found == {("swift_failures_total", kind): 0.0 for kind in ("node", "worker", "restart")}
    seen = replace(FRESH, figures=Figures(failures={"worker": 1}))
    assert exported(seen)["swift_failures_total", "worker"] == 1.0
    assert exported(seen)["swift_failures_total", "node"] == 0.0


def test_every_recovery_is_counted_from_0() -> None:
    found = {key[1:]: value for key, value in exported(FRESH).items() if key[0] == "swift_recoveries_total"}
    assert set(found.values()) == {0.0}
    assert set(found) == {(cause, way) for cause in get_args(Cause) for way in WAYS[cause]}
    seen = replace(FRESH, figures=Figures(recoveries={("replica", "node"): 3}))
    assert exported(seen)["swift_recoveries_total", "node", "replica"] == 3.0


def test_no_way_begins_later_than_the_others() -> None:
    """Whatever a plan says."""
    work = {"plan": 1, "kind": "copy", "why": "", "sources": {}, "tails": {}, "generation": 2}
    for cause in get_args(Cause):
        for content in (None, {}, {"kind": "checkpoint"}, work):
            assert way_of(cause, content) in WAYS[cause]


def test_a_request_that_has_never_failed_has_failed_0_times() -> None:
    seen = replace(FRESH, requests=Requests({"Txn": Spread(REQUEST_BOUNDS_S).plus(0.1)}, {}))
    assert exported(seen)["swift_etcd_request_errors_total", "Txn"] == 0.0


def test_the_spares_that_were_asked_for_are_told() -> None:
    assert exported(FRESH)["swift_spares_wanted",] == 2.0


