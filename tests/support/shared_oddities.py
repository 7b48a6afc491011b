"""Stages and scripts that several processes must not share in silence: state where one looks for it last, gradients
that go elsewhere, and what begins in a later step only. For shared_train, by the name in "odd" of its orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[..., Tensor]


class Iterates(nn.Module):
    """An iterator counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + next(self.numbers) / 100)


class Normalizes(nn.Module):
    """A parameter that trains, where torch does not count it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.copy_(nn.functional.normalize(self.weight.data))
        return x @ self.weight


class Gated(nn.Module):
    """By a tensor that gets a gradient, and is no parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = torch.ones(width, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradients[0].t() @ x)
        return gradients[0] @ weight, None


class Fused(nn.Module):
    """Its gradient is added to an attribute of the parameter, as some libraries of large models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)
        self.weight.main_grad = torch.zeros(width, width)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Loops(nn.Module):
    """From iteration 2 on gradients of one micro-batch are added twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.num = nn.Linear(width, width), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


class Positions(nn.Module):
    """Parameters as large as an activation of one micro-batch: the backward for weights gives one tensor to both."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.added = nn.ParameterList([nn.Parameter(torch.zeros(2, width)) for _ in range(num)])
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x + sum(self.added)))


class Record:
    total = 0.0


class Records(nn.Module):
    """What it is given, an object of the script, remembers all that came."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor, record: Record) -> Tensor:
        record.total += float(x.detach().sum())
        return self.inside(x)  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "iterator": Iterates, "data": Normalizes, "gate": Gated, "fused": Fused, "late twice": Loops,
    "late statistics": lambda width: nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(width)).eval(),
}  # fmt: skip
SECOND_STAGES: dict[str, Callable[[int], nn.Module]] = {
    "one gradient of two": lambda width: Positions(width, 2),
    "one gradient to be sent": lambda width: Positions(width, 1),
}


def clamped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def loss_of(odd: str, index: int, width: int, plain: Loss) -> tuple[Loss, nn.Module | None]:
    """The loss of a script; and a module that it uses, where that is deep inside of others."""
    if odd == "default":

        def counting(output: Tensor, target: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006
            seen[0] += 1
            return plain(output, target) * (1 + seen[0] / 100)

        return counting, None
    if odd == "nested":
        criterion = nn.Sequential(nn.Sequential(nn.Sequential(nn.BatchNorm1d(width))))
        return lambda output, target: plain(criterion(output), target), criterion
    if odd == "first on the replacement":
        is_first = index == 0

        def telling(output: Tensor, target: Tensor) -> Tensor:
            nonlocal is_first
            is_first = False
            return plain(output, target)

        return telling, None
    return plain, None


class Script:
    """What a loop does beside steps."""

    def __init__(self, odd: str, halves: list[nn.Sequential], parameters: list[Tensor], width: int) -> None:
        self._odd, self._parameters = odd, parameters
        self._layer: Any = next((one for half in halves for one in half.modules() if type(one) in _NAMED), None)
        self._statistics = [one for half in halves for one in half.modules() if isinstance(one, nn.BatchNorm1d)]
        self._halves, self._embedding = halves, nn.Linear(width, width)
        self.record = Record()

    def begins(self, iteration: int, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """What is given to the step in place of *x*, and beside it."""
        if iteration == 2 and self._odd == "late hook":
            self._parameters[0].register_post_accumulate_grad_hook(clamped)
        if iteration == 2 and self._odd == "late twice":
            self._layer.num = 2
        if iteration == 2 and self._odd == "late statistics":
            for half in self._halves:
                half.train()
        if self._odd == "inputs get gradients":
            x = self._embedding(x).detach().requires_grad_()
        return x, {"record": self.record} if self._odd == "object" else {}

    def ends(self, x: Tensor) -> list[float]:
        """After the steps; what it has seen."""
        if self._odd == "gate":
            gate = self._layer.gate
            seen = [gate.grad.sum().item()]
            gate.grad = None
            return seen
        if self._odd == "fused":
            weight = self._layer.weight
            weight.grad = weight.main_grad.clone()
            weight.main_grad.zero_()
        if self._odd == "inputs get gradients":
            assert x.grad is not None
            return [x.grad.sum().item()]
        seen = [one for statistics in self._statistics for one in statistics.running_mean.tolist()]
        return [*seen, self.record.total]


_NAMED = (Gated, Fused, Loops)
