"""How gradients of parameters come to be in a part of a step: added once or more often, each in its own tensor. Pure.

This module must never change one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

Version = tuple[int, int] | None
"""Of a gradient: which tensor it is, and how often that was written; None: there is none."""


def versions(parameters: Sequence[Tensor]) -> list[Version]:
    return [_version_of(one) for one in parameters]


def are_added_twice(parameters: Sequence[Tensor], before: Sequence[Version]) -> bool:
    """Whether a gradient that was there *before* was added to more than once since then."""
    # Gradients that are views of one tensor count their versions together.
    sharing = Counter(_memory_of(one) for one in parameters)
    for one, was in zip(parameters, before, strict=True):
        now = _version_of(one)
        if was is not None and now is not None and was[0] == now[0] and now[1] > was[1] + sharing[_memory_of(one)]:
            return True
    return False


def are_shared(parameters: Sequence[Tensor]) -> bool:
    """Whether the gradients of two parameters are one tensor, as torch's backward for weights may leave them: what is
    added to one of them is added to the other."""
    places = [one.grad.data_ptr() for one in parameters if one.grad is not None and one.grad.numel()]
    return len(set(places)) < len(places)


def _version_of(parameter: Tensor) -> Version:
    gradient = parameter.grad
    return (id(gradient), gradient._version) if gradient is not None else None


def _memory_of(parameter: Tensor) -> int:
    gradient = parameter.grad
    return id(None) if gradient is None else id(gradient if gradient._base is None else gradient._base)
