"""Takes back the last step of an optimizer, a parameter at a time (SWIFT section 4.2 and appendix A). Pure arithmetic.

Before a step `keep` notes what the step will overwrite without a trace: the hyper-parameters of that step (a scheduler
changes them), a scalar for some optimizers, tensors for one. After it, `undo` works out parameter and state as they
were, in place, from what the step left, from the gradient that it saw and from what was kept. Parameters can be undone
in any order, and those that the step has not reached must not be.

    p, state --keep--> Kept          p', state' + gradient + Kept --undo--> p, state (within a few roundings)

Operations are inverted one by one in the dtype of the parameter, in reverse order: that repeats the roundings of the
step, and comes closer than an inverse in a higher precision. `rules` has the arithmetic for each optimizer.

This module must never choose the parameters or the moment: `swift_agent.worker.updates.overlapped` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.undo.capturable import is_foreach
from swift_recovery.undo.parts import Rule
from swift_recovery.undo.rules import RULES


@dataclass(frozen=True)
class Kept:
    """What `undo` needs of one parameter from before its step.

    *hyper*: hyper-parameters of its group in that step, copies of tensors. *fresh*: the step made its state, so an
    undo removes it. *values*: numbers and copies of tensors by name, as its `Rule` asks for.
    """

    hyper: Mapping[str, Any]
    fresh: bool
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are kept for this parameter."""
        return sum(value.nbytes for value in self.values.values() if isinstance(value, Tensor))


# https://github.com/pytorch/pytorch/issues/191763: by fused SGD in half precision on the CPU; its buffer is misread.
LEAVES_OUT_VECTORS = torch.__version__ < "2.14"  # torch's own comparison, by numbers


def rule_of(optimizer: Optimizer) -> Rule:
    """How *optimizer* is undone. Raises StateError, which says why, for one that cannot be.

    Subclasses do not inherit it: what they add to the step is unknown.
    """
    rule = RULES.get(type(optimizer))
    if rule is None or isinstance(rule, str):
        why = rule or "its arithmetic is not known"
        raise StateError(f"a step of {type(optimizer).__name__} cannot be undone: {why}")
    return rule


def check(optimizer: Optimizer) -> Rule:
    """`rule_of`, and that each of its parameters as it is now can be undone; StateError otherwise."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check_parameter(optimizer, group, parameter)
    return rule_of(optimizer)


def _check_parameter(optimizer: Optimizer, hyper: Mapping[str, Any], parameter: Tensor) -> None:
    name = type(optimizer).__name__
    if parameter.is_complex():
        raise StateError(f"a step of {name} with a complex parameter cannot be undone")
    if hyper.get("differentiable"):
        raise StateError(f"a step of {name} with differentiable=True cannot be undone: it is part of a graph")
    tensors = [key for key, value in hyper.items() if key not in {"params", "lr"} and _has_tensor(value)]
    if tensors:
        # torch rounds them, and what it makes of them, in one way for each way of a step.
        raise StateError(
            f"a step of {name} with {' and '.join(tensors)} as tensors cannot be undone: pass numbers; only lr may be "
            "a tensor"
        )
    copies = name == "SGD" and (hyper["weight_decay"] or hyper["maximize"])
    if name == "SGD" and hyper["nesterov"] and not copies and is_foreach(hyper, parameter):
        raise StateError(
            "a step of SGD with nesterov and foreach=True (on CUDA the default), and without weight decay, cannot be "
            "undone: torch adds the momentum to the gradients themselves; pass foreach=False"
        )
    half = parameter.dtype in {torch.float16, torch.bfloat16} and parameter.device.type == "cpu"
    if LEAVES_OUT_VECTORS and half and name == "SGD" and hyper.get("fused"):
        raise StateError(
            f"a step of SGD with fused=True and {str(parameter.dtype).removeprefix('torch.')} parameters on the CPU "
            "cannot be undone: torch before 2.14 does not update most of them; pass fused=False"
        )


def table() -> str:
    """What is kept for the undo of each optimizer, as the table of this room's README."""
    lines = ["| optimizer | kept besides the gradient | remark |", "|---|---|---|"]
    for cls, rule in RULES.items():
        if isinstance(rule, str):
            lines.append(f"| {cls.__name__} | not undone | {rule} |")
        else:
            lines.append(f"| {cls.__name__} | {rule.needs} | {rule.note} |")
    return "\n".join(lines)


def keep(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Kept:
    """Before the step of *parameter*, which is in *group*. Costs no copy of a tensor unless the rule says so, but for
    scalars; never waits for a device."""
    rule = rule_of(optimizer)
    # A scheduler writes into a learning rate that is a tensor.
    hyper = {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
    state = optimizer.state.get(parameter) or {}
    # SGD makes its buffer only when it needs one, with an entry that may be there already.
    fresh = not any(isinstance(value, Tensor) for value in state.values())
    return Kept(hyper, fresh, rule.keep(hyper, parameter.detach(), state))


@torch.no_grad()
def undo(optimizer: Optimizer, parameter: Tensor, gradient: Tensor, kept: Kept) -> None:
    """Bring *parameter* and its state back to before its step. *gradient*: as the step saw it; it stays as it is.

    Afterwards a step with the same gradient and hyper-parameters gives what the first one gave, within the bound of
    the rule. Raises StateError for what `check` refuses and for a sparse one, before anything is changed.
    """
    rule = rule_of(optimizer)
    if gradient.is_sparse:
        raise StateError(f"a step of {type(optimizer).__name__} with a sparse gradient cannot be undone")
    _check_parameter(optimizer, kept.hyper, parameter)
    hyper, values, state = dict(kept.hyper), kept.values, optimizer.state[parameter]
    if isinstance(hyper.get("lr"), Tensor):
        hyper["lr"] = hyper["lr"].item() if hyper.get("fused") else hyper["lr"].reshape(())
    direction = -gradient if hyper.get("maximize") else gradient
    rule.undo(hyper, parameter.detach(), direction, state, values)
    if kept.fresh:
        optimizer.state.pop(parameter, None)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(each, Tensor) for each in (value if isinstance(value, (list, tuple)) else [value]))
