"""What is private in torch's DataLoader: the iterators of all loaders, and whether one has given a batch yet.

This module must never change what an iterator gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_watch: Callable[[Any], None] | None = None


def watch_draws(watch: Callable[[Any], None]) -> None:
    """From now on each iterator of a DataLoader is handed to *watch* when it is asked for a batch, and to no other
    function that was given here before."""
    global _watch
    _watch = watch
    original = _BaseDataLoaderIter.__next__
    if not hasattr(original, "_swift"):
        _BaseDataLoaderIter.__next__ = _watched(original)  # type: ignore[method-assign]


def has_given(iterator: Any) -> bool:
    """Whether it has given a batch of this pass. One whose processes stay begins each pass again, and is the same."""
    return bool(iterator._num_yielded)


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def draw(self: Any) -> Any:
        if _watch is not None:
            _watch(self)
        return original(self)

    draw._swift = True  # type: ignore[attr-defined]
    return draw
