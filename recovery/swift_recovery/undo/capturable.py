"""What a step with `capturable=True` did to a parameter, taken back; for `rules`. Pure arithmetic (torch 2.13).

Such a step never asks its device for a number. Step count and learning rate stay tensors, and so do the corrections of
bias that it works out from them: in float32 whatever the parameter is, and in another order for each way. As 1 -
0.999**1 in float32 is wrong by up to 6e-5 of itself, an inverse with numbers of Python would miss the step by far more
than a rounding. So each function here repeats torch's operations on the scalars to the letter, foreach ones by foreach
functions, and thereby gets the same update. All of them must be called while the state has the step count of the step
that is undone.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

Hyper = Mapping[str, Any]
State = MutableMapping[str, Any]


def is_capturable(hyper: Hyper) -> bool:
    """Whether scalars were tensors. The fused kernels work them out themselves."""
    return bool(hyper.get("capturable")) and not hyper.get("fused")


def is_foreach(hyper: Hyper, p: Tensor) -> bool:
    """Which of its two ways torch took, as it chooses itself where nobody has."""
    if hyper.get("foreach") is None:
        return not hyper.get("fused") and torch_optimizer._default_to_fused_or_foreach([p], False)[1]
    return bool(hyper["foreach"])


def adam(hyper: Hyper, p: Tensor, state: State) -> None:
    beta1, beta2 = hyper["betas"]
    step, lr, eps = state["step"], hyper["lr"], hyper["eps"]
    root = (state["max_exp_avg_sq"] if hyper["amsgrad"] else state["exp_avg_sq"]).sqrt()
    if is_foreach(hyper, p):
        rate = _complement(beta1, step)
        torch._foreach_neg_(rate)
        torch._foreach_div_(rate, lr)
        torch._foreach_reciprocal_(rate)
        correction = _complement(beta2, step)
        torch._foreach_sqrt_(correction)
        divisor = [root]
        torch._foreach_div_(divisor, correction)
        torch._foreach_add_(divisor, eps)
        torch._foreach_div_(divisor, rate)
    else:
        rate = (lr / (1 - beta1**step)).neg()
        divisor = (root / ((1 - beta2**step).sqrt() * rate)).add_(eps / rate)
    _add_quotient(p, state["exp_avg"], divisor)


def adamax(hyper: Hyper, p: Tensor, state: State) -> None:
    beta1, _ = hyper["betas"]
    if is_foreach(hyper, p):
        correction = list(torch._foreach_pow(beta1, [state["step"]]))
        torch._foreach_sub_(correction, 1)
        torch._foreach_div_(correction, hyper["lr"])
        divisor = torch._foreach_mul([state["exp_inf"]], correction)
    else:
        divisor = state["exp_inf"] * (beta1 ** state["step"] - 1).div_(hyper["lr"])
    _add_quotient(p, state["exp_avg"], divisor)


def nadam(hyper: Hyper, p: Tensor, g: Tensor, state: State) -> None:
    """*g*: as the averages saw it. The foreach way adds up its two terms first; the other one did one after the other,
    and they are taken back one after the other."""
    beta1, beta2 = hyper["betas"]
    step, product, lr, decay = state["step"], state["mu_product"], hyper["lr"], hyper["momentum_decay"]
    if is_foreach(hyper, p):
        exponent = torch._foreach_mul([step], decay)
        mu = _momentum(beta1, exponent)
        torch._foreach_add_(exponent, decay)
        following = _momentum(beta1, exponent)
        correction = _complement(beta2, step)
        torch._foreach_sqrt_(correction)
        root = [state["exp_avg_sq"].sqrt()]
        torch._foreach_div_(root, correction)
        torch._foreach_add_(root, hyper["eps"])
        torch._foreach_sub_(mu, 1.0)
        torch._foreach_mul_(mu, lr)
        below = torch._foreach_sub([product], 1.0)
        torch._foreach_neg_(below)
        torch._foreach_div_(mu, below)
        below = torch._foreach_mul([product], following)
        torch._foreach_mul_(following, lr)
        torch._foreach_sub_(below, 1.0)
        torch._foreach_div_(following, below)
        update = torch._foreach_mul(mu, [g])
        torch._foreach_addcmul_(update, following, [state["exp_avg"]])
        _add_quotient(p, update, root)
        return
    mu = beta1 * (1.0 - 0.5 * (0.96 ** (step * decay)))
    following = beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * decay)))
    root = state["exp_avg_sq"].div(1 - beta2**step).sqrt().add(hyper["eps"])
    _add_quotient(p, state["exp_avg"] * (-lr * following / (1.0 - product * following)), root)
    _add_quotient(p, g * (-lr * (1.0 - mu) / (1.0 - product)), root)


def radam(hyper: Hyper, p: Tensor, state: State) -> None:
    beta1, beta2 = hyper["betas"]
    step, lr, eps = state["step"], hyper["lr"], hyper["eps"]
    longest = 2 / (1 - beta2) - 1
    if not is_foreach(hyper, p):
        bias2 = 1 - beta2**step
        length = longest - 2 * step * (beta2**step) / bias2
        rect = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
        adaptive = (bias2**0.5) / state["exp_avg_sq"].sqrt().add_(eps)
        update = torch.where(length > 5.0, rect * adaptive, 1.0)
        p.add_(state["exp_avg"] / (1 - beta1**step) * lr * update)
        return
    lengths = list(torch._foreach_pow(beta2, [step]))
    torch._foreach_mul_(lengths, step)
    torch._foreach_mul_(lengths, 2)
    torch._foreach_div_(lengths, _complement(beta2, step))
    torch._foreach_neg_(lengths)
    torch._foreach_add_(lengths, longest)
    rects = torch._foreach_sub(lengths, 4)
    torch._foreach_mul_(rects, torch._foreach_sub(lengths, 2))
    torch._foreach_mul_(rects, longest)
    torch._foreach_div_(rects, torch._foreach_mul(lengths, (longest - 4) * (longest - 2)))
    torch._foreach_sqrt_(rects)
    rect = torch.where(lengths[0] > 5.0, rects[0], 0.0)
    plain, bias1, rectified = [torch.where(rect > 0, 0.0, 1.0)], _complement(beta1, step), _complement(beta2, step)
    torch._foreach_mul_(plain, lr)
    torch._foreach_div_(plain, bias1)
    torch._foreach_neg_(plain)
    torch._foreach_sqrt_(rectified)
    torch._foreach_mul_(rectified, lr)
    torch._foreach_mul_(rectified, [rect])
    torch._foreach_neg_(rectified)
    torch._foreach_div_(rectified, bias1)
    radam_foreach(p, state, eps, rectified, plain)


def radam_foreach(p: Tensor, state: State, eps: float, rectified: Any, plain: Any) -> None:
    """The end of a foreach step of RAdam, capturable or not: scales for where it is adaptive and for where not, one of
    them 0, of which the other code makes numbers."""
    scale = [state["exp_avg_sq"].sqrt()]
    torch._foreach_add_(scale, eps)
    torch._foreach_div_(scale, rectified)
    torch._foreach_reciprocal_(scale)
    torch._foreach_add_(scale, plain)
    torch._foreach_addcmul_([p], [state["exp_avg"]], scale, -1)


def asgd_scalars(hyper: Hyper, p: Tensor, eta: Tensor) -> tuple[float, float]:
    """The rate, and what a step leaves of a parameter besides its weight decay; both as they were rounded."""
    rate = float(eta.to(p.dtype))
    if is_foreach(hyper, p):
        return rate, 1 - hyper["lambd"] * rate
    return rate, float((1 - hyper["lambd"] * eta).to(p.dtype))


def _complement(factor: float, step: Tensor) -> list[Tensor]:
    """1 - factor**step, as foreach steps work it out (which of the two signs comes first does not matter)."""
    power = list(torch._foreach_pow(factor, [step]))
    torch._foreach_sub_(power, 1)
    torch._foreach_neg_(power)
    return power


def _momentum(beta1: float, exponent: Any) -> list[Tensor]:
    mu = list(torch._foreach_pow(0.96, exponent))
    torch._foreach_mul_(mu, -0.5)
    torch._foreach_add_(mu, 1.0)
    torch._foreach_mul_(mu, beta1)
    return mu


def _add_quotient(p: Tensor, above: Any, below: Any) -> None:
    """Take p' = p + above / below back; lists of one tensor for what a foreach function did."""
    if isinstance(below, Tensor):
        p.addcdiv_(above, below, value=-1)
    else:
        torch._foreach_addcdiv_([p], above if isinstance(above, list | tuple) else [above], below, -1)
