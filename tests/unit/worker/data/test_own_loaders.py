"""A DataLoader that the script goes through by itself is told once it goes on from one iteration to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.worker.data.test_inputs import Script

_TOLD = "trains on batches of a DataLoader that the script goes through by itself"


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2)), batch_size=2, **options)


def told(script: Script) -> list[str]:
    return [note for note in script.notes if _TOLD in note]


def use(script: Script, *given: Any) -> None:
    script.iterate(lambda *batches: script.model(torch.cat(batches)), *given)
    script.inputs.ran()


@pytest.mark.parametrize("where", ["alone", "beside", "inside"])
def test_one_that_goes_on_is_told(where: str) -> None:
    script, own = Script(), iter(loader(shuffle=True))

    def train(*given: Any) -> None:
        (own_batch,) = next(own)
        script.model(torch.cat([*given, own_batch]))

    for number, (batch,) in enumerate(script.batches(loader())):
        if where == "inside":
            script.iterate(train, batch)
            script.inputs.ran()
        else:
            (own_batch,) = next(own)
            use(script, *([own_batch] if where == "alone" else [batch, own_batch]))
        assert len(told(script)) == (number > 0)
    assert script.place.carries and not script.unfit
    assert told(script)[0].endswith("a lost worker restarts all workers.")


def test_workers_that_were_lost_before_it_is_known() -> None:
    script, own = Script(), iter(loader())
    script.place.has_recovered = True
    for _ in range(2):
        use(script, *next(own))
    assert len(script.unfit) == 1 and _TOLD in script.unfit[0] and not told(script)


@pytest.mark.parametrize("persistent", [False, True])
def test_whole_passes_are_not(persistent: bool) -> None:
    """Between two iterations, and in sections; of a loader that the job goes through itself, in whatever wrapper."""
    script = Script()
    validation = loader(num_workers=1, persistent_workers=True) if persistent else loader()
    in_section = iter(loader())

    def section() -> None:
        script.place.inside = "section"
        next(in_section)
        script.place.inside = ""

    class Wrapped:
        def __iter__(self) -> Iterator[Any]:
            yield from loader()

    for (batch,) in script.batches(Wrapped()):
        script.section(section)
        assert sum(1 for _ in validation) == 6
        use(script, batch, torch.ones(1, 2))
    assert not told(script) and not script.place.carries
