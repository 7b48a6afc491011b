"""What kind of loader a script iterates, and where its samples are chosen: there a pass is positioned.

    DataLoader                                 its own sampler
    Accelerate's DataLoaderShard               that of the DataLoader inside, and its epoch
    Fabric's loader, timm's PrefetchLoader     that of the DataLoader inside
    timm's MultiEpochsDataLoader               that of a DataLoader that stands in for it
    anything else                              nowhere: its batches are drawn and dropped

Wrappers are known by name, as none of these packages is a need of ours. Of a class that is not known it must never be
assumed that it heeds the sampler that it was made with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from swift_agent.errors import UsageError

_INSIDE = ("base_dataloader", "_dataloader", "loader")
_SAMPLERS = ("sampler", "batch_sampler")


@dataclass
class Source:
    """*loader*: what is iterated. *inner*: the `DataLoader` whose indices are chosen for a pass, None if there is none
    that heeds them. *is_wrapped*: that one is asked for an iterator with the first batch only. *looks_ahead*: it is
    asked for more than the batch that is wanted. *swaps*: (object, attribute, value) for as long as it is asked for
    an iterator. *seeded*: generators are seeded for each batch that the wrapper takes from the attribute of that
    name, as it draws itself."""

    loader: Any
    inner: DataLoader[Any] | None = None
    is_wrapped: bool = False
    looks_ahead: bool = False
    swaps: list[tuple[Any, str, Any]] = field(default_factory=list)
    seeded: str = ""

    @property
    def has_indices(self) -> bool:
        """Batches can be left out without loading them."""
        return self.inner is not None and not isinstance(self.inner.dataset, IterableDataset)


def find(loader: Any) -> Source:
    """Raises `UsageError` for a loader whose batches no replacement could have."""
    name = _known(loader)
    if name == "DataLoaderDispatcher":
        raise UsageError(
            "job.batches(): Accelerate's DataLoaderDispatcher has rank 0 read every batch and broadcast it, outside of "
            "iterations, where a replacement could not join: let each rank read its own, with "
            "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)); an IterableDataset has to "
            "give each rank its part then."
        )
    if name in ("DataLoaderShard", "SkipDataLoader"):
        source = _around(loader, "base_dataloader", looks_ahead=name == "DataLoaderShard")
        if name == "DataLoaderShard":
            # It would send the state of a generator from rank 0 to all, outside of iterations.
            source.swaps.append((loader, "rng_types", None))
        return source
    if name == "_FabricDataLoader":
        return _around(loader, "_dataloader")
    if name == "PrefetchLoader":
        source = _around(loader, "loader", looks_ahead=True)
        source.seeded = "loader"  # it erases parts of images at random
        return source
    if name == "MultiEpochsDataLoader":
        return Source(loader, _single_epochs(loader))
    if is_plain(loader):
        if loader.num_workers and not loader.in_order:
            raise UsageError(
                "job.batches(): DataLoader(in_order=False) gives batches in the order in which its processes happen to "
                "be done, which no replacement could repeat: leave in_order=False out."
            )
        return Source(loader, loader)
    return Source(loader)


def is_plain(loader: Any) -> bool:
    """Whether it is iterated as torch's own class is, so that it heeds the sampler it has at that time."""
    kind = type(loader)
    if not issubclass(kind, DataLoader):
        return False
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def _known(loader: Any) -> str:
    """The name of the class of a known package that *loader* is of, else nothing."""
    for kind in type(loader).__mro__:
        if kind.__module__.partition(".")[0] in ("accelerate", "lightning", "lightning_fabric", "timm"):
            return kind.__name__
    return ""


def _around(loader: Any, attribute: str, *, looks_ahead: bool = False) -> Source:
    inside = find(vars(loader)[attribute])
    swaps = inside.swaps
    if inside.inner is not None and inside.inner is not inside.loader and not inside.is_wrapped:
        swaps = [*swaps, (loader, attribute, inside.inner)]  # what stands in for it
    return Source(loader, inside.inner, True, looks_ahead or inside.looks_ahead, swaps)


def _single_epochs(loader: Any) -> DataLoader[Any]:
    """A `DataLoader` that begins each pass again, with the processes of the one before; made once."""
    made: DataLoader[Any] | None = vars(loader).get("_swift_stand_in")
    if made is None:
        made = copy.copy(loader)
        assert made is not None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        values = {"_iterator": None, "iterator": None, "persistent_workers": loader.num_workers > 0}
        vars(made).update(values, **{name: getattr(loader, name).sampler})
        made.__class__ = DataLoader
        vars(loader)["_swift_stand_in"] = made
    return made


def parts(loader: Any) -> Iterator[Any]:
    """*loader* itself, the loaders inside it and all their samplers, each once."""
    seen: list[Any] = []
    waiting = [loader]
    while waiting:
        one = waiting.pop(0)
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        own = getattr(one, "__dict__", {})
        found = [own.get(name) for name in _INSIDE] + [getattr(one, name, None) for name in _SAMPLERS]
        waiting += [other for other in found if hasattr(other, "__iter__")]
