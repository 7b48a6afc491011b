"""What the inverses of many optimizers' steps have in common: what a rule is, averages, decay. Pure arithmetic.

For `rules`, which has the names and the error of each. This module must never know an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Hyper = Mapping[str, Any]
State = MutableMapping[str, Any]
Values = Mapping[str, Any]

# An average that keeps less than this of its past has lost it: dividing by the factor would multiply every rounding.
MIN_FACTOR = 1e-2


@dataclass(frozen=True)
class Rule:
    """*needs*: what has to be kept besides gradient and hyper-parameters; `keep` gives it, without ever waiting for a
    device: a scalar of the state is kept as a tensor. *note*: for people, what is special."""

    needs: Literal["nothing", "a number", "the parameter if weight decay is coupled", "two tensors"]
    undo: Callable[[Hyper, Tensor, Tensor, State, Values], None]
    keep: Callable[[Hyper, Tensor, State], dict[str, Any]] = lambda hyper, p, state: {}
    note: str = ""


def unlerp(average: Tensor, g: Tensor, weight: float) -> None:
    """m' = m + weight (g - m). With a weight of 1 nothing of m is left in m', and m has no effect any more."""
    if 1 - weight >= MIN_FACTOR:
        average.sub_(g, alpha=weight).div_(1 - weight)


def unsquare(average: Tensor, g: Tensor, factor: float) -> None:
    """v' = factor v + (1 - factor) g g. A root is taken of v, so what a rounding left below zero is zero."""
    if factor >= MIN_FACTOR:
        average.addcmul_(g, g, value=-(1 - factor)).div_(factor).clamp_min_(0)


def with_decay(g: Tensor, p: Tensor, hyper: Hyper) -> Tensor:
    """The gradient that the averages saw; *p* is undone already."""
    decay = hyper["weight_decay"]
    return g if decay == 0 or hyper.get("decoupled_weight_decay") else g.add(p, alpha=decay)


def undecay(p: Tensor, hyper: Hyper) -> None:
    if hyper["weight_decay"] != 0:
        p.div_(1 - hyper["lr"] * hyper["weight_decay"])  # a tensor where lr is one, as in the step


def keep_parameter(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    """For a step p' = p - r (g + wd p), in which r is large where gradients are small: with r wd = 1 no p is left."""
    return {} if hyper["weight_decay"] == 0 or hyper.get("decoupled_weight_decay") else {"parameter": p.clone()}


def copies(state: State, *names: str) -> dict[str, Any]:
    return {name: state[name].clone() for name in names if name in state}


def step_back(state: State) -> float:
    """The number of the step that is undone; the state then has the one before."""
    number = float(state["step"])
    state["step"] -= 1
    return number
