"""docs/cli.md has every option of ours, with its default."""

from __future__ import annotations

import re

import pytest

from swift_agent.ctl.main import cli
from swift_agent.launch.options import build_parser
from tests.support.job import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()
OURS = {action.option_strings[0]: action for action in build_parser(None).ours}
ROWS = {
    cells[0].split("`")[1].split()[0]: cells[1].strip("` ")
    for cells in (line.strip("| ").split(" | ") for line in PAGE.split("## Our options")[1].splitlines())
    if cells[0].startswith("`--")
}
# Their default depends on the node, or on the job.
MADE = {
    "--node-id": "host-pid", "--message-log": "TMPDIR", "--message-log-limit": "half of what is free there",
    "--helpers": "none; with `log+parallel` as many as pay", "--parallel-sum": "ordered",
    "--metrics-addr": "127.0.0.1",
}  # fmt: skip


def test_the_options_of_the_page_are_ours() -> None:
    assert set(ROWS) == set(OURS)


@pytest.mark.parametrize("option", OURS)
def test_a_default_is_what_the_page_says(option: str) -> None:
    default = OURS[option].default
    said = ROWS[option].split(" |")[0].strip("` |")
    if option in MADE:
        assert default is None and said == MADE[option]
    elif isinstance(default, int | float):
        assert float(said) == default
    elif default:
        assert said == default
    else:
        assert not re.fullmatch(r"[\d.]+", said)


def test_commands_of_swiftctl_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in cli.commands)
