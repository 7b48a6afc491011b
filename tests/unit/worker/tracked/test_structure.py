"""Parameters that come or go while a model trains are told once; snapshots see buffers that it gets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from swift_agent.worker.tracked.structure import Structure
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState


def test_a_parameter_that_comes_or_goes_is_told_once() -> None:
    model = nn.Linear(2, 2)
    said: list[str] = []
    structure = Structure(TrainingState({"model": model}), said.append)
    for _ in range(3):
        structure.end()
    prune.l1_unstructured(model, "weight", 0.5)
    assert not said
    structure.end()
    assert len(said) == 1 and "(model.weight, model.weight_orig): neither a replacement nor a later run" in said[0]
    for _ in range(20):
        structure.end()
    structure.look()
    assert len(said) == 1


def test_it_is_looked_at_seldom_and_before_each_checkpoint() -> None:
    model = nn.Linear(2, 2)
    said: list[str] = []
    structure = Structure(TrainingState({"model": model}), said.append)
    for _ in range(5):
        structure.end()
    model.bias = None
    structure.end()
    assert not said
    structure.look()
    assert "(model.bias)" in said[0]
    Structure(TrainingState({"model": model}), None).look()


def test_snapshots_see_the_first_buffer_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = TrainingState({"model": model})
    snapshot, structure = Snapshot(state), Structure(state, None)
    structure.snapshots = (snapshot,)
    snapshot.take()
    model[1].register_buffer("count", torch.zeros(1))
    structure.end()
    snapshot.restore()
    assert model[1].count == 0
    model[1].count += 1
    snapshot.restore()
    assert model[1].count == 0 and not snapshot.is_current()
    model[1].count += 1
    snapshot.take()
    model[1].count += 1
    snapshot.restore()
    assert model[1].count == 1


def test_a_snapshot_of_such_a_module_is_installed_where_it_has_not_been_seen() -> None:
    """And the other way round: its state has come with the whole state then."""
    snapshots, models = [], []
    for count in (3.0, 5.0):
        model = nn.Linear(2, 2)
        snapshots.append(Snapshot(TrainingState({"model": model})))
        model.register_buffer("count", torch.tensor(count))
        models.append(model)
    snapshots[0].take()
    unseen = snapshots[0].tree()
    snapshots[0].look()
    snapshots[0].take()
    snapshots[1].install(snapshots[0].tree())
    assert models[1].count == 3
    models[1].count += 4
    snapshots[1].install(unseen)
    assert models[1].count == 7
