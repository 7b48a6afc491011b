"""The inverse of one step for each optimizer of `torch.optim` (torch 2.13). Pure arithmetic; see `undo`.

Names are those of torch: *p* the parameter, *g* the gradient (negated already where the optimizer maximizes); a prime
marks the value after the step. The weight decay of most is added to the gradient, g + wd p, and needs the undone p;
where it is decoupled p was multiplied by 1 - lr wd first, which is divided out last.

Error, for each element and to first order in u, the unit roundoff of the dtype (2**-24 for float32, 2**-8 for
bfloat16). Roundings are counted with each product and each sum as one; a kernel that fuses them has fewer.

    |p - undone p| <= k u (|p| + |p' - p| + |a|) / c

The update is worked out again from what the step left, by the same operations, so it comes out the same. What remains
is the rounding of p' (u |p'|), of the sum that takes it back (u |p|), and where p was decayed those of the product, of
the quotient and of its divisor c, the part of p that the step left: 1 - lr wd, or 1. That makes k = 4 and a = 0. The
gradient's own part in SGD without momentum has two roundings more, of the update, which 4 (|p| + |p' - p|) covers.

k = 6 where p' is a sum of three terms whose roundings differ in step and undo: SGD with nesterov, NAdam, ASGD (its
divisor has two roundings) and Lamb (its rate is a product). In the first two the terms may cancel, and what was
rounded is larger than their sum: *a* is the gradient's term, lr (g + wd p) or NAdam's lr (1 - mu) / (1 - product) g /
root. It is 0 for nesterov without weight decay, where the sum comes out the same.

Adadelta works its update out with the undone average, whose error is one of 23 u at most in the root: 32 u |p' - p|
more. torch's foreach and fused code orders the operations of an update in other ways: 12 u (|p' - p| + |a|) more, for
six roundings here and six there. What `capturable` takes back, the steps of Adam, AdamW, NAdam, RAdam and Adamax
with capturable=True, needs nothing more, foreach or not; other optimizers hardly use scalars, and have the same bound
with it as without.

A learning rate that is a tensor counts with the roundings of its own dtype: torch works out lr / (1 - beta**t) or
1 - lr wd in that dtype, and in places rounds it to that of the parameter. So *lr* stays a tensor here, and the same is
done with it; where torch made a number of it (alpha=, the fused kernels) it is made one.

An average m' = b m + w e of e = g + wd p, and one of its squares, v' = b v + w e e, with |e| = |g| + wd |p|, since a
sum that cancels keeps the rounding of its parts:

    |m - undone m| <= (u (4 |m| + |m'| + 7 w |e|)   +   w wd |p - undone p|) / b
    |v - undone v| <= (u (4 |v| + |v'| + 12 w e e)  +   2 w wd |e| |p - undone p|) / b

Step and undo round b m, w e and their sum, and e itself twice; the quotient is the last. In the momentum of RMSprop, e
and wd are divided by the root. Adadelta's average of updates: u (8 |m| + 17 |m'|) / b. The mean of ASGD is one of
e = p'; while it does not average yet, it is p, which foreach reaches by a sum: |p - undone p| + |ax - p|. The division
by b is why an average with a factor near 0 is left as it is (`MIN_FACTOR`). Longer than a module should be: one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, optim
from torch.optim import _muon

from swift_recovery.undo import capturable
from swift_recovery.undo.capturable import is_capturable, is_foreach
from swift_recovery.undo.lamb import Lamb, adaptive

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


# ---- parts of many steps ----


def _unlerp(average: Tensor, g: Tensor, weight: float) -> None:
    """m' = m + weight (g - m). With a weight of 1 nothing of m is left in m', and m has no effect any more."""
    if 1 - weight >= MIN_FACTOR:
        average.sub_(g, alpha=weight).div_(1 - weight)


def _unsquare(average: Tensor, g: Tensor, factor: float) -> None:
    """v' = factor v + (1 - factor) g g. A root is taken of v, so what a rounding left below zero is zero."""
    if factor >= MIN_FACTOR:
        average.addcmul_(g, g, value=-(1 - factor)).div_(factor).clamp_min_(0)


def _with_decay(g: Tensor, p: Tensor, hyper: Hyper) -> Tensor:
    """The gradient that the averages saw; *p* is undone already."""
    decay = hyper["weight_decay"]
    return g if decay == 0 or hyper.get("decoupled_weight_decay") else g.add(p, alpha=decay)


def _undecay(p: Tensor, hyper: Hyper) -> None:
    if hyper["weight_decay"] != 0:
        p.div_(1 - hyper["lr"] * hyper["weight_decay"])  # a tensor where lr is one, as in the step


def _keep_parameter(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    """For a step p' = p - r (g + wd p), in which r is large where gradients are small: with r wd = 1 no p is left."""
    return {} if hyper["weight_decay"] == 0 or hyper.get("decoupled_weight_decay") else {"parameter": p.clone()}


def _copies(state: State, *names: str) -> dict[str, Any]:
    return {name: state[name].clone() for name in names if name in state}


def _step_back(state: State) -> float:
    """The number of the step that is undone; the state then has the one before."""
    number = float(state["step"])
    state["step"] -= 1
    return number


# ---- the optimizers ----


def _sgd(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    lr, momentum, decay = float(hyper["lr"]), hyper["momentum"], hyper["weight_decay"]
    buffer = state.get("momentum_buffer")
    if momentum == 0:
        p.add_(g, alpha=lr).div_(1 - lr * decay)  # p' = p - lr (g + wd p)
        return
    assert buffer is not None
    if hyper["nesterov"]:
        # p' = p - lr (g + wd p + momentum b'); the sum first, as the step had it: its terms may cancel
        p.add_(g.add(buffer, alpha=momentum), alpha=lr).div_(1 - lr * decay)
    else:
        p.add_(buffer, alpha=lr)
    if not values["fresh"] and momentum >= MIN_FACTOR:
        buffer.sub_(_with_decay(g, p, hyper), alpha=1 - hyper["dampening"]).div_(momentum)


def _keep_sgd(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    # The first buffer is the gradient, without dampening, and the entry may exist without one.
    return {"fresh": state.get("momentum_buffer") is None}


def _adam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.adam(hyper, p, state)
        _step_back(state)
    else:
        number = _step_back(state)
        largest = state["max_exp_avg_sq"] if hyper["amsgrad"] else state["exp_avg_sq"]
        root = (largest.sqrt() / math.sqrt(1 - beta2**number)).add_(hyper["eps"])
        p.addcdiv_(state["exp_avg"], root, value=hyper["lr"] / (1 - beta1**number))
    if hyper["decoupled_weight_decay"]:
        _undecay(p, hyper)
    g = _with_decay(g, p, hyper)
    _unlerp(state["exp_avg"], g, 1 - beta1)
    _unsquare(state["exp_avg_sq"], g, beta2)


def _nadam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if "parameter" in values:
        p.copy_(values["parameter"])
        _step_back(state)
    elif is_capturable(hyper):
        capturable.nadam(hyper, p, g, state)
        _step_back(state)
    else:
        lr, number = float(hyper["lr"]) if is_foreach(hyper, p) else hyper["lr"], _step_back(state)
        mu, following = (
            beta1 * (1 - 0.5 * 0.96 ** (at * hyper["momentum_decay"])) for at in (number, number + 1)
        )
        product = float(state["mu_product"])
        root = state["exp_avg_sq"].div(1 - beta2**number).sqrt_().add_(hyper["eps"])
        # The sum of the two first: they may cancel.
        update = (g * float(lr * (1 - mu) / (1 - product))).div_(root)
        p.add_(update.addcdiv_(state["exp_avg"], root, value=lr * following / (1 - product * following)))
    if hyper["decoupled_weight_decay"]:
        _undecay(p, hyper)
    g = _with_decay(g, p, hyper)
    _unlerp(state["exp_avg"], g, 1 - beta1)
    _unsquare(state["exp_avg_sq"], g, beta2)
    if "mu_product" in values:
        state["mu_product"].copy_(values["mu_product"])


def _keep_nadam(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return {**_copies(state, "mu_product"), **_keep_parameter(hyper, p, state)}


def _radam(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.radam(hyper, p, state)
        _step_back(state)
    else:
        _radam_update(hyper, p, state, _step_back(state))
    if hyper["decoupled_weight_decay"]:
        _undecay(p, hyper)
    g = _with_decay(g, p, hyper)
    _unlerp(state["exp_avg"], g, 1 - beta1)
    _unsquare(state["exp_avg_sq"], g, beta2)


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


def _adamax(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    beta1, beta2 = hyper["betas"]
    if is_capturable(hyper):
        capturable.adamax(hyper, p, state)
        _step_back(state)
    else:
        lr, number = float(hyper["lr"]) if is_foreach(hyper, p) else hyper["lr"], _step_back(state)
        p.addcdiv_(state["exp_avg"], state["exp_inf"], value=lr / (1 - beta1**number))
    g = _with_decay(g, p, hyper)
    _unlerp(state["exp_avg"], g, 1 - beta1)
    if beta2 >= MIN_FACTOR:
        # u' = max(beta2 u, |g| + eps): where the gradient won, u is unknown, and this is the largest that it can be.
        state["exp_inf"].div_(beta2)


def _rmsprop(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    lr, alpha, momentum, decay = float(hyper["lr"]), hyper["alpha"], hyper["momentum"], hyper["weight_decay"]
    state["step"] -= 1
    if hyper["centered"]:
        root = state["square_avg"].addcmul(state["grad_avg"], state["grad_avg"], value=-1).sqrt_()
    else:
        root = state["square_avg"].sqrt()
    root.add_(hyper["eps"])
    if momentum > 0:
        p.add_(state["momentum_buffer"], alpha=lr)
    else:
        p.addcdiv_(g, root, value=lr)
        if decay != 0:
            p.copy_(values["parameter"])
    g = _with_decay(g, p, hyper)
    if momentum >= MIN_FACTOR:
        state["momentum_buffer"].addcdiv_(g, root, value=-1).div_(momentum)
    _unsquare(state["square_avg"], g, alpha)
    if hyper["centered"]:
        _unlerp(state["grad_avg"], g, 1 - alpha)


def _keep_rmsprop(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return {} if hyper["momentum"] > 0 else _keep_parameter(hyper, p, state)


def _adagrad(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    number = _step_back(state)
    rate = hyper["lr"] / (1 + (number - 1) * hyper["lr_decay"])
    root = state["sum"].sqrt().add_(hyper["eps"])
    p.addcdiv_(g, root, value=rate)
    if hyper["weight_decay"] != 0:
        p.copy_(values["parameter"])
    g = _with_decay(g, p, hyper)
    state["sum"].addcmul_(g, g, value=-1).clamp_min_(0)


def _adadelta(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    lr, rho, eps, decay = float(hyper["lr"]), hyper["rho"], hyper["eps"], hyper["weight_decay"]
    state["step"] -= 1
    square, past = state["square_avg"].add(eps), state["acc_delta"]
    if decay != 0:
        p.copy_(values["parameter"])
        g = g.add(p, alpha=decay)
    # acc' = rho acc + (1 - rho) delta^2 with delta^2 = (acc + eps) ratio and ratio = g^2 / (square' + eps)
    ratio = g.square().div_(square)
    past.sub_(ratio, alpha=(1 - rho) * eps).div_(ratio.mul_(1 - rho).add_(rho)).clamp_min_(0)
    if decay == 0:
        p.add_(past.add(eps).div_(square).sqrt_().mul_(g), alpha=lr)
    _unsquare(state["square_avg"], g, rho)


def _asgd(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    # Before the first step the rate is what is left of lr in the dtype of that scalar.
    eta_before = values.get("eta", torch.as_tensor(hyper["lr"], dtype=state["eta"].dtype))
    mu, after = float(values.get("mu", 1.0)), p.clone()
    state["step"] -= 1
    if is_capturable(hyper):
        eta, left = capturable.asgd_scalars(hyper, p, eta_before)
    else:
        eta = float(eta_before)
        left = 1 - hyper["lambd"] * eta
    p.add_(g, alpha=eta).div_(left - eta * hyper["weight_decay"])
    if mu != 1:
        state["ax"].sub_(after, alpha=mu).div_(1 - mu)
    elif float(state["step"]) == 0:
        state["ax"].zero_()  # as torch makes it
    else:
        state["ax"].copy_(p)  # while it does not average yet
    state["eta"].copy_(eta_before)
    state["mu"].fill_(mu)


def _keep_asgd(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return _copies(state, "eta", "mu")


def _adafactor(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    number = _step_back(state)
    weight = number ** hyper["beta2_decay"]
    eps1 = torch.finfo(p.dtype).eps if hyper["eps"][0] is None else hyper["eps"][0]
    if g.dim() > 1:
        row, column = state["row_var"], state["col_var"]
        estimate = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        estimate = state["variance"].clone()
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
    bound = max(1.0, update.norm(2).item() / (math.sqrt(update.numel()) * hyper["d"]))
    # A tensor where lr is one, and with its roundings.
    rate = max(hyper["eps"][1], values["norm"].item() / math.sqrt(p.numel())) * min(hyper["lr"], 1 / math.sqrt(number))
    p.add_(update, alpha=rate / bound)
    _undecay(p, hyper)
    if g.dim() > 1:
        _unlerp(row, torch.norm(g, dim=-1, keepdim=True).square_().div_(g.size(-1)), weight)
        _unlerp(column, torch.norm(g, dim=-2, keepdim=True).square_().div_(g.size(-2)), weight)
        row.clamp_min_(0)
        column.clamp_min_(0)
    else:
        _unlerp(state["variance"], g * g, weight)
        state["variance"].clamp_min_(0)


def _keep_adafactor(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    # As the step will have it: of the parameter before it.
    return {"norm": p.norm(2)}


def _muon_step(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    buffer, momentum, lr = state["momentum_buffer"], hyper["momentum"], hyper["lr"]
    if values:
        update = values["momentum_buffer"].lerp(g, 1 - momentum)
    else:
        update = g.lerp(buffer, momentum) if hyper["nesterov"] else buffer.clone()
    update = _muon._zeropower_via_newtonschulz(update, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"])
    p.add_(update, alpha=_muon._adjust_lr(lr, hyper["adjust_lr_fn"], p.shape))
    _undecay(p, hyper)
    if values:
        buffer.copy_(values["momentum_buffer"])
    else:
        _unlerp(buffer, g, 1 - momentum)


def _keep_muon(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    # Without nesterov, and in bfloat16, torch scales the buffer itself: neither it nor the update can be told from it.
    if p.dtype is not torch.bfloat16 or hyper["nesterov"]:
        return {}
    buffer = state.get("momentum_buffer")
    return {"momentum_buffer": torch.zeros_like(p) if buffer is None else buffer.clone()}


def _lamb(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    # p' = p - lr trust (a + wd p), with the trust of the step that is undone
    rate = float(hyper["lr"]) * float(state["trust"])
    update = adaptive(state, _step_back(state), hyper)
    p.add_(update, alpha=rate).div_(1 - rate * hyper["weight_decay"])
    _unlerp(state["exp_avg"], g, 1 - hyper["betas"][0])
    _unsquare(state["exp_avg_sq"], g, hyper["betas"][1])
    if "trust" in values:
        state["trust"].copy_(values["trust"])


def _keep_lamb(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return _copies(state, "trust")


def _rprop(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    state["step"] -= 1
    p.addcmul_(state["prev"].sign(), state["step_size"])
    if values:
        state["prev"].copy_(values["prev"])
        state["step_size"].copy_(values["step_size"])


def _keep_rprop(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return _copies(state, "prev", "step_size")


_LARGEST = "the largest average stays: a step with the same gradient gives the same one again"

_PARAMETER: Literal["the parameter if weight decay is coupled"] = "the parameter if weight decay is coupled"

RULES: dict[type[optim.Optimizer], Rule | str] = {
    optim.SGD: Rule("nothing", _sgd, _keep_sgd,
                    note="not fused in half precision on the CPU (torch before 2.14 does not update all of it); "
                    "not foreach with nesterov and without weight decay (torch overwrites the gradient)"),
    optim.Adam: Rule("nothing", _adam, note=_LARGEST + " (amsgrad)"),
    optim.AdamW: Rule("nothing", _adam, note=_LARGEST + " (amsgrad)"),
    optim.NAdam: Rule(_PARAMETER, _nadam, _keep_nadam, note="and a number"),
    optim.RAdam: Rule("nothing", _radam),
    optim.Adamax: Rule("nothing", _adamax, note=_LARGEST),
    optim.RMSprop: Rule(_PARAMETER, _rmsprop, _keep_rmsprop, note="not with momentum"),
    optim.Adagrad: Rule(_PARAMETER, _adagrad, _keep_parameter),
    optim.Adadelta: Rule(_PARAMETER, _adadelta, _keep_parameter),
    optim.ASGD: Rule("a number", _asgd, _keep_asgd),
    optim.Adafactor: Rule("a number", _adafactor, _keep_adafactor),
    optim.Muon: Rule("nothing", _muon_step, _keep_muon,
                     note="the buffer in bfloat16 without nesterov, which torch scales by mistake; a step made again "
                     "differs by more than the undo did, as it iterates in bfloat16"),
    Lamb: Rule("a number", _lamb, _keep_lamb, note="the ratio of norms that it used is in its state"),
    optim.Rprop: Rule("two tensors", _rprop, _keep_rprop, note="what it has is overwritten and clamped"),
    optim.SparseAdam: "its gradients are sparse",
    optim.LBFGS: "its step is a search, of which it keeps a history",
}
"""By class, without those derived from it; a text says why there is no rule."""
