"""Two ways out of a half-done update that give up exactness: those of Nicolae et al. (CCGrid 2022). Pure.

For comparison, and for jobs that accept a small deviation; `half_done_updates` has the exact ways, which are taken
unless another one is asked for. All replicas are equal afterwards in any case, and a set that can go forward exactly
does.

- *immediate rollback*: a survivor's state goes to all others as it is, and the iteration is run again, so what that
  survivor had updated is updated twice. If one of them has not begun the update it is taken, and nothing deviates.
- *lossy forward*: what any survivor has updated stays updated, and the rest of the update is made with the mean over
  the survivors: a replacement takes part in the iteration that is repeated, but its gradients do not count.

These ways must never be the default: a set leaves its update by one of them only where that was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swift_recovery.planning.half_done_updates import Patch, forward


@dataclass(frozen=True)
class Deviation:
    """What a plan says of sets that leave an update inexactly.

    *keeps*: ranks that take their half-done update for a state as it is. *resumed*: by rank, parameters of which the
    update is made already when the iteration is repeated. *silent*: ranks whose gradients do not count in it.
    """

    keeps: tuple[int, ...] = ()
    resumed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    def __or__(self, other: Deviation) -> Deviation:
        return Deviation(self.keeps + other.keeps, {**self.resumed, **other.resumed}, self.silent + other.silent)


def immediate_rollback(updated: Mapping[int, frozenset[int]], sound: list[int]) -> tuple[list[int], Deviation]:
    """Which ranks hold the state that all others of a set get. *updated*: by survivor that was cut in the update, what
    it has updated; *sound*: those that had not begun it."""
    if sound or not updated:
        return sound, Deviation()
    lead = min(updated, key=lambda rank: (len(updated[rank]), rank))
    return [lead], Deviation(keeps=(lead,))


def lossy_forward(
    updated: Mapping[int, frozenset[int]], sound: list[int], members: Collection[int], new: Collection[int]
) -> tuple[list[int], tuple[Patch, ...], Deviation]:
    """Which ranks hold the state that all others of a set get, and what they have to get for that. *new*: the *members*
    that replace a lost one. Where no update was begun all is exact."""
    made = frozenset().union(*updated.values())
    if not made:
        return sound, (), Deviation()  # nothing is lost: the replacement takes part as any other rank
    silent = tuple(sorted(new))
    # As if there were no other parameters than these: the set goes forward with them.
    order = sorted(made)
    number_of = {number: index for index, number in enumerate(order)}
    lead, patches = forward({r: frozenset(map(number_of.__getitem__, have)) for r, have in updated.items()}, len(order))
    renumbered = tuple(Patch(tuple(order[i] for i in p.parameters), p.source, p.targets) for p in patches)
    return [lead], renumbered, Deviation(resumed=dict.fromkeys(sorted(members), tuple(order)), silent=silent)
