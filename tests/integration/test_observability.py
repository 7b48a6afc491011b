"""Alert rules and dashboard: as promtool reads them, and against what agents export. See faults/test_metrics.py for a
job that a real Prometheus watches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics.exposition import Requests, Snapshot, families
from swift_agent.agent.metrics.figures import REQUEST_BOUNDS_S, Figures, Spread
from swift_logging_store.log.rate import LogFigures
from tests.support.job import ROOT
from tests.support.pages import command, words
from tests.support.prometheus_server import promtool, why_not
from tests.support.records import view

RULES = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "swift-agent.json"
needs_promtool = pytest.mark.skipif(bool(why_not()), reason=why_not())


def exported() -> dict[str, set[str]]:
    """By name, the labels of all that an agent may export."""
    requests = Requests({"Txn": Spread(REQUEST_BOUNDS_S).plus(0.1)}, {"Txn": 1})
    seen = Snapshot(
        now_s=10.0, figures=Figures(training_since_s=1.0), state=AgentState("n0", "n0.1", view=view()), strategy="auto",
        is_ready=True, is_away=False, lease_s=3.0, num_standbys=1, num_spares_wanted=1, log_bytes=0,
        logs=LogFigures(), requests=requests,
    )  # fmt: skip
    suffixes = {
        "counter": ("_total",), "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"),
    }  # fmt: skip
    return {
        family.name + suffix: set(family._labelnames) | ({"le"} if suffix == "_bucket" else set())
        for family in families("gpt", seen) for suffix in suffixes[family.type]
    }  # fmt: skip


def expressions() -> dict[str, list[str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    notes = [one["expr"] for one in dashboard["annotations"]["list"]]
    alerts = re.findall(r"^ +expr: (.+)$", (RULES / "alerts.yml").read_text(), re.MULTILINE)
    return {"dashboard": panels + notes, "alerts": alerts}


@needs_promtool
def test_the_alerts_are_right() -> None:
    assert "14 rules found" in promtool("check", "rules", RULES / "alerts.yml")
    assert "SUCCESS" in promtool(*words(command("docs/observability.md", "promtool"))[1:], cwd=RULES)
    assert "is valid" in promtool("check", "config", RULES / "prometheus.yml")


@needs_promtool
def test_every_expression_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$job", "gpt")}
        for number, expression in enumerate(expressions()["dashboard"])
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.parametrize("where", ["dashboard", "alerts"])
def test_what_is_asked_for_is_exported(where: str) -> None:
    known = exported()
    for expression in expressions()[where]:
        names = set(re.findall(r"\bswift_\w+", expression))
        assert names and names <= set(known), expression
        for name, matchers in re.findall(r"\b(swift_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~?\"", matchers)) <= known[name], expression


def test_the_dashboard_can_be_imported() -> None:
    """Each panel has a place of its own, and asks the Prometheus that is chosen."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert (
        len({panel["id"] for panel in panels}) == len(panels) and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    )
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]), panel["title"]
    assert {one["name"] for one in dashboard["templating"]["list"]} == {"datasource", "job"}


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    missing = {name for name in exported() if f"`{re.sub('_(bucket|sum|count)$', '', name)}" not in page}
    assert not missing, missing
    named = set(re.findall(r"`(swift_\w+)", page))
    assert named <= {re.sub("_(bucket|sum|count)$", "", name) for name in exported()} | {"swift_agent"}, named
