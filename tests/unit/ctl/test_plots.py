"""`--plot`: what is drawn, and that nothing is computed for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swift_agent.ctl.main import cli
from swift_agent.ctl.plots import Chart, Line, draw, number

ROOT = Path(__file__).parents[3]
PROFILES = ROOT / "examples" / "profiles"
VIT = str(PROFILES / "vit.json")
SIMULATE = ("simulate", VIT, "--hours", "85.6", "--runs", "20")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, [*args])


def test_a_plan_is_drawn_and_printed_as_without_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    found = run("plan", VIT, "--plot", str(path))
    assert found.exit_code == 0 and found.output == run("plan", VIT).output
    drawn = path.read_text()
    for text in (
        "ViT-128/32 of SWIFT", "logs between two checkpoints, TiB", "expected recovery of a lost machine, seconds",
        "greedy groups, as in the paper", "the best groups", "the best groups, parallel recovery",
        "chosen: log, as swift-run does it<", "nothing logged, all restart",
    ):  # fmt: skip
        assert text in drawn, text


def test_the_same_input_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.PNG", "d.PNG"):
        assert run("plan", VIT, "--plot", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    png = (tmp_path / "c.PNG").read_bytes()
    assert png.startswith(b"\x89PNG") and png == (tmp_path / "d.PNG").read_bytes()


@pytest.mark.parametrize(("args", "label"), [
    ((), "hours from one failure of the job to the next"),
    (("--sweep", "checkpoint_every"), "iterations between two checkpoints"),
])  # fmt: skip
def test_a_sweep_is_drawn(args: tuple[str, ...], label: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    assert run(*SIMULATE, *args, "--plot", str(path)).exit_code == 0
    drawn = path.read_text()
    for text in (label, "hours that the training takes", "means of 20 runs", "SWIFT, logs", "without failures"):
        assert text in drawn, text


@pytest.mark.parametrize("command", [("plan", VIT), SIMULATE], ids=["plan", "simulate"])
@pytest.mark.parametrize(("name", "wrong"), [
    ("x.pdf", "is neither a PNG nor an SVG; type a name that ends in .png or .svg"),
    ("x", "is neither a PNG nor an SVG"),
    ("none/x.png", "cannot be written: no directory"),
])  # fmt: skip
def test_files_that_cannot_be(command: tuple[str, ...], name: str, wrong: str, tmp_path: Path) -> None:
    found = run(*command, "--plot", str(tmp_path / name))
    assert found.exit_code == 2 and wrong in " ".join(found.output.split())
    # Nothing was computed.
    assert "WAY" not in found.output and not list(tmp_path.iterdir())


def test_a_file_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    assert run("plan", VIT, "--plot", str(tmp_path / "x.png")).exit_code == 2


def test_without_matplotlib_it_is_said_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python takes for: not installed
    found = run("plan", VIT, "--plot", str(tmp_path / "x.png"))
    assert found.exit_code == 2 and "--plot needs matplotlib; type: pip install 'swift-agent[plot]'" in found.output
    assert run("plan", VIT).exit_code == 0


def test_matplotlib_is_imported_for_plots_only() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom swift_agent.ctl.main import cli\n"
        f"assert CliRunner().invoke(cli, ['plan', {VIT!r}]).exit_code == 0\n"
        f"assert CliRunner().invoke(cli, {[*SIMULATE]!r}).exit_code == 0\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_job_whose_logs_are_no_trade_off(tmp_path: Path) -> None:
    """No pipeline; or one of two machines."""
    two = tmp_path / "two.json"
    two.write_text(json.dumps({
        "machines": [{"computation_s": 1}] * 2, "boundary_bytes": 1e9, "network_bytes_per_s": 1e9,
    }))  # fmt: skip
    for path in (two, PROFILES / "wide-resnet-50.json"):
        found = run("plan", str(path), "--plot", str(tmp_path / "x.png"))
        assert found.exit_code == 1 and "that takes boundary_bytes, and three machines or more" in found.output
        assert not (tmp_path / "x.png").exists()


def test_a_gap_where_there_is_no_value(tmp_path: Path) -> None:
    points = [(1.0, 2.0), (2.0, None), (4.0, 3.0)]
    draw(Chart("it", "x", "y", [Line("one", points)], log_x=True, log_y=True, ticks=[1, 4000]), tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert "4,000" in drawn and "NaN" not in drawn and "nan" not in drawn


def test_numbers_have_no_power_of_ten() -> None:
    values = {0.125: "0.125", 2.125: "2.12", 17.0: "17", 1248.0: "1,248", 131072: "131,072"}
    assert {value: number(value) for value in values} == values
