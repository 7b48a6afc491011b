"""What can have its updates overlap the backward (`overlapped`), and what stands against it.

Must never change what it looks at, nor stop at the first mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swift_agent.torch_private import ddp as torch_ddp
from swift_recovery.errors import StateError
from swift_recovery.undo.undo import check


def mistakes(
    ddps: Sequence[DistributedDataParallel], optimizers: Mapping[str, Optimizer], others: Mapping[str, Any]
) -> list[str]:
    """What stands against overlapping the updates of these, in the words of an error; all at once."""
    found = []
    in_ddp = {id(parameter) for ddp in ddps for parameter in ddp.parameters() if parameter.requires_grad}
    for ddp in ddps:
        if ddp.find_unused_parameters or ddp.static_graph:
            found.append("DDP with find_unused_parameters or static_graph: it reduces gradients that no step would use")
        if torch_ddp.has_comm_hook(ddp):
            found.append("DDP with a communication hook of its own: there can be one, and overlap_update needs it")
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        try:
            check(optimizer)
        except StateError as error:
            # It may also look at all gradients before it changes the first parameter.
            found.append(f"{name}: {error}")
        if kinds := sorted({p.device.type for p in parameters} - {"cpu", "cuda"}):
            found.append(f"{name} updates parameters on {' and '.join(kinds)}: overlap_update is for the CPU and CUDA")
        if any(id(p) not in in_ddp for p in parameters):
            found.append(f"{name} updates parameters outside DistributedDataParallel: nothing reduces their gradients")
        shared = {owners[id(p)] for p in parameters if owners.setdefault(id(p), name) != name}
        found += [f"{name} and {other} update the same parameter" for other in sorted(shared)]
    for name, other in others.items():
        if isinstance(other, GradScaler):
            found.append(f"{name}: a GradScaler looks at all gradients before the update; use bfloat16, or no overlap")
    return found
