"""DTensors (FSDP2, tensor parallel) seen as what this rank holds of them.

A replica holds the same part, so the part is what is sent, compared and kept; mesh and placements are the script's. No
import of `torch.distributed`: a DTensor is told by its local tensor. Must never communicate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(value: object) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """The part that is here, which shares its memory with *tensor*; a plain tensor is its own."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def like(local: Tensor, parameter: Any) -> Tensor:
    """The DTensor of which *local* is this rank's part, distributed as *parameter* is."""
    tensor: Tensor = type(parameter.data).from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return tensor


def replicas_of(parameter: Any) -> list[int]:
    """Global ranks that hold the same part of a DTensor, this one included: its mesh, where it is replicated."""
    mesh = parameter.device_mesh
    ranks: Tensor = mesh.mesh
    (coordinate,) = (ranks == mesh.get_rank()).nonzero().tolist()
    for dim, placement in reversed(list(enumerate(parameter.placements))):
        if not placement.is_replicate():
            ranks = ranks.select(dim, coordinate[dim])
    return sorted(int(rank) for rank in ranks.flatten().tolist())
