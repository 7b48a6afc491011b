"""A state in a file of its node, and where a pass over the data goes on in a world of another size."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from swift_agent.worker.data import positions
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Units
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.errors import StateError
from swift_recovery.transfer import node_file, node_paths


def tracked(seed: int, num_steps: int) -> Tracked:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 300), nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, None)


def offer() -> dict[str, Any]:
    return {"position": {"iteration": 3, "batch": 2}, "units": {"num_ranks": 2, "num_samples": 4}}


def test_what_is_loaded_is_what_was_kept(tmp_path: Path) -> None:
    old, new = tracked(1, 3), tracked(2, 0)
    node_file.keep(str(tmp_path), 3, old.state, offer())
    assert [path.name for path in tmp_path.iterdir()] == ["kept-state.3"]
    assert node_file.load(str(tmp_path), 3, new.state) == offer()
    assert new.checksum() == old.checksum()
    node_file.keep(str(tmp_path), 4, new.state, offer())
    node_paths.remove(str(tmp_path), but=4)
    assert [path.name for path in tmp_path.iterdir()] == ["kept-state.4"]
    node_paths.remove(str(tmp_path))
    node_paths.remove(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_that_gets_its_name_while_all_are_removed_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_file.keep(str(tmp_path), 3, tracked(1, 3).state, offer())
    seen = ["kept-state.4.5f2e91ab.part", "kept-state.3"]
    monkeypatch.setattr(node_paths.os, "listdir", lambda directory: seen)
    node_paths.remove(str(tmp_path))
    assert not (tmp_path / "kept-state.3").exists()


def test_a_damaged_or_cut_file_is_refused_and_none_is_left_when_the_disk_is_full(tmp_path: Path) -> None:
    node_file.keep(str(tmp_path), 3, tracked(1, 3).state, offer())
    path = tmp_path / "kept-state.3"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateError, match="is damaged"):
        node_file.load(str(tmp_path), 3, tracked(2, 0).state)
    path.write_bytes(content[:-100])
    with pytest.raises(StateError, match="ends early"):
        node_file.load(str(tmp_path), 3, tracked(2, 0).state)
    with pytest.raises(FileNotFoundError):
        node_file.keep(str(tmp_path / "absent"), 3, tracked(1, 1).state, offer())
    node_file.keep(str(tmp_path), 5, tracked(1, 1).state, offer())
    (tmp_path / "kept-state.6").mkdir()  # in the way
    with pytest.raises(IsADirectoryError):
        node_file.keep(str(tmp_path), 6, tracked(1, 1).state, offer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept-state.3", "kept-state.5", "kept-state.6"]


def test_batches_of_another_world_leave_nothing_that_was_seen() -> None:
    assert Units(3, 4).batches_of(Units(2, 4), 3) == 2  # 24 samples were seen, 12 are in a batch
    assert Units(3, 4).batches_of(Units(2, 4), 4) == 3  # 32: the third batch has some of them
    assert Units(2, 4).batches_of(Units(3, 4), 1) == 2
    assert Units(4, 2).batches_of(Units(2, 4), 7) == 7  # the batch of all ranks stays
    assert Units(3).batches_of(Units(2, 4), 3) == 2  # one of the two does not say
    for ranks, samples, count in [(1, 1, 0), (2, 5, 9), (7, 0, 4)]:
        assert Units(ranks, samples).batches_of(Units(ranks, samples), count) == count


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (4, 3)])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_no_sample_is_seen_twice_when_the_world_changes(before: int, after: int, count: int) -> None:
    points, batch = list(range(120)), 3

    def loaders(world: int) -> list[DataLoader[int]]:
        samplers = [DistributedSampler(points, world, rank, seed=5) for rank in range(world)]  # type: ignore[arg-type]
        return [DataLoader(points, batch, sampler=sampler) for sampler in samplers]  # type: ignore[arg-type]

    seen = [x for loader in loaders(before) for one in list(loader)[:count] for x in one.tolist()]
    skip = Units(after, batch).batches_of(Units(before, batch), count)
    later = [x for loader in loaders(after) for one in positions.iterate(loader, skip) for x in one.tolist()]
    assert len({*seen, *later}) == len(seen) + len(later)
    assert 0 <= 120 - len(seen) - len(later) < after * batch


def test_the_size_of_a_batch() -> None:
    points = list(range(12))
    assert positions.samples_of(DataLoader(points, 4)) == 4  # type: ignore[arg-type]
    sampler = BatchSampler(SequentialSampler(points), 5, False)
    assert positions.samples_of(DataLoader(points, batch_sampler=sampler)) == 5  # type: ignore[arg-type]
    assert positions.samples_of(points) == 0 and positions.samples_of(DataLoader(points, batch_size=None)) == 0  # type: ignore[arg-type]


def test_a_place_passes_on_the_units_of_its_point() -> None:
    """A replacement that has not reached the point hands on what it was given, not its own."""
    giver, between = (Place(0, Seeds("iteration", 1, 0), threading.RLock()) for _ in range(2))
    giver.hold(tracked(1, 1))
    giver.units = Units(2, 4)
    giver.here.batch = 3
    giver.keep_point()
    between.hold(tracked(2, 0))
    between.status, between.units = "empty", Units(3, 4)
    between.take_over(json.loads(json.dumps(_plain(giver.offer()))) | {"point": giver.point.tree()}, 0)
    assert between.target is not None and (between.target.batch, between.target_units) == (3, Units(2, 4))
    assert between.offer()["units"] == {"num_ranks": 2, "num_samples": 4}


def _plain(offered: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if name != "point"}


def test_the_agent_loads_nothing_of_a_state() -> None:
    code = "import sys, swift_agent.agent.main; print(*(name for name in sys.modules if '.state.' in name))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "swift_recovery" not in ran.stdout
