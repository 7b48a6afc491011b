"""What an agent, its workers and its standby server say to each other."""

from __future__ import annotations

import json
import typing
from dataclasses import fields
from typing import Any

import pytest

from swift_agent.agent.processes import orders
from swift_agent.wire import messages as wire
from swift_agent.wire.vocabulary import NotUnderstood, Vocabulary, name_of, written

STORE = wire.Store("10.0.0.1", 29400, 29401, "secret")
SAID_TO_WORKER: list[wire.ToWorker] = [
    wire.Go(3, {"kind": "copy", "iteration": 7, "sources": {"1": 0}}, 4, STORE, "/tmp/kept", leaves=True),
    wire.Go(3, {}, 4, STORE),
    wire.Go(3, {"kind": "copy", "replays": [1]}, 4, STORE, helpers=2, share=1),
    wire.Stop(2, "node b is lost"),
    wire.Pause(2),
    wire.Boundary(2, 9, saves=True),
    wire.LogGroup((0, 1, 2)),
    wire.Where(),
    wire.Wait(),
    wire.Place(5, ""),
    wire.Refused("it was not started by that"),
    wire.Release(),
]
SAID_TO_AGENT: list[wire.ToAgent] = [
    wire.Hello(1, 2),
    wire.Report(2, {"rank": 1, "status": "holding", "iteration": 9, "logs": {"0": [1, 2]}}),
    wire.Holds(),
    wire.Resumed(2, 9, {"regroup": 0.25, "transfer": 1.0}),
    wire.Finished(2, {"parts": ["ä"], "digest": None}),
    wire.Promised(2, 9, saves=True),
    wire.Parked(2),
    wire.Kept(9, 1),
    wire.At(9),
    wire.At(9, {8: 1.25}),
    wire.Unfit("no log", hopeless=True),
    wire.Suspect("reset by peer"),
    wire.Again(2, "timed out"),
    wire.AskPlace(5, 2),
    wire.Measured(3, {"rank": 1, "iteration_s": 0.5, "sent_bytes": {"2": 100}}),
    wire.Modules(("numpy", "torchvision")),
    wire.Kernels(("torch 2.13.0, AVX2", "torch 2.13.0, AVX512"), (0, 1)),
    wire.Note(1, "repeats 4 iterations"),
]
ASSIGNMENT = orders.Assignment({"RANK": "1"}, "", "/tmp/err", "/home", "script", "/home/train.py", ("--lr", "0.1"))
SAID_TO_SERVER: list[orders.ToServer] = [
    orders.Standbys(2), orders.Preload(("numpy",)), orders.Start(1, ASSIGNMENT)
]  # fmt: skip
SAID_BY_SERVER: list[orders.FromServer] = [
    orders.Ready({"cupy": "no GPU"}), orders.Preloaded({}, {"m": "starts threads"}, spoiled=False), orders.Started(1, 9)
]  # fmt: skip
DIRECTIONS: list[tuple[Vocabulary[Any], Any, list[Any]]] = [
    (wire.TO_WORKER, wire.ToWorker, SAID_TO_WORKER),
    (wire.TO_AGENT, wire.ToAgent, SAID_TO_AGENT),
    (orders.TO_SERVER, orders.ToServer, SAID_TO_SERVER),
    (orders.FROM_SERVER, orders.FromServer, SAID_BY_SERVER),
]


def carried(message: Any) -> Any:
    """As a channel gives it to the other side."""
    return json.loads(json.dumps(written(message)))


@pytest.mark.parametrize(("vocabulary", "union", "said"), DIRECTIONS)
def test_every_message_comes_as_it_was_sent(vocabulary: Vocabulary[Any], union: Any, said: list[Any]) -> None:
    assert {type(message) for message in said} == set(typing.get_args(union)), "one of each"
    for message in said:
        assert vocabulary.read(carried(message)) == message


def test_names_are_unique_in_each_direction_and_no_field_is_called_op() -> None:
    for _, union, _ in DIRECTIONS:
        kinds = typing.get_args(union)
        assert len({name_of(kind) for kind in kinds}) == len(kinds)
        assert not [kind for kind in kinds if "op" in {f.name for f in fields(kind)}]
    assert name_of(wire.AskPlace) == "ask place" and carried(wire.Where()) == {"op": "where"}


@pytest.mark.parametrize(("message", "why"), [
    ({}, "None is no message of this version"),
    ({"op": ["stop"]}, r"\['stop'\] is no message of this version"),
    ({"op": "hello", "local_rank": 0, "generation": 1}, "'hello' is no message of this version"),
    ({"op": "stop", "why": "lost"}, "'stop': .*'generation'"),
    ({"op": "stop", "generation": "second", "why": "lost"}, "'stop'.generation: expected int, found str"),
    ({"op": "stop", "generation": True, "why": "lost"}, "'stop'.generation: expected int, found bool"),
    ({"op": "go", "generation": 1, "plan": {}, "world_size": 1, "store": {"host": "h"}}, "'go'.store: .*'port'"),
])  # fmt: skip
def test_what_is_not_understood_is_named(message: dict[str, Any], why: str) -> None:
    with pytest.raises(NotUnderstood, match=why):
        wire.TO_WORKER.read(message)


def test_a_field_of_a_newer_version_is_left_out() -> None:
    assert wire.TO_WORKER.read({"op": "pause", "generation": 3, "gently": True}) == wire.Pause(3)


def test_no_secret_is_shown() -> None:
    assert "secret" not in repr(SAID_TO_WORKER)


def test_a_standby_takes_nothing_but_its_assignment() -> None:
    assert orders.TO_STANDBY.read(carried(ASSIGNMENT)) == ASSIGNMENT
    with pytest.raises(NotUnderstood):
        orders.TO_STANDBY.read(carried(orders.Standbys(1)))
