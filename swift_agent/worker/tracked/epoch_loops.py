"""Loops of epochs, one after the other in a script: in which of them, and in which epoch of it, a replacement goes on.

They are counted as they begin, in all processes alike. Those before the one that a replacement has to get to are passed
over as wholes, and what lies between them runs without effect. This module must never look at data, nor communicate.
"""

from __future__ import annotations

from collections.abc import Iterator

from swift_agent.worker.tracked.loop_state import Place


def epochs(place: Place, start: int, num_epochs: int) -> Iterator[int]:
    """Those of the loop that begins now: from *start* on, or from where a replacement has to go on."""
    here, target = place.here, place.target
    assert here.loop is not None
    here.loop += 1
    if place.is_before_loop:
        return  # the others have been through it
    place.later = None
    is_there = target is not None and target.loop in (None, here.loop)
    if target is not None and target.loop is not None:
        place.is_before_epoch = False
    first = here.epoch if is_there else start
    for epoch in range(first, num_epochs):
        if not (is_there and epoch == first and place.target is not None):
            here.begin_epoch(epoch, is_told=False)
        yield epoch
    if is_there:
        # What comes after this loop is no part of it, and may be where it has to get to.
        place.later = place.target if first < num_epochs else None
        place.target = None


def comes_to_another(place: Place) -> None:
    """To a loop without epochs, or to a pass over a loader."""
    if place.later is not None:
        place.target, place.later = place.later, None


def told_missing(place: Place) -> str:
    """In words, if the script has ended before the loop in which it has to go on; else ''."""
    if not place.is_before_loop:
        return ""
    assert place.target is not None
    return (
        f"the script ends after {place.here.loop} loops over job.epochs(), and has to go on in number "
        f"{place.target.loop}: what decides how many there are is something that a replacement does not have. Give "
        "all loops a number that does not depend on the training, or track what decides"
    )
