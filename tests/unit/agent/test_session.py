"""What the script is told of its own position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from swift_agent.session import Job


def number(iteration: int, owed: bool, inside: str) -> int:
    place = SimpleNamespace(here=SimpleNamespace(iteration=iteration), owed=object() if owed else None, inside=inside)
    return Job.iteration_number.__get__(cast(Job, SimpleNamespace(_place=place)))


def test_an_iteration_is_finished_when_its_function_has_returned() -> None:
    """Also where its update is still to come from a replica: what a script does every 100 iterations it does once, and
    on all ranks."""
    assert number(5, owed=False, inside="") == 5
    assert number(5, owed=True, inside="") == 6
    assert number(5, owed=True, inside="section") == 6
    # It has to be run for its effect after all: inside it is the one that it was.
    assert number(5, owed=True, inside="iteration") == 5
