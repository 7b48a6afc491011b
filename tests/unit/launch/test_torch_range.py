"""A torch that is newer than any that the tests ran with is named, once, and nothing is refused."""

from __future__ import annotations

import re

import pytest

from swift_agent.launch import torch_range
from tests.support.job import ROOT


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.13.1", "unknown"])
def test_of_a_known_one_nothing_is_said(version: str) -> None:
    assert torch_range.warning(version) == ""


@pytest.mark.parametrize("version", ["2.14.0", "2.15.0+cu130", "3.0.0a0+git1234"])
def test_a_newer_one_is_named(version: str) -> None:
    said = torch_range.warning(version)
    assert said.startswith(f"torch {version} is newer than what swift-agent was tested with (2.13)")


def test_the_newest_is_the_one_that_the_tests_install() -> None:
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and (int(pinned[1]), int(pinned[2])) == torch_range.NEWEST
