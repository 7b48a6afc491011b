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


@pytest.fixture
def single(tmp_path: Path) -> str:
    """The same pipeline of machines with one GPU each."""
    path = tmp_path / "single.json"
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "gpus_per_machine": 1}))
    return str(path)


def test_of_a_machine_with_several_workers_helpers_repeat_what_one_of_them_has_lost() -> None:
    log, helped = json.loads(plan(VIT, "--json").output)["ways"][1:3]
    assert helped["recovery_s"] == log["recovery_s"] and helped["worker_s"] < log["worker_s"]
    assert json.loads(plan(VIT, "--json").output)["best"] == "log"
    assert "WORKER" in plan(VIT).output


def test_helpers_repeat_what_one_machine_has_lost_not_a_group(single: str) -> None:
    found = json.loads(plan(single, "--json").output)
    assert "WORKER" not in plan(single).output
    by_name = {way["name"]: way for way in found["ways"]}
    assert by_name["log+parallel"]["recovery_s"] < by_name["log"]["recovery_s"]
    assert found["best"] == "log+parallel"
    limited = json.loads(plan(single, "--json", "--log-budget", "25%").output)
    assert limited["ways"][1]["groups"] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14, 15]]
    # Each way has the groups that are best for it: with helpers those in which one machine is alone.
    assert limited["best"] == "log+parallel" and limited["ways"][2]["recovery_s"] < limited["ways"][1]["recovery_s"]
    assert [0] in limited["ways"][2]["groups"]


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


def test_what_swift_run_takes_is_said_beside_what_wastes_least(single: str) -> None:
    output = plan(single).output
    assert (
        "swift-run: by what is wasted: log+parallel; taken: log, because helpers run the script once more, which "
        "--helpers N allows\n"
    ) in output
    found = json.loads(plan(single, "--json").output)
    assert (found["best"], found["taken"]) == ("log+parallel", "log")
    assert "swift-run: by" not in plan("examples/profiles/wide-resnet-50.json").output


@pytest.mark.parametrize("size", ["5 apples", "101%", "-1GiB", "GiB", ""])
def test_sizes_that_are_none(size: str) -> None:
    found = plan(VIT, "--log-budget", size)
    assert found.exit_code == 2 and "is no size; type 500GiB, 2TiB, or 20% of all messages" in found.output


def written(tmp_path: Path, **fields: object) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"machines": [{"computation_s": 1}] * 4, "network_bytes_per_s": 1e9, **fields}))
    return str(path)


def test_a_job_without_checkpoints(tmp_path: Path) -> None:
    path = written(tmp_path, boundary_bytes=1e6, takes_checkpoints=False, checkpoint_every=1_000_000)
    output = plan(path).output
    assert "not possible: the script takes none (job.checkpoint): all workers would start over" in output
    assert output.count("all iterations since the begin are repeated") == 2
    assert "messages between machines, in an iteration: 2.86 MiB" in output and "as this profile says" not in output
    found = json.loads(plan(path, "--json").output)
    assert found["best"] != "checkpoint" and not found["ways"][3]["possible"]
    nothing = plan(written(tmp_path, takes_checkpoints=False))
    assert nothing.exit_code == 0 and "nothing brings back what a lost machine holds" in nothing.output
    assert json.loads(plan(written(tmp_path, takes_checkpoints=False), "--json").output)["best"] is None


def test_groups_with_which_nothing_could_be_repeated_are_not_offered(tmp_path: Path) -> None:
    """Two machines: there is one boundary, and it is logged or not."""
    path = written(tmp_path, machines=[{"computation_s": 1}] * 2, boundary_bytes=1e6)
    rows = [line.split(None, 3) for line in plan(path).output.splitlines() if line.startswith(("100%", "75%", "10%"))]
    assert [row[0] for row in rows] == ["100%", "75%", "10%"]
    assert "none: no two groups log so little" in " ".join(rows[1]) and "none" not in " ".join(rows[0])
    assert [one["possible"] for one in json.loads(plan(path, "--json").output)["budgets"]] == [True] + [False] * 4
    assert "not possible: the budget for logs allows no two groups" in plan(path, "--log-budget", "50%").output


def test_all_of_a_day_is_lost_at_most(tmp_path: Path) -> None:
    path = written(tmp_path, machine_mtbf_hours=0.01, checkpoint_every=500, iteration_s=20)
    output = plan(path).output
    assert "96.0 GPU hours" in output and "failures are not rare beside what they cost" in output
    assert all(one["gpu_hours_lost_per_day"] <= 96 for one in json.loads(plan(path, "--json").output)["intervals"])
    assert "failures are not rare" not in plan(VIT).output


def test_a_replica_of_some_machines_is_shown(tmp_path: Path) -> None:
    machines = [{"computation_s": 1, "has_replica": number < 2} for number in range(4)]
    (row,) = (line for line in plan(written(tmp_path, machines=machines)).output.splitlines() if "replica" in line[:8])
    assert "for machines 0-1 only: no other machine holds what machine 2 does" in row and row.split()[1] != "-"


def test_groups_of_many_uneven_machines_are_found_at_once(tmp_path: Path) -> None:
    """As the coordinator's, which answers for its workers meanwhile: by the paper's algorithm."""
    machines = [{"computation_s": 1 + number % 7} for number in range(1000)]
    path = written(tmp_path, machines=machines, boundary_bytes=[1e6 * (1 + at % 5) for at in range(999)])
    for budget in ("50%", "150MiB"):
        way = json.loads(plan(path, "--json", "--log-budget", budget).output)["ways"][1]
        assert 1 < len(way["groups"]) < 1000, budget
    assert way["storage_bytes"] <= 150 * (1 << 20)
