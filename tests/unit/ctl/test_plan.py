"""`swiftctl plan`: what it prints, its JSON, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swift_agent.ctl.main import cli
from tests.support.pages import command, words

ROOT = Path(__file__).parents[3]
VIT = "examples/profiles/vit.json"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(*args: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *args])


def test_the_page_shows_what_it_prints() -> None:
    shown = (ROOT / "docs" / "planning.md").read_text().partition("```console\n")[2].partition("\n```")[0]
    text = command("docs/planning.md", "swiftctl plan examples")
    prompt, *expected = shown.splitlines()
    assert prompt == f"$ {text}" and expected.pop() == "..."
    found = plan(*words(text)[2:])
    assert found.exit_code == 0
    assert [line.rstrip() for line in found.output.splitlines()][: len(expected)] == expected


def test_the_page_shows_what_checkpoints_cost() -> None:
    found = plan("examples/profiles/wide-resnet-50.json", "--gpu-hour-cost", "2.5").output
    lines = [line.rstrip() for line in found.splitlines()]
    shown = lines[next(at for at, line in enumerate(lines) if line.startswith("CHECKPOINTS WHERE")) :]
    page = (ROOT / "docs" / "planning.md").read_text()
    assert len(shown) == 6 and "```\n" + "\n".join(shown) + "\n```" in page


def test_groups_within_budgets_and_intervals() -> None:
    output = plan(VIT).output
    assert "25%         469 GiB   2.53 s                0-2 3-6 7-10 11-15" in output
    assert "a checkpoint takes 1 s:" in output
    assert "as this profile says           100 iterations  19.7 GPU hours" in output
    assert "c* of Just-In-Time (Young)     82 iterations   19.3 GPU hours" in output


def test_what_checkpoints_cost_as_often_as_pays_and_just_in_time() -> None:
    found = {one["name"]: one for one in json.loads(plan(VIT, "--json", "--gpu-hour-cost", "2").output)["intervals"]}
    here, best = found["as this profile says"], found["c* of Just-In-Time (Young)"]
    assert best["gpu_hours_lost_per_day"] < here["gpu_hours_lost_per_day"] and best["seconds"] < here["seconds"]
    assert here["seconds"] == pytest.approx(427)
    assert best["money_lost_per_day"] == 2 * best["gpu_hours_lost_per_day"] and len(found) == 3
    # The same as the way's.
    (way,) = (one for one in json.loads(plan(VIT, "--json").output)["ways"] if one["name"] == "checkpoint")
    assert here["gpu_hours_lost_per_day"] == pytest.approx(way["gpu_hours_lost_per_day"])
    # Where each machine has a replica a checkpoint may be taken after a failure.
    replicated = json.loads(plan("examples/profiles/wide-resnet-50.json", "--json").output)["intervals"]
    last = {one["name"]: one for one in replicated[-2:]}
    assert list(last) == [f"just in time, {how} (not in this version)" for how in ("by the script", "transparent")]
    assert all(one["seconds"] is None for one in last.values())
    lost = [one["gpu_hours_lost_per_day"] for one in (replicated[1], *last.values())]
    assert lost == sorted(lost, reverse=True)


def test_helpers_repeat_what_one_machine_has_lost_not_a_group() -> None:
    found = json.loads(plan(VIT, "--json").output)
    by_name = {way["name"]: way for way in found["ways"]}
    assert by_name["log+parallel"]["recovery_s"] < by_name["log"]["recovery_s"]
    assert found["best"] == "log+parallel"
    limited = json.loads(plan(VIT, "--json", "--log-budget", "25%").output)
    assert limited["best"] == "log" and limited["ways"][1]["recovery_s"] == limited["ways"][2]["recovery_s"]
    assert limited["ways"][1]["groups"] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14, 15]]


def test_a_budget_in_bytes_is_for_each_machine() -> None:
    """At a boundary each side logs what it sends: half of the bytes that pass."""
    limited = json.loads(plan(VIT, "--json", "--log-budget", "100GiB").output)["ways"][1]
    assert 1 < len(limited["groups"]) < 16 and limited["storage_bytes"] <= 100 * (1 << 30)
    assert plan(VIT, "--json", "--log-budget", "500GiB").output == plan(VIT, "--json", "--log-budget", "100%").output


def test_without_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"machines": [{"computation_s": 2}] * 2, "network_bytes_per_s": 1e9}))
    found = plan(str(path))
    assert found.exit_code == 0 and "LOG BUDGET" not in found.output and "checkpoint" in found.output
    assert json.loads(plan(str(path), "--json").output)["budgets"] == []


def test_mistakes_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"machines": []}')
    found = plan(str(path))
    assert found.exit_code == 1
    assert f"{path}: machines: a list is needed" in found.output and f"{path}: network_bytes_per_s: has" in found.output


def test_a_budget_for_logs_that_there_are_not() -> None:
    found = plan("examples/profiles/wide-resnet-50.json", "--log-budget", "1TiB")
    assert found.exit_code == 1 and "--log-budget is for message logs; that takes boundary_bytes" in found.output


@pytest.mark.parametrize("cost", ["nan", "inf"])
def test_costs_that_are_none(cost: str) -> None:
    found = plan(VIT, "--json", "--gpu-hour-cost", cost)
    assert found.exit_code == 2 and "is no number that can be worked with" in found.output


def test_all_messages_are_all_of_them_where_sums_are_rounded(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    data = {"machines": [{"computation_s": 1}] * 6, "boundary_bytes": [14.6, 755.6, 249.6, 109.5, 624.8]}
    path.write_text(json.dumps({**data, "network_bytes_per_s": 1e9}))
    found = json.loads(plan(str(path), "--json", "--log-budget", "100%").output)
    (log,) = (way for way in found["ways"] if way["name"] == "log")
    assert log["groups"] == [[number] for number in range(6)]


def test_what_swift_run_takes_is_said_beside_what_wastes_least() -> None:
    output = plan(VIT).output
    assert (
        "swift-run: by what is wasted: log+parallel; taken: log, because helpers run the script once more, which "
        "--helpers N allows\n"
    ) in output
    found = json.loads(plan(VIT, "--json").output)
    assert (found["best"], found["taken"]) == ("log+parallel", "log")
    assert "swift-run: by" not in plan("examples/profiles/wide-resnet-50.json").output


@pytest.mark.parametrize("size", ["5 apples", "101%", "-1GiB", "GiB", ""])
def test_sizes_that_are_none(size: str) -> None:
    found = plan(VIT, "--log-budget", size)
    assert found.exit_code == 2 and "is no size; type 500GiB, 2TiB, or 20% of all messages" in found.output
