"""Profiles: read as a whole, or refused with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_recovery.strategy.profile import Machine, ProfileError, parse, pipelined_s

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "profiles").glob("*.json"))
LEAST: dict[str, Any] = {"machines": [{"computation_s": 2.0}], "network_bytes_per_s": 1e9}


def test_the_least_that_has_to_be_said() -> None:
    profile = parse(json.dumps(LEAST))
    assert profile.machines == (Machine(2.0),) and profile.boundary_bytes == ()
    assert (profile.iteration_s, profile.checkpoint_every, profile.mtbf_s) == (2.0, 100, 60 * 86400.0)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    assert len(parse(path.read_text()).machines) > 1


def test_one_number_is_meant_for_all_boundaries() -> None:
    machines = [{"computation_s": 1.0}] * 3
    assert parse(json.dumps({**LEAST, "machines": machines, "boundary_bytes": 5})).boundary_bytes == (5.0, 5.0)


def test_a_pipeline_takes_the_time_of_its_bubble_too() -> None:
    """t (m + p - 1) / m."""
    assert pipelined_s([8.0] * 4, 8) == 8.0 * (8 + 4 - 1) / 8
    data = {**LEAST, "machines": [{"computation_s": 8.0}] * 4, "micro_batches": 8}
    profile = parse(json.dumps({**data, "boundary_bytes": 1e6}))
    assert profile.iteration_s == 11.0 and profile.bubble_s == 3.0


def test_machines_that_send_each_other_nothing_compute_at_the_same_time() -> None:
    data = {**LEAST, "machines": [{"computation_s": 8.0}] * 4, "micro_batches": 8}
    assert parse(json.dumps(data)).iteration_s == 8.0
    # Two pipelines of two machines each.
    assert parse(json.dumps({**data, "boundary_bytes": [1e6, 0, 1e6]})).iteration_s == 9.0
    # Stages inside of each machine.
    inside = {**data, "machines": [{"computation_s": 8.0, "stages": 4}] * 4}
    assert parse(json.dumps(inside)).iteration_s == 11.0


def test_a_job_may_take_no_checkpoints() -> None:
    assert parse(json.dumps(LEAST)).takes_checkpoints
    assert not parse(json.dumps({**LEAST, "takes_checkpoints": False})).takes_checkpoints
    with pytest.raises(ProfileError, match="takes_checkpoints: true or false"):
        parse(json.dumps({**LEAST, "takes_checkpoints": 0}))


@pytest.mark.parametrize(("text", "wrong"), [
    ("{", ["no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"]),
    ("[]", ["not an object: a profile begins with {"]),
    ("{}", ['machines: a list is needed, as [{"computation_s": 1.5}, ...]', "network_bytes_per_s: has to be given"]),
    (json.dumps({**LEAST, "name": 3, "load_s": -1, "micro_batches": 1.5, "checkpoint_s": 0, "restart_s": "5"}), [
        "micro_batches: 1.5 is no whole number",
        "checkpoint_s: 0 is too little: more than 0",
        "load_s: -1 is too little: at least 0",
        "restart_s: '5' is no number",
        "name: not a text",
    ]),
    (json.dumps({**LEAST, "machines": [{}, 3, {"computation_s": True, "has_replica": 1}], "boundary_bytes": [1, 2]}), [
        "machines[0].computation_s: has to be given",
        'machines[1]: not an object, as {"computation_s": 1.5}',
        "machines[2].computation_s: True is no number",
        "machines[2].has_replica: true or false",
    ]),
    (json.dumps({**LEAST, "machines": [{"computation_s": 1}] * 3, "boundary_bytes": [1]}), [
        "boundary_bytes: one number for all, or a list of 2, one between each two machines",
    ]),
    (json.dumps({**LEAST, "machines": [{"computation_s": 1}] * 2, "boundary_bytes": [-1]}), [
        "boundary_bytes[0]: -1 is no number of bytes",
    ]),
    (json.dumps({**LEAST, "load_s": float("nan")}), ["load_s: nan is no number"]),
    (json.dumps({**LEAST, "machines": [{"computation_s": 1e-323}], "micro_batches": 4}), [
        "machines[0].computation_s: 1e-323 is too little: at least 1e-30",
    ]),
    (json.dumps({**LEAST, "machines": [{"computation_s": 1}], "boundary_bytes": [5, 6, 7]}), [
        "boundary_bytes: one machine has no neighbour: a list of 0, or nothing",
    ]),
    ('{"load_s": 1, "machines": [{"computation_s": 1, "computation_s": 2}], "network_bytes_per_s": 5, "load_s": 2}', [
        "load_s: given more than once",
        "machines[0].computation_s: given more than once",
    ]),
    (json.dumps({**LEAST, "machines": [{"computation_s": 9}, {"computation_s": 10}], "iteration_s": 1}), [
        "iteration_s: 1 is less than machines[1].computation_s, which is a part of it",
    ]),
    (json.dumps({**LEAST, "restart_s": 10**400}), [f"restart_s: {10**400} is no number"]),
])  # fmt: skip
def test_all_that_is_wrong_is_told(text: str, wrong: list[str]) -> None:
    with pytest.raises(ProfileError) as error:
        parse(text)
    assert str(error.value).splitlines() == wrong


def test_one_machine_has_no_neighbours() -> None:
    for boundaries in ([], 5):
        one = {**LEAST, "machines": [{"computation_s": 1}], "boundary_bytes": boundaries}
        assert parse(json.dumps(one)).boundary_bytes == ()


def test_a_field_that_there_is_not() -> None:
    with pytest.raises(ProfileError, match="bandwidth: no such field; there are boundary_bytes, checkpoint_every"):
        parse(json.dumps({**LEAST, "bandwidth": 1}))
    there_are = r"machines\[0\].gpus: no such field; there are computation_s, gradient_bytes, has_replica"
    with pytest.raises(ProfileError, match=there_are):
        parse(json.dumps({**LEAST, "machines": [{"computation_s": 1, "gpus": 8}]}))


def test_lists_in_lists_without_end_are_no_profile() -> None:
    with pytest.raises(ProfileError, match="no JSON"):
        parse("[" * 200_000)
