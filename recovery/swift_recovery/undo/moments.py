"""The inverse of one step of Adam and its kin, which keep averages of the gradients and of their sizes; for `rules`.

Pure arithmetic. `rules` has the names and the error. This module must never say what a rule keeps for whom: the table
there does.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from swift_recovery.undo import capturable
from swift_recovery.undo.capturable import is_capturable, is_foreach
from swift_recovery.undo.lamb import adaptive
from swift_recovery.undo.parts import (
    MIN_FACTOR,
    Hyper,
    State,
    Values,
    copies,
    keep_parameter,
    step_back,
    undecay,
    unlerp,
    unsquare,
    with_decay,
)  # fmt: skip


def adam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.adam(hyper, p, state)
        step_back(state)
    else:
        number = step_back(state)
        largest = state["max_exp_avg_sq"] if hyper["amsgrad"] else state["exp_avg_sq"]
        root = (largest.sqrt() / math.sqrt(1 - beta2**number)).add_(hyper["eps"])
        p.addcdiv_(state["exp_avg"], root, value=hyper["lr"] / (1 - beta1**number))
    if hyper["decoupled_weight_decay"]:
        undecay(p, hyper)
    g = with_decay(g, p, hyper)
    unlerp(state["exp_avg"], g, 1 - beta1)
    unsquare(state["exp_avg_sq"], g, beta2)


def nadam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if "parameter" in values:
        p.copy_(values["parameter"])
        step_back(state)
    elif is_capturable(hyper):
        capturable.nadam(hyper, p, g, state)
        step_back(state)
    else:
        lr, number = float(hyper["lr"]) if is_foreach(hyper, p) else hyper["lr"], step_back(state)
        mu, following = (
            beta1 * (1 - 0.5 * 0.96 ** (at * hyper["momentum_decay"])) for at in (number, number + 1)
        )
        product = float(state["mu_product"])
        root = state["exp_avg_sq"].div(1 - beta2**number).sqrt_().add_(hyper["eps"])
        # The sum of the two first: they may cancel.
        update = (g * float(lr * (1 - mu) / (1 - product))).div_(root)
        p.add_(update.addcdiv_(state["exp_avg"], root, value=lr * following / (1 - product * following)))
    if hyper["decoupled_weight_decay"]:
        undecay(p, hyper)
    g = with_decay(g, p, hyper)
    unlerp(state["exp_avg"], g, 1 - beta1)
    unsquare(state["exp_avg_sq"], g, beta2)
    if "mu_product" in values:
        state["mu_product"].copy_(values["mu_product"])


def keep_nadam(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return {**copies(state, "mu_product"), **keep_parameter(hyper, p, state)}


def radam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.radam(hyper, p, state)
        step_back(state)
    else:
        _radam_update(hyper, p, state, step_back(state))
    if hyper["decoupled_weight_decay"]:
        undecay(p, hyper)
    g = with_decay(g, p, hyper)
    unlerp(state["exp_avg"], g, 1 - beta1)
    unsquare(state["exp_avg_sq"], g, beta2)


def _radam_update(hyper: Hyper, p: Tensor, state: State, number: float) -> None:
    beta1, beta2 = hyper["betas"]
    bias1, bias2, lr = 1 - beta1**number, 1 - beta2**number, hyper["lr"]
    longest = 2 / (1 - beta2) - 1
    length, rect = longest - 2 * number * beta2**number / bias2, 0.0
    if length > 5:
        rect = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    if is_foreach(hyper, p):
        rectified, plain = (lr * scale / bias1 * -1 for scale in (rect, float(rect == 0)))
        capturable.radam_foreach(p, state, hyper["eps"], [math.sqrt(bias2) * rectified], [plain])
        return
    update = state["exp_avg"] / bias1 * lr
    if length > 5:
        update *= math.sqrt(bias2) / state["exp_avg_sq"].sqrt().add_(hyper["eps"])
        update *= rect
    p.add_(update)


def adamax(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.adamax(hyper, p, state)
        step_back(state)
    else:
        lr, number = float(hyper["lr"]) if is_foreach(hyper, p) else hyper["lr"], step_back(state)
        p.addcdiv_(state["exp_avg"], state["exp_inf"], value=lr / (1 - beta1**number))
    g = with_decay(g, p, hyper)
    unlerp(state["exp_avg"], g, 1 - beta1)
    if beta2 >= MIN_FACTOR:
        # u' = max(beta2 u, |g| + eps): where the gradient won, u is unknown, and this is the largest that it can be.
        state["exp_inf"].div_(beta2)


def lamb(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    # p' = p - lr trust (a + wd p), with the trust of the step that is undone
    rate = float(hyper["lr"]) * float(state["trust"])
    update = adaptive(state, step_back(state), hyper)
    p.add_(update, alpha=rate).div_(1 - rate * hyper["weight_decay"])
    unlerp(state["exp_avg"], g, 1 - hyper["betas"][0])
    unsquare(state["exp_avg_sq"], g, hyper["betas"][1])
    if "trust" in values:
        state["trust"].copy_(values["trust"])


def keep_lamb(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return copies(state, "trust")
