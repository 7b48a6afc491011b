"""Ranks of a roster whose slots have different numbers of workers and different roles, beside torch's own."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from swift_agent.wire.environment import Placement, worker_env
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.roster.decision import PublishGeneration, Rules
from swift_rendezvous.roster.draining import takers
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import GenerationRecord, NodeRecord
from swift_rendezvous.roster.resizing import owner_of
from tests.support.records import node, view

ROSTERS = [
    [("", 1), ("", 1)],
    [("", 2), ("", 1), ("", 3)],
    [("a", 1), ("b", 2), ("a", 2)],
    [("b", 4), ("a", 1), ("", 1), ("b", 2)],
]


def nodes_of(roster: list[tuple[str, int]]) -> list[NodeRecord]:
    return [NodeRecord(f"n{i}", f"n{i}.1", "127.0.0.1", 1, size, "", role) for i, (role, size) in enumerate(roster)]


def generation_of(roster: list[tuple[str, int]]) -> GenerationRecord:
    nodes = {one.node_id: one for one in nodes_of(roster)}
    job = view().job
    assert job is not None
    joined = {name: index for index, name in enumerate(nodes)}
    made = decide(
        view(nodes=nodes, joined=joined, generation=None, plan=None, tracked=False,
             job=type(job)(len(nodes), roster[0][1], "")),
        Rules(), now_s=0.0, waiting_since_s=None,
    ).commands[0]  # fmt: skip
    assert isinstance(made, PublishGeneration)
    return decode(GenerationRecord, encode(made.generation))


def torchs(roster: list[tuple[str, int]]) -> list[dict[str, int]]:
    """By rank, what torch's agents would have handed out. The first of them works it out for all."""
    store = HashStore()
    specs: list[Any] = [SimpleNamespace(role=role, local_world_size=size) for role, size in roster]
    found = []
    for slot in (*range(1, len(roster)), 0):
        if slot:  # it would wait for the first
            info = {"role": specs[slot].role, "rank": slot, "local_world_size": specs[slot].local_world_size}
            store.set(f"torchelastic/role_info/{slot}", json.dumps(info))
    for slot, spec in enumerate(specs):
        found += SimpleElasticAgent._assign_worker_ranks(None, store, slot, len(specs), spec)  # type: ignore[arg-type]
    return [{"RANK": one.global_rank, "ROLE_RANK": one.role_rank, "WORLD_SIZE": one.world_size,
             "ROLE_WORLD_SIZE": one.role_world_size} for one in found]  # fmt: skip


@pytest.mark.parametrize("roster", ROSTERS, ids=str)
def test_ranks_are_those_of_torchrun(roster: list[tuple[str, int]]) -> None:
    generation = generation_of(roster)
    found = []
    for slot, (_, size) in enumerate(roster):
        first_of_role, num_of_role = generation.role_of(slot)
        assert generation.workers_of(slot) == size
        place = Placement(
            slot, len(roster), size, "", "job", "127.0.0.1", 1, 0, 0, 1, "", first_rank=generation.first_rank(slot),
            world_size=generation.world_size, first_role_rank=first_of_role, num_of_role=num_of_role,
        )  # fmt: skip
        for local_rank in range(size):
            env = worker_env(place, local_rank, {})
            found.append({name: int(env[name]) for name in ("RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE")})
    assert found == torchs(roster)
    ranks = [(rank, slot) for slot in range(len(roster)) for rank in generation.ranks_of(slot)]
    assert ranks == [(rank, generation.slot_with(rank)) for rank in range(len(found))]


def test_a_place_is_taken_by_a_node_of_its_size_and_role() -> None:
    generation = generation_of([("a", 1), ("b", 2), ("a", 2)])
    free = nodes_of([("a", 2), ("b", 2), ("a", 1), ("b", 2)])
    found = takers(generation, [1, 0], free)
    assert {slot: one.node_id for slot, one in found.items()} == {1: "n1", 0: "n2"}
    assert takers(generation, [0], free[:2]) == {}


def test_who_asks_for_a_place_among_the_first_gets_it() -> None:
    ranks = {"late": 0, "early": 1}
    nodes = {name: NodeRecord(name, f"{name}.1", "127.0.0.1", 1, 2, node_rank=rank) for name, rank in ranks.items()}
    decision = decide(
        view(nodes=nodes, joined={"early": 1, "late": 2}, generation=None, plan=None, tracked=False),
        Rules(), now_s=0.0, waiting_since_s=None,
    )  # fmt: skip
    made = decision.commands[0]
    assert isinstance(made, PublishGeneration)
    assert [owner.node_id for owner in made.generation.slots] == ["late", "early"]


def test_equal_nodes_are_written_as_before() -> None:
    assert (owner_of(node("n0"), 2).num_workers, owner_of(node("n0", workers=3), 2).num_workers) == (0, 3)
