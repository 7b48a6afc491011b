"""Optimizers that are not torch's own, each with a habit of one that people use."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.optim import Optimizer


class Momentum(Optimizer):
    """Makes zeros of gradients that are not there, and goes on by its momentum, as Muon for one device does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                history = self.state[p].setdefault("history", [torch.zeros_like(p)])
                history[0].lerp_(p.grad, 0.1)
                p.grad.lerp_(history[0], 0.5)
                p.sub_(p.grad, alpha=group["lr"])


class Listed(Optimizer):
    """Keeps running products of gradients in a list, as SOAP does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.reshape(p.shape[0], -1)
                (gram,) = self.state[p].setdefault("GG", [torch.zeros(p.shape[0], p.shape[0])])
                gram.lerp_(grad @ grad.T, 0.1)
                p.sub_((grad / (gram.diagonal().sqrt()[:, None] + 1e-8)).reshape(p.shape), alpha=group["lr"])


class Estimating(Optimizer):
    """Keeps estimates in its groups, one in place, and writes none without gradients, as Prodigy does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "d": 1e-3, "k": 0, "total": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = sum(float(p.grad.abs().sum()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        if not size:
            return
        for group in self.param_groups:
            group["d"], group["seen"] = max(group["d"], size / 100), [*group.get("seen", []), size]
            group["k"] += 1
            group["total"].add_(size)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


class Counted(Optimizer):
    """Counts under a key that is no parameter, and cannot do without gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["step"] = cast(Any, 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        self.state["step"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.state["step"])
        return float(self.state["step"])


class Decayed(torch.optim.SGD):
    """Calls the step of another class, which has hooks of its own, and goes on after that."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)
