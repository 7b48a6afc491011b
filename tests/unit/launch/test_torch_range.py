"""A torch that is newer than any that the tests ran with is named, once, and nothing is refused."""

from __future__ import annotations

import re

import pytest

from swift_agent.launch import torch_range
from tests.support.job import ROOT


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0+cu130", "unknown"])
def test_of_a_known_one_nothing_is_said(version: str) -> None:
    assert torch_range.warning(version) == ""


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0+cu130", "3.0.0a0+git1234"])
def test_a_newer_one_is_named(version: str) -> None:
    said = torch_range.warning(version)
    assert said.startswith(f"torch {version} is newer than what swift-agent was tested with (2.15)")


def test_the_range_begins_with_the_torch_that_the_tests_install() -> None:
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None and oldest is not None and pinned[1] == oldest[1]


def test_the_newest_is_the_one_that_the_readme_names() -> None:
    named = re.search(r"`make test TORCH=(\d+)\.(\d+)\.\d+`", (ROOT / "README.md").read_text())
    assert named is not None and (int(named[1]), int(named[2])) == torch_range.NEWEST
