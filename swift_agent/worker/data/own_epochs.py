"""The epochs that a script tells its samplers, by `set_epoch` of torch's `DistributedSampler` or of their own.

A sampler that the script has told an epoch keeps that one, so the order of a pass is what the script asked for, and the
loop stands in that epoch: a replacement whose loop begins with an earlier one, or with that of a snapshot, passes the
epochs before by. Samplers that nobody has told are told by the job (`data.set_epoch`).

This module must never tell a sampler anything, and never look at what a library tells one by itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data import Sampler

from swift_agent.worker.data import loaders

# Their loaders tell their samplers when a pass begins, whatever the script has said before.
_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "swift_agent")
_TOLD = "_swift_told_epoch"
_silent = False


def watch() -> None:
    """From now on what scripts tell is known: of samplers of the classes that there are. Called once or more in a
    process."""
    waiting: list[type] = [Sampler]
    while waiting:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        original = vars(kind).get("set_epoch")
        if isinstance(original, FunctionType) and not hasattr(original, "_swift"):
            kind.set_epoch = _watched(original)  # type: ignore[attr-defined]


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def set_epoch(self: Any, epoch: int, *args: Any, **named: Any) -> Any:
        result = original(self, epoch, *args, **named)
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if not _silent and caller not in _LIBRARIES and isinstance(epoch, int) and epoch >= 0:
            getattr(self, "__dict__", {})[_TOLD] = epoch
        return result

    set_epoch._swift = True  # type: ignore[attr-defined]
    return set_epoch


@contextlib.contextmanager
def not_the_script() -> Iterator[None]:
    """What is told in here comes from the job."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def of_sampler(part: Any) -> int | None:
    """What the script has told *part* last, if that is a sampler that it tells."""
    told = getattr(part, "__dict__", {}).get(_TOLD)
    return told if isinstance(told, int) else None


def of_loader(loader: Any) -> int | None:
    """The epoch for which the script has set up *loader*."""
    found = (of_sampler(part) for part in loaders.parts(loader))
    return next((epoch for epoch in found if epoch is not None), None)
