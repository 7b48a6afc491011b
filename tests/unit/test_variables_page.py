"""docs/variables.md has every environment variable that the product knows by name, and none that it does not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from swift_agent.launch.options import build_parser
from tests.support.job import ROOT
from tests.unit.test_rooms import ROOTS

PAGE = ROOT / "docs" / "variables.md"
NAME = re.compile(r"(?:SWIFT|PET|SLURMD?|TORCH|TORCHELASTIC|NCCL|GLOO)_[A-Z][A-Z0-9_]*")
# No variables: what is put before one, and the name of a dump.
PREFIXES = ("PET_", "SLURM_")


def named(source: str) -> set[str]:
    """Of a module: variables that are a whole constant of it, docstrings and messages left out."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {one for one in constants if isinstance(one, str) and NAME.fullmatch(one) and one not in PREFIXES}


def known() -> dict[str, Path]:
    return {
        name: path for root in ROOTS for path in sorted(root.rglob("*.py")) for name in sorted(named(path.read_text()))
    }


def on_page() -> set[str]:
    return set(NAME.findall(PAGE.read_text()))


def in_deploy() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "deploy").rglob("*") if path.is_file())


def test_every_variable_of_the_sources_is_on_the_page() -> None:
    missing = {name: str(path.relative_to(ROOT)) for name, path in known().items() if name not in on_page()}
    assert len(known()) > 40 and not missing


def test_every_variable_of_the_page_is_of_the_sources() -> None:
    sources = "\n".join(path.read_text() for root in ROOTS for path in root.rglob("*.py")) + in_deploy()
    options = {"PET_" + max(one.option_strings, key=len).strip("-").replace("-", "_").upper()
               for one in build_parser(None)._actions if one.option_strings}  # fmt: skip
    unknown = {name for name in on_page() if not re.search(rf"\b{name}\b", sources)} - options - {"PET_NAME"}
    assert not unknown


def test_a_variable_of_the_files_of_deploy_is_on_the_page() -> None:
    found = set(re.findall(r"\bSWIFT_[A-Z_]+\b", in_deploy()))
    assert "SWIFT_RUN_ARGS" in found and not found - on_page()


@pytest.mark.parametrize("option", [one.option_strings[0] for one in build_parser(None).ours])
def test_an_option_of_ours_is_a_variable(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says it of all."""
    action = next(one for one in build_parser(None).ours if one.option_strings[0] == option)
    before = action.default
    monkeypatch.setenv("PET_" + option.strip("-").replace("-", "_").upper(), "7")
    after = next(one for one in build_parser(None).ours if one.option_strings[0] == option).default
    assert str(after) in ("7", "7.0", "True") and after != before, (option, before, after)  # the last one: a switch


def test_a_variable_that_is_missing_is_found_out() -> None:
    assert named("A = 'SWIFT_NEW'\nb = f'{A} SWIFT_OTHER'\n'''SWIFT_TEXT is this.'''") == {"SWIFT_NEW"}
