"""Exit codes, errors and the options of swiftctl are each on a page; options of swift-run, messages and variables are
held by tests of their own.
"""

from __future__ import annotations

import re

import click
import pytest

import swift_agent
from swift_agent.ctl.main import cli
from swift_agent.launch.outcome import EXIT_CODES
from tests.support.job import ROOT
from tests.support.texts import rows

DOCS = ROOT / "docs"


def test_exit_codes_of_swift_run() -> None:
    told = [cells[0] for head, cells in rows(DOCS / "signals.md") if head[0] == "code"]
    assert sorted(map(int, told)) == sorted(EXIT_CODES.values())
    sentence = (DOCS / "cli.md").read_text().split("[Exit codes]")[1].split("\n\n")[0]
    assert {int(code) for code in re.findall(r"\b(\d+), ", sentence)} == set(EXIT_CODES.values())


def test_errors() -> None:
    names = [name for name in swift_agent.__all__ if isinstance(getattr(swift_agent, name), type)]
    page = (DOCS / "api.md").read_text()
    assert len(names) > 4 and not [name for name in names if not re.search(rf"\b{name}\b", page)]


def options() -> list[tuple[str, str]]:
    found, todo = [], [("", cli)]
    while todo:
        path, command = todo.pop()
        if isinstance(command, click.Group):
            todo += [(f"{path} {name}".strip(), one) for name, one in command.commands.items()]
        found += [
            (path, name)
            for one in command.params if isinstance(one, click.Option)
            for name in (*one.opts, *one.secondary_opts) if name.startswith("--")
        ]  # fmt: skip
    return [(path, option) for path, option in found if option not in ("--help", "--version")]


PAGES = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))


@pytest.mark.parametrize(("command", "option"), options())
def test_options_of_swiftctl(command: str, option: str) -> None:
    assert re.search(rf"(?<![\w-]){option}(?![\w-])", PAGES), f"no page has {option} of swiftctl {command}"


def test_some_are_found() -> None:
    assert len(options()) > 20 and ("drain", "--cancel") in options()
