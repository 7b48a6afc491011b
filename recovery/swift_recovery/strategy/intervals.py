"""How often a checkpoint is worth its time: what failures cost that come at random. Pure.

It must never be given a checkpoint that takes no time: there is then no interval that is too short.
"""

from __future__ import annotations

import math


def young_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints (Young 1974), for failures once in *mtbf_s*. The same as 1 / c* of
    Just-In-Time Checkpointing (EuroSys'24), where c* = sqrt(N f / 2 o) for N GPUs that fail f times a second each, and
    o is what a checkpoint takes."""
    _check(checkpoint_s, mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The same where failures are not rare beside it (Daly 2006, equation 37)."""
    _check(checkpoint_s, mtbf_s)
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    part = math.sqrt(checkpoint_s / (2 * mtbf_s))
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + part / 3 + part**2 / 9) - checkpoint_s


def wasted(interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """The part of the time that is no progress: checkpoints, and for each failure a restart and half an interval."""
    _check(checkpoint_s, mtbf_s)
    return checkpoint_s / interval_s + (restart_s + interval_s / 2) / mtbf_s


def _check(checkpoint_s: float, mtbf_s: float) -> None:
    if checkpoint_s <= 0 or mtbf_s <= 0:
        raise ValueError("a checkpoint takes time, and failures have some between them")
