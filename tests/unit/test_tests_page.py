"""tests/README.md names a test of each capability, in the tier where it says that it runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import tiers

TESTS = Path(__file__).parents[1]
FOLDERS = ("faults", "integration", "strangers", "model")
HEAD = ["capability", "in `make test`", "in `make test-all` too"]


def functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def files() -> dict[str, list[str]]:
    return {
        str(path.relative_to(TESTS)): functions(path) for name in FOLDERS for path in (TESTS / name).glob("test_*.py")
    }


def rows(text: str) -> list[list[str]]:
    lines = text.partition("## Which test shows what")[2].splitlines()
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in found if len(row) == len(HEAD) and row != HEAD]


def is_quick(path: str, name: str) -> bool:
    """Whether at least one of its parameters is."""
    entries = tiers.QUICK.get(path, ())
    return path.startswith("model/") or "" in entries or name in {entry.partition("[")[0] for entry in entries}


def has_more(path: str, name: str) -> bool:
    """Whether some of its parameters run in `make test-all` only."""
    parts = any("[" in entry and entry.partition("[")[0] == name for entry in tiers.QUICK.get(path, ()))
    return parts or any(entry.partition("[")[0] == name for entry in tiers.LATER.get(path, ()))


def mistakes(text: str) -> list[str]:
    known, wrong = files(), []
    quick, named = set(), set()
    for capability, in_test, in_all in rows(text):
        tests, more = re.findall("`(.+?)`", in_test), re.findall("`(.+?)`", in_all)
        if not tests and not more:
            wrong.append(f"{capability}: no test")
        for one in (*tests, *more):
            path, _, name = one.partition("::")
            named.add(path)
            if path not in known or (name and name not in known[path]):
                wrong.append(f"{one} is no test")
        for one in tests:
            path, _, name = one.partition("::")
            quick.add(path)
            if not is_quick(path, name):
                wrong.append(f"{one} is not in `make test`")
        for one in more:
            path, _, name = one.partition("::")
            wants = [name] if name else known.get(path, [])
            if all(is_quick(path, want) and not has_more(path, want) for want in wants):
                wrong.append(f"{one} is in `make test` already")
    wrong += [f"{path} shows no capability" for path in sorted(set(known) - named)]
    wrong += [f"{path} is in `make test`, and no row says for what" for path in sorted(set(tiers.QUICK) - quick)]
    return wrong


def test_the_page_names_the_tests_as_they_run() -> None:
    assert not mistakes((TESTS / "README.md").read_text())


@pytest.mark.parametrize(("old", "new", "wrong"), [
    ("faults/test_kill_points.py::test_node`", "faults/test_kill_points.py::test_nod`",
     "faults/test_kill_points.py::test_nod is no test"),
    ("test_who_works_alone_is_waited_for`", "test_a_wait_for_nobody_ends_the_job`",
     "faults/test_waits.py::test_a_wait_for_nobody_ends_the_job is not in `make test`"),
    ("`integration/test_scale_benchmark.py`", "", "the control plane with many nodes: no test"),
    ("`integration/test_scale_benchmark.py`", "", "integration/test_scale_benchmark.py shows no capability"),
    ("`faults/test_journal.py::test_journals_of_a_job_with_kills_replay_as_the_same` | |",
     " | `faults/test_journal.py` |", "faults/test_journal.py is in `make test` already"),
])  # fmt: skip
def test_a_row_that_is_wrong_is_found(old: str, new: str, wrong: str) -> None:
    text = (TESTS / "README.md").read_text()
    assert old in text
    assert wrong in mistakes(text.replace(old, new))


def test_every_folder_is_named() -> None:
    text = (TESTS / "README.md").read_text()
    for path in TESTS.iterdir():
        if path.is_dir() and not path.name.startswith("__"):
            assert f"`{path.name}/`" in text
