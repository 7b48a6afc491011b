"""Objects that the script has tracked beside models and optimizers, of classes that are not torch's: what they hold,
and whose state counts after an iteration that was run for its result only.

    dry run, from the weights before the update: before --> after      then the update comes from a replica
        changed by it, or with averages (tensors of weights) in it -----> the state of the replica
        anything else (a counter, a schedule, a place in the data) -----> what the script here has made of it

What differs from rank to rank (a mean of each rank's losses) is no replica's to give. This module must never change an
object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from swift_agent.wire.given import fingerprint
from swift_agent.worker.tracked.position import Position
from swift_recovery.errors import StateError
from swift_recovery.state import stateful
from swift_recovery.state.checksum import checksum_of

_PLACE = ("epoch", "passes", "batch", "sections")
_KNOWN = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def plain(others: Mapping[str, Any]) -> dict[str, Any]:
    """Those of classes that are not torch's."""
    return {name: one for name, one in others.items() if not isinstance(one, _KNOWN)}


def own(others: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` ones, but for a loader: its place in the data is that of the script here."""
    return {name: one for name, one in plain(others).items() if name != "loader"}


def samples(others: Mapping[str, Any]) -> list[int]:
    """Of the state of a loader that is tracked, and of all `own` objects, by samples; 63 bits each."""
    trees = {name: stateful.capture(one) for name, one in sorted(plain(others).items())}
    loader = trees.pop("loader", None)
    return [fingerprint(loader) >> 1, fingerprint(trees) >> 1]


def contents(one: Any) -> tuple[int, list[Tensor]]:
    """A digest of all in its state that is no tensor; and the tensors, in an order that only the state decides. What
    cannot be sent to a replacement is left out."""
    digest, tensors = xxhash.xxh3_64(), list[Tensor]()
    for leaf in _leaves(stateful.capture(one)):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        else:
            digest.update(leaf)
    return digest.intdigest(), tensors


def digest_of(plain_part: int, tensors: Collection[Tensor]) -> str:
    """Of `contents`, or of some of the tensors."""
    digest = xxhash.xxh3_64(plain_part.to_bytes(8, "little"))
    for tensor in tensors:
        try:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}{checksum_of(tensor)}".encode())
        except StateError:
            continue  # without plain memory
    return digest.hexdigest()


def _leaves(tree: Any) -> Iterator[Any]:
    """Tensors, and bytes of all else."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield f"{{{len(tree)}".encode()
        for key in sorted(tree, key=repr):  # two ranks may have entered them in another order
            yield repr(key).encode()
            yield from _leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        yield f"[{len(tree)}".encode()
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, (set, frozenset)):
        yield repr(sorted(map(repr, tree))).encode()
    elif isinstance(tree, numpy.ndarray):
        if tree.dtype.kind in "biufc":
            yield f"{tree.dtype}{tree.shape}".encode() + tree.tobytes()
    elif type(tree) in stateful.SCALARS or isinstance(tree, (int, float, str, numpy.generic)):
        yield repr(tree).encode()


@dataclass(frozen=True)
class Held:
    """What `own` objects hold: a digest of each, and the names of those with tensors of floating-point numbers."""

    digests: Mapping[str, str]
    averages: frozenset[str]


NOTHING = Held({}, frozenset())


def held(others: Mapping[str, Any]) -> Held:
    digests, averages = {}, set()
    for name, one in own(others).items():
        part, tensors = contents(one)
        digests[name] = digest_of(part, tensors)
        if any(tensor.is_floating_point() for tensor in tensors):
            averages.add(name)
    return Held(digests, frozenset(averages))


@dataclass(frozen=True)
class DryRun:
    """What `own` objects held when an iteration was run for its result: *before* it, and *after* it."""

    before: Held = NOTHING
    after: Held = NOTHING

    def _changed(self, name: str) -> bool:
        return self.before.digests.get(name) != self.after.digests[name]

    def of_replica(self, now: Held, apart: Collection[str], *, same_place: bool) -> frozenset[str]:
        """The update came from a replica: objects that must have its state, too. *now*: what they hold here; *apart*:
        those that differ from rank to rank; *same_place*: its state is of where the script here is. If it is of a later
        place the script is yet to change (a number of epochs) what has nothing to do with the update."""
        changed = {name for name in self.after.digests if self._changed(name)} if same_place else set[str]()
        return frozenset(changed | now.averages).difference(apart)

    def of_iteration(self, now: Held) -> frozenset[str]:
        """The iteration is run after all, for its effect: objects that then keep what it makes of them. *now*: what
        they held before that; those that the script has changed since the dry run keep its changes."""
        return frozenset(name for name, digest in self.after.digests.items() if now.digests.get(name) == digest)

    def are_behind(self, now: Held) -> list[str]:
        """Of those that keep the changes of the script: averages, which may be of weights before the update."""
        changed = {name for name, digest in now.digests.items() if self.after.digests.get(name) != digest}
        return sorted(changed & now.averages)


def trees_of(offer: Mapping[str, Any] | None, iteration: int, here: Position) -> tuple[Mapping[str, Any], bool]:
    """Their states after the update before *iteration*, from what another rank offers (see `Place.offer`): where it has
    come to a point since, else where it has begun something. From the point it may have gone on. And whether that is
    the place where the script is *here*, but for that iteration."""
    if offer is None:
        return {}, False
    at_point = offer["position"]["iteration"] == iteration
    tree = offer["point"] if at_point else offer["start"]
    trees: Mapping[str, Any] = tree["others"] if tree else {}
    same_place = not at_point or all(offer["position"][name] == getattr(here, name) for name in _PLACE)
    return trees, same_place


def told_behind(number: int, names: Collection[str]) -> str:
    return (
        f"iteration {number} was made after all, when the script had gone on from its result: who had the update was "
        f"lost as well. What the script has changed since then in {', '.join(names)} (of job.track()) may come from "
        "the weights before it. Change an average of the weights inside the iteration, or keep it in an nn.Module"
    )


def told_apart(names: Collection[str]) -> str:
    return (
        "objects given to job.track() have another state on other ranks, and a replacement gets that of a replica: "
        f"{', '.join(names)}"
    )


@dataclass
class Owed:
    """An iteration that the script believes done, while its update is still to come from a replica."""

    iteration: int
    run: Callable[[], Any]
    dry_run: DryRun = field(default_factory=DryRun)
