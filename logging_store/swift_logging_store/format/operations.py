"""The collectives whose results are logged, and the tags by which logs name them. Pure.

A tag must never change, nor be given again: logs on disks and in stores name collectives by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COLLECTIVE_TAGS: Mapping[str, int] = MappingProxyType({
    "allreduce": 0,
    "allreduce_coalesced": 1,
    "broadcast": 2,
    "allgather": 3,
    "_allgather_base": 4,
    "all_gather_single": 5,
    "barrier": 6,
    "allgather_coalesced": 7,
    "allgather_into_tensor_coalesced": 8,
    "all_gather_single_coalesced": 9,
})  # fmt: skip
"""By the method of torch's `ProcessGroup`."""
