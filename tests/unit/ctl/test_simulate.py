"""`swiftctl simulate`: what it prints, JSON, CSV, kinds of failures, and its refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from swift_agent.ctl import common
from swift_agent.ctl.main import cli
from swift_recovery.strategy import simulation
from tests.support.pages import command, put_in, words

ROOT = Path(__file__).parents[3]
VIT = str(ROOT / "examples" / "profiles" / "vit.json")


def simulate(*args: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *args])


def hours(*args: str) -> dict[str, float]:
    found: dict[str, Any] = json.loads(simulate(VIT, "--hours", "85.6", "--json", *args).output)
    return {way["way"]: way["hours"] for way in found["ways"]}


def test_the_page_shows_what_it_prints() -> None:
    shown = (ROOT / "docs" / "simulation.md").read_text().rpartition("```console\n")[2].partition("\n```")[0]
    text = command("docs/simulation.md", "swiftctl simulate examples")
    prompt, *expected = shown.splitlines()
    assert prompt == f"$ {text}"
    found = simulate(*words(put_in(text, {"examples/profiles/vit.json": VIT}))[2:])
    assert found.exit_code == 0
    assert [line.rstrip() for line in found.output.splitlines()] == expected


@pytest.mark.parametrize("kind", ["exponential", "weibull", "paper"])
def test_kinds_of_failures(kind: str) -> None:
    found = hours("--failures", kind)
    assert found == hours("--failures", kind) != hours("--failures", kind, "--seed", "1")
    assert 85.6 < found["SWIFT, logs and parallel recovery"] < found["SWIFT, logs"] < found["global checkpoints"] < 100


def test_a_list_of_failures(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("10\n20.5\n")
    profile = json.loads(Path(VIT).read_text())
    found = hours("--failures", str(path))
    # Two restarts, and what was lost since the last of the checkpoints, one in 427 s.
    interval_h, cost = profile["checkpoint_every"] * profile["iteration_s"] / 3600, 1 / (100 * 4.27)
    first_h = 10 / (1 + cost)
    left_h = 20.5 - (35 / 3600 + first_h % interval_h)
    second_h = first_h + left_h / (1 + cost)
    lost_h = first_h % interval_h + second_h % interval_h
    assert found["global checkpoints"] == pytest.approx(85.6 * (1 + cost) + 2 * 35 / 3600 + lost_h)


def test_more_machines_lose_more() -> None:
    output = simulate(VIT, "--hours", "85.6", "--scale", "1,8", "--runs", "100").output
    (heading,) = (line for line in output.splitlines() if line.startswith("LOST"))
    assert heading.split()[-2:] == ["128", "1,024"]
    lost = {line[:35].strip(): line[35:].replace("%", "").split() for line in output.splitlines()[4:]}
    assert float(lost["SWIFT, logs"][0]) < float(lost["SWIFT, logs"][1])
    # The others are replicas of it.
    assert lost["SWIFT, replicas"][0] == "-" and float(lost["SWIFT, replicas"][1]) < 1


def test_csv() -> None:
    output = simulate(VIT, "--hours", "85.6", "--csv", "--runs", "10").output
    rows = list(csv.DictReader(output.splitlines()))
    assert rows[0]["way"] == "global checkpoints" and float(rows[0]["hours"]) > 85.6


def test_a_sweep_of_failures() -> None:
    args = ("--hours", "85.6", "--runs", "200", "--sweep", "mtbf=17,2,8")
    found = json.loads(simulate(VIT, *args, "--json").output)
    hours_of: dict[str, list[float]] = {}
    for way in found["ways"]:
        hours_of.setdefault(way["way"], []).append(way["hours"])
    assert found["sweep"] == "mtbf" and [way["mtbf_hours"] for way in found["ways"][:: len(hours_of)]] == [2, 8, 17]
    for values in hours_of.values():
        assert values == sorted(values, reverse=True) and len(set(values)) == 3
    output = simulate(VIT, *args).output
    assert "HOURS, BY TIME BETWEEN FAILURES       2 h   8 h   17 h" in output
    # One of the values is the profile's: the same as without a sweep.
    assert hours_of["SWIFT, logs"][2] == hours("--runs", "200")["SWIFT, logs"]


def test_a_sweep_of_checkpoints() -> None:
    args = ("--hours", "480", "--runs", "200", "--sweep", "checkpoint_every")
    rows = list(csv.DictReader(simulate(VIT, *args, "--csv").output.splitlines()))
    of = {float(row["checkpoint_every"]): float(row["hours"]) for row in rows if row["way"] == "global checkpoints"}
    assert list(of) == [12, 25, 50, 100, 200, 400, 800]
    # 82 pay: rarer and more frequent ones lose.
    assert min(of, key=lambda every: of[every]) in (50, 100) and of[12] > of[25] > of[50] and of[800] > of[200]


def test_a_sweep_to_where_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MAX_FAILURES", 10_000)
    args = ("--hours", "100", "--runs", "1", "--sweep")
    output = simulate(VIT, *args, "mtbf=0.003,17").output
    line = next(line for line in output.splitlines() if line.startswith("global checkpoints "))
    assert line.split()[-2] == "-" and float(line.split()[-1]) > 100 and "-: no end" in output
    found = simulate(VIT, *args, "mtbf=0.0001")
    assert found.exit_code == 1 and "no training ends, with any of the values" in found.output


def test_a_bar_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_MOMENT_S", -1.0)
    assert list(common.progress((1, 2))) == [1, 2] and capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich standard error is a terminal then
    assert list(common.progress((1, 2))) == [1, 2]
    shown = capsys.readouterr()
    assert "100%" in shown.err and shown.out == ""


@pytest.mark.parametrize(("args", "code", "wrong"), [
    (["--hours", "5", "--sweep", "mtbf_hours"], 2, "'mtbf_hours': type mtbf or checkpoint_every"),
    (["--hours", "5", "--sweep", "mtbf="], 2, "type hours from one failure to the next, above 0, each once"),
    (["--hours", "5", "--sweep", "mtbf=1,nan"], 2, "type hours from one failure"),
    (["--hours", "5", "--sweep", "mtbf=1,1"], 2, "each once"),
    (["--hours", "5", "--sweep", "mtbf=0"], 2, "above 0"),
    (["--hours", "5", "--sweep", "mtbf=inf"], 2, "above 0"),
    (["--hours", "5", "--sweep", f"mtbf={','.join(map(str, range(1, 52)))}"], 2, "at most 50"),
    (["--hours", "5", "--sweep", "checkpoint_every=1.5"], 2, "iterations are whole numbers"),
    (["--hours", "5", "--sweep", "mtbf", "--scale", "2"], 2, "--scale or --sweep (or --plot), not both"),
    (["--hours", "5", "--sweep", "mtbf", "--failures", "TRACE"], 2, "--sweep mtbf and --plot go with --failures"),
    (["--hours", "0"], 2, "0"),
    (["--hours", "5", "--seed", "-1"], 2, "'--seed': -1 is not in the range x>=0"),
    (["--hours", "5", "--failures", "weibull", "--shape", "nan"], 2, "'--shape': nan is no number that can be worked"),
    (["--hours", "nan"], 2, "--hours nan: type a number of hours"),
    (["--hours", "inf"], 2, "inf"),
    (["--hours", "85000", "--runs", "1000000", "--failures", "paper"], 2, "too many; type fewer --runs"),
    (["--hours", "5", "--scale", "1,1"], 2, "'1,1': type whole numbers, each once, as 1,4,16"),
    (["--hours", "5", "--scale", "2", "--failures", "TRACE"], 2, "--scale goes with --failures exponential"),
    (["--hours", "5", "--json", "--csv"], 2, "--json or --csv, not both"),
    (["--hours", "5", "--failures", "wibull"], 2, "'wibull' is none of exponential, weibull, paper"),
    (["--hours", "5", "--failures", "TRACE"], 1, "could not convert string to float"),
    (["--hours", "5", "--failures", "NEGATIVE"], 1, "hours from one failure to the next are no less than 0"),
    (["--hours", "5000", "--failures", "FAST"], 1, "no end after 100000 failures"),
])  # fmt: skip
def test_refusals(args: list[str], code: int, wrong: str, tmp_path: Path) -> None:
    for name, text in (("TRACE", "1 two"), ("NEGATIVE", "-1"), ("FAST", "0.001 " * 100_001)):
        (tmp_path / name).write_text(text)
    args = [str(tmp_path / arg) if arg.isupper() else arg for arg in args]
    found = simulate(VIT, *args)
    assert found.exit_code == code and wrong in found.output.replace("\n", " "), found.output
