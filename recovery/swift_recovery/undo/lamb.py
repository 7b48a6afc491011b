"""LAMB (You et al., ICLR 2020, algorithm 2): Adam whose update of each parameter is scaled to that parameter's size.

A small reference, one parameter at a time. torch has none, and the SWIFT paper (appendix A) shows with it that a step
which looks at norms can be undone, if the ratio that it used is kept: it is in the state, as `trust`.
It must never know that it can be undone: `rules` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """*params*, *lr*, *betas*, *eps* and *weight_decay* as for `torch.optim.AdamW`. Gradients must be dense."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 1e-2, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        mistakes = [f"{name} is {value}" for name, value in numbers.items() if value < 0]
        if not all(0 <= beta < 1 for beta in betas):
            mistakes.append(f"betas are {betas}")
        if mistakes:
            raise ValueError(f"Lamb: {', '.join(mistakes)}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient; the result of *closure*, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, -parameter.grad if group["maximize"] else parameter.grad)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise RuntimeError("Lamb does not take sparse gradients")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["trust"] = torch.ones((), dtype=parameter.dtype, device=parameter.device)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = adaptive(state, float(state["step"]), group).add_(parameter, alpha=group["weight_decay"])
        size, length = parameter.norm(), update.norm()
        # A parameter or an update of zeros has no direction to be scaled: it is taken as it is.
        state["trust"].copy_(torch.where((size > 0) & (length > 0), size / length, 1.0))
        parameter.sub_(update.mul_(state["trust"]), alpha=group["lr"])


def adaptive(state: Any, number: float, hyper: Any) -> Tensor:
    """Adam's update at step *number*: the mean of the gradients over the root of the mean of their squares."""
    beta1, beta2 = hyper["betas"]
    root: Tensor = state["exp_avg_sq"].div(1 - beta2**number).sqrt_().add_(hyper["eps"])
    mean: Tensor = state["exp_avg"] / (1 - beta1**number)
    return mean.div_(root)
