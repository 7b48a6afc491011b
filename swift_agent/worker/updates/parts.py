"""What `overlapped` says of one parameter, of one reduction, and of an iteration that is made again. Values only.

This module must never change a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swift_agent.errors import PeerFailure


@dataclass(frozen=True)
class Member:
    """One parameter that an optimizer updates. *name*: for people; *group*: its number among the optimizer's."""

    name: str
    optimizer: str
    group: int
    parameter: Tensor


@dataclass(frozen=True)
class Resumption:
    """How an iteration that was cut is repeated where that is not to be exact (see `swift_recovery.planning.lossy`).

    *numbers*: parameters that have its update already. *is_silent*: this rank's gradients do not count in it;
    *num_silent*: those of so many ranks do not.
    """

    numbers: frozenset[int] = frozenset()
    is_silent: bool = False
    num_silent: int = 0


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """For comparison; of a tensor what tells that it was changed, as its value may lie on a device."""
    return {
        key: (id(value), value._version) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def is_view(gradient: Tensor | None, reduced: Tensor) -> bool:
    """Whether who changes the one changes the other (`gradient_as_bucket_view`)."""
    return (
        gradient is not None and gradient.untyped_storage().data_ptr() == reduced.untyped_storage().data_ptr()
    )


def tensor_of(future: Any) -> Tensor:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    tensor: Tensor | None = value[0] if isinstance(value, (list, tuple)) else value
    if tensor is None:
        raise PeerFailure("stopped while gradients were being reduced")
    return tensor
