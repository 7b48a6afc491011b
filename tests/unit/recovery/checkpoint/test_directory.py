"""States in files, and checkpoints in a directory: what counts, what is damaged, what goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swift_logging_store.stores.local import LocalStore
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part, to_remove
from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import state_file
from swift_recovery.transfer.state_file import StateCopy, Written


def make(seed: int, num_steps: int) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 300), nn.Linear(300, 300).bfloat16())
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())  # with strides
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model[3](model[:3](torch.randn(4, 8)).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainingState({"m": model}, {"o": optimizer})


def write(path: Path, state: Any, extra: Any = None) -> Written:
    with open(path, "wb") as stream:
        return state_file.write(stream, state, extra)


def read(path: Path, state: TrainingState, expected: Written | None = None) -> Any:
    with open(path, "rb") as stream:
        return state_file.read(stream, str(path), state, expected)


def values(state: TrainingState) -> int:
    return checksum([*state.replicated_tensors(), *(b for m in state.models.values() for b in m.buffers())])


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_comes_back(copied: bool, tmp_path: Path) -> None:
    old, new, extra = make(1, 3), make(2, 0), {"at": [1, 2], "seed": torch.arange(5)}
    before = values(old)
    source = StateCopy(old, extra) if copied else old
    if copied:
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.add_(1)  # training goes on
    written = write(tmp_path / "one", source, None if copied else extra)
    assert written.num_bytes == (tmp_path / "one").stat().st_size
    found = read(tmp_path / "one", new, written)
    assert found["at"] == [1, 2] and torch.equal(found["seed"], torch.arange(5))
    assert values(new) == before


def test_each_damage_of_a_state_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "one"
    written = write(path, make(1, 1), {"at": 1})
    whole, target = path.read_bytes(), make(2, 0)
    for offset in [*range(0, 200, 7), *range(200, len(whole), 9973), *range(len(whole) - 20, len(whole))]:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        with pytest.raises(StateError):
            read(path, target, written)
        path.write_bytes(whole[:offset])
        with pytest.raises(StateError):
            read(path, target)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StateError, match="damaged"):
        read(path, target)
    write(path, make(3, 1), {"at": 1})
    with pytest.raises(StateError, match="not what was written"):
        read(path, target, written)  # whole, and another one


def made(directory: CheckpointDirectory, iteration: int, commit: bool = True) -> Checkpoint:
    parts = []
    for ranks in ((0, 1), (2, 3)):
        path = directory.new_part(iteration, ranks[0])
        with directory.store.writing(path) as stream:
            stream.write(b"state")
        parts.append(Part(path.rpartition("/")[2], ranks, Written(5, 77)))
    found = Checkpoint(iteration, 4, tuple(parts))
    if commit:
        directory.commit(found)
    return found


def test_what_counts(tmp_path: Path) -> None:
    directory = CheckpointDirectory(LocalStore(tmp_path / "a" / "b"))
    assert directory.committed() == [] and directory.newest() == 0
    first = made(directory, 100)
    made(directory, 200)
    made(directory, 300, commit=False)
    (tmp_path / "a" / "b" / "iteration-5").mkdir()
    (tmp_path / "a" / "b" / "notes.txt").touch()
    assert directory.committed() == [100, 200]
    assert (directory.newest(), directory.newest(before=200), directory.newest(before=100)) == (200, 100, 0)
    assert directory.load(100) == first
    with directory.store.reading(directory.path_of(first, first.part_of(3))) as stream:
        assert stream.read() == b"state"
    assert first.part_of(2) is first.parts[1] and first.fits(4) and not first.fits(2)
    everybodys = Checkpoint(1, 2, (Part("n", (0, 1), Written(1, 1)),))
    assert everybodys.fits(7) and everybodys.part_of(6).name == "n"


def test_old_ones_go_and_a_cut_removal_leaves_none_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(LocalStore(tmp_path))
    for iteration in (100, 200, 300, 400):
        made(directory, iteration, commit=iteration != 200)
    made(directory, 500, commit=False)  # may be under way
    with monkeypatch.context() as context:
        context.setattr(LocalStore, "remove_directory", lambda *args: None)  # cut after the first step
        assert directory.remove(keep=2, newest=400) == [100, 200]
    assert directory.committed() == [300, 400]
    assert directory.remove(keep=2, newest=400) == [100, 200]
    assert sorted(path.name[-3:] for path in tmp_path.iterdir()) == ["300", "400", "500"]


@given(st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)), st.integers(1, 3), st.integers(1, 12))
def test_what_is_kept_is_enough(committed: set[int], begun: set[int], keep: int, newest: int) -> None:
    """The one that has just come to count stays whatever a run that went further has left."""
    committed.add(newest)
    removed = set(to_remove(committed, begun, keep, newest))
    older = {number for number in committed if number <= newest}
    assert sorted(older - removed) == sorted(older)[-keep:] and newest not in removed
    assert removed == {number for number in committed | begun if number < newest} - set(sorted(older)[-keep:])


def test_a_part_that_is_not_seen_is_told_of(tmp_path: Path) -> None:
    directory = CheckpointDirectory(LocalStore(tmp_path))
    found = made(directory, 100, commit=False)
    directory.check_parts(found)
    (tmp_path / directory.path_of(found, found.parts[1])).write_bytes(b"stat")
    with pytest.raises(StateError, match="of ranks 2-3 is not there for all: do all nodes share"):
        directory.check_parts(found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "its format has version 2, this is 1"),
        ({"iteration": 101}, "is of iteration 101"),
        ({"world_size": 5}, "parts of ranks 0-3, of 5"),
        ({"parts": []}, "parts of ranks , of 4"),
        ({"parts": [{"name": "../passwd", "ranks": "0-3", "num_bytes": 1, "checksum": "0"}]}, "no name of a file"),
        ({"parts": [{"name": "..", "ranks": "0-3", "num_bytes": 1, "checksum": "0"}]}, "no name of a file"),
        ({"parts": [{"name": "one"}]}, "'ranks'"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    directory = CheckpointDirectory(LocalStore(tmp_path))
    made(directory, 100)
    path = tmp_path / "iteration-000000000100" / "committed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StateError, match=why):
        directory.load(100)
    path.write_text("{")
    with pytest.raises(StateError, match="cannot be used"):
        directory.load(100)
