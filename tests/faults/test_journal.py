"""Journals of real agents: a job with kills, after which today's cores say what the agents' did. The recovery itself is
the matter of the other tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from swift_agent.ctl.main import cli
from swift_rendezvous.node.job_key import JobKey
from tests.faults.conftest import assert_recovered
from tests.support.injected import killed, node_killed
from tests.support.job import Agents

SECRET = "a secret that no journal may have"


def replayed(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["replay", str(path), "--json"])
    assert result.exit_code == 0, f"{path}: {result.output}"
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["verdict"] == "same"
    return found


def assert_is_told(journals: Path, page: Path) -> None:
    """`swiftctl timeline` knows both losses, their phases and the speed around them."""
    arguments = ["timeline", "--journal", str(journals), "--html", str(page), "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["state"] == "succeeded" and [one["generation"] for one in told["incidents"]] == [2, 3], told
    worker, node = told["incidents"]
    assert worker["losses"][0]["ranks"] == [3] and node["losses"][0]["kind"] == "node"
    for one in (worker, node):
        assert one["phases_ms"]["total"] > 0 and one["lost_iterations"] == 0 and one["way"] == "state of a replica", one
        assert 0 < one["stalled_s"] < 60 and one["failed_s"] <= one["begin_s"] < one["resumed_s"], one
    assert 0 < told["goodput"] < 1 and len(told["points"]) > 2, told
    assert node["title"] in page.read_text() and SECRET not in page.read_text()


def test_journals_of_a_job_with_kills_replay_as_the_same(
    tmp_path: Path, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """A worker is lost, then a node, whose journal may end in the middle of a line; a spare takes its place."""
    journals = tmp_path / "journals"
    agents = make_agents(
        options=("--spares", "1"),
        environment={"SWIFT_JOURNAL": str(journals), "SWIFT_JOB_SECRET": SECRET},
    )  # fmt: skip
    outcome = agents.run("abc", [killed(3, 4, "backward"), node_killed(0, 8, "forward")])
    assert_recovered(outcome, undisturbed(), {0, 1, 3}, num_faults=0)
    paths = sorted(journals.iterdir())
    found = [replayed(path) for path in paths]
    assert sorted(one["node"] for one in found) == ["a", "b", "c"]
    assert all(one["job"] == agents.job_id and one["num_events"] > 10 for one in found)
    # Somebody decided; of the agents that lived to the end all is there.
    assert sum(one["num_decisions"] for one in found) > 5 and sum(one["num_plans"] for one in found) >= 3
    lost = next(node for node, code in outcome.exit_codes.items() if code == -9)
    for one, path in zip(found, paths, strict=True):
        assert one["cut_at"] is None or one["node"] == lost
        assert path.stat().st_mode & 0o777 == 0o600
    assert_is_told(journals, tmp_path / "page.html")
    written = "\n".join(path.read_text() for path in paths)
    key = JobKey.of_secret(SECRET.encode(), agents.job_id)
    nonces = set(re.findall(r'"nonce":"([0-9a-f]+)"', written))
    assert len(nonces) >= 3, "each generation has a store"
    secrets = {key.store_token(number, nonce) for number in range(1, 9) for nonce in nonces}
    assert not [one for one in (SECRET, key.heartbeat.hex(), *secrets) if one in written]
    assert '"type":"WriteFailure"' in written and '"type":"StartWorkers"' in written
