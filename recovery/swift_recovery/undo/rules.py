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
by b is why an average with a factor near 0 is left as it is (`MIN_FACTOR`).

A rule must never wait for a device where the step did not, and never take more room than its *needs* says.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, optim
from torch.optim import _muon

from swift_recovery.undo import capturable, moments
from swift_recovery.undo.capturable import is_capturable
from swift_recovery.undo.lamb import Lamb
from swift_recovery.undo.parts import (
    MIN_FACTOR,
    Hyper,
    Rule,
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
        buffer.sub_(with_decay(g, p, hyper), alpha=1 - hyper["dampening"]).div_(momentum)


def _keep_sgd(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    # The first buffer is the gradient, without dampening, and the entry may exist without one.
    return {"fresh": state.get("momentum_buffer") is None}


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
    g = with_decay(g, p, hyper)
    if momentum >= MIN_FACTOR:
        state["momentum_buffer"].addcdiv_(g, root, value=-1).div_(momentum)
    unsquare(state["square_avg"], g, alpha)
    if hyper["centered"]:
        unlerp(state["grad_avg"], g, 1 - alpha)


def _keep_rmsprop(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return {} if hyper["momentum"] > 0 else keep_parameter(hyper, p, state)


def _adagrad(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    number = step_back(state)
    rate = hyper["lr"] / (1 + (number - 1) * hyper["lr_decay"])
    root = state["sum"].sqrt().add_(hyper["eps"])
    p.addcdiv_(g, root, value=rate)
    if hyper["weight_decay"] != 0:
        p.copy_(values["parameter"])
    g = with_decay(g, p, hyper)
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
    unsquare(state["square_avg"], g, rho)


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
    return copies(state, "eta", "mu")


def _adafactor(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    number = step_back(state)
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
    undecay(p, hyper)
    if g.dim() > 1:
        unlerp(row, torch.norm(g, dim=-1, keepdim=True).square_().div_(g.size(-1)), weight)
        unlerp(column, torch.norm(g, dim=-2, keepdim=True).square_().div_(g.size(-2)), weight)
        row.clamp_min_(0)
        column.clamp_min_(0)
    else:
        unlerp(state["variance"], g * g, weight)
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
    undecay(p, hyper)
    if values:
        buffer.copy_(values["momentum_buffer"])
    else:
        unlerp(buffer, g, 1 - momentum)


def _keep_muon(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    # Without nesterov, and in bfloat16, torch scales the buffer itself: neither it nor the update can be told from it.
    if p.dtype is not torch.bfloat16 or hyper["nesterov"]:
        return {}
    buffer = state.get("momentum_buffer")
    return {"momentum_buffer": torch.zeros_like(p) if buffer is None else buffer.clone()}


def _rprop(hyper: Hyper, p: Tensor, g: Tensor, state: State, values: Values) -> None:
    state["step"] -= 1
    p.addcmul_(state["prev"].sign(), state["step_size"])
    if values:
        state["prev"].copy_(values["prev"])
        state["step_size"].copy_(values["step_size"])


def _keep_rprop(hyper: Hyper, p: Tensor, state: State) -> dict[str, Any]:
    return copies(state, "prev", "step_size")


_LARGEST = "the largest average stays: a step with the same gradient gives the same one again"

_PARAMETER: Literal["the parameter if weight decay is coupled"] = "the parameter if weight decay is coupled"

RULES: dict[type[optim.Optimizer], Rule | str] = {
    optim.SGD: Rule("nothing", _sgd, _keep_sgd,
                    note="not fused in half precision on the CPU (torch before 2.14 does not update all of it); "
                    "not foreach with nesterov and without weight decay (torch overwrites the gradient)"),
    optim.Adam: Rule("nothing", moments.adam, note=_LARGEST + " (amsgrad)"),
    optim.AdamW: Rule("nothing", moments.adam, note=_LARGEST + " (amsgrad)"),
    optim.NAdam: Rule(_PARAMETER, moments.nadam, moments.keep_nadam, note="and a number"),
    optim.RAdam: Rule("nothing", moments.radam),
    optim.Adamax: Rule("nothing", moments.adamax, note=_LARGEST),
    optim.RMSprop: Rule(_PARAMETER, _rmsprop, _keep_rmsprop, note="not with momentum"),
    optim.Adagrad: Rule(_PARAMETER, _adagrad, keep_parameter),
    optim.Adadelta: Rule(_PARAMETER, _adadelta, keep_parameter),
    optim.ASGD: Rule("a number", _asgd, _keep_asgd),
    optim.Adafactor: Rule("a number", _adafactor, _keep_adafactor),
    optim.Muon: Rule("nothing", _muon_step, _keep_muon,
                     note="the buffer in bfloat16 without nesterov, which torch scales by mistake; a step made again "
                     "differs by more than the undo did, as it iterates in bfloat16"),
    Lamb: Rule("a number", moments.lamb, moments.keep_lamb, note="the ratio of norms that it used is in its state"),
    optim.Rprop: Rule("two tensors", _rprop, _keep_rprop, note="what it has is overwritten and clamped"),
    optim.SparseAdam: "its gradients are sparse",
    optim.LBFGS: "its step is a search, of which it keeps a history",
}
"""By class, without those derived from it; a text says why there is no rule."""
