"""Every optimizer of torch.optim: a step is taken back to what was before it, and the same step can be made again."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from swift_recovery.errors import StateError
from swift_recovery.undo import rules
from swift_recovery.undo.lamb import Lamb
from swift_recovery.undo.patch import copy_of, put_back
from swift_recovery.undo.undo import LEAVES_OUT_VECTORS, Kept, check, keep, rule_of, table, undo

O = torch.optim  # noqa: E741
DECAY = {"weight_decay": 1e-2}
# Name -> how it is made.
VARIANTS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.1}),
    "sgd decay": (O.SGD, {"lr": 0.1, **DECAY}),
    "sgd momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, **DECAY}),
    "sgd dampening": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, **DECAY}),
    "sgd nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, **DECAY}),
    "adam": (O.Adam, {}),
    "adam decay": (O.Adam, DECAY),
    "adam amsgrad": (O.Adam, {"amsgrad": True, **DECAY}),
    "adamw": (O.AdamW, DECAY),
    "adamw amsgrad": (O.AdamW, {"amsgrad": True, **DECAY}),
    "nadam": (O.NAdam, DECAY),
    "nadam decoupled": (O.NAdam, {"decoupled_weight_decay": True, **DECAY}),
    "radam": (O.RAdam, DECAY),
    "radam decoupled": (O.RAdam, {"decoupled_weight_decay": True, **DECAY}),
    "adamax": (O.Adamax, DECAY),
    "rmsprop": (O.RMSprop, {"lr": 1e-3, **DECAY}),
    "rmsprop momentum": (O.RMSprop, {"lr": 1e-3, "momentum": 0.9, **DECAY}),
    "rmsprop centered": (O.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True, **DECAY}),
    "adagrad": (O.Adagrad, {"lr_decay": 1e-2, **DECAY}),
    "adadelta": (O.Adadelta, {}),
    "adadelta decay": (O.Adadelta, DECAY),
    "asgd": (O.ASGD, DECAY),
    "asgd averages": (O.ASGD, {"t0": 2, **DECAY}),
    "adafactor": (O.Adafactor, DECAY),
    "muon": (O.Muon, {"lr": 1e-2}),
    "muon plain": (O.Muon, {"lr": 1e-2, "nesterov": False}),
    "lamb": (Lamb, DECAY),
    "rprop": (O.Rprop, {"lr": 1e-3}),
}
# State that is not what it was, but gives the same in the next step with the same gradient.
BOUNDS_ONLY = {"adam amsgrad": {"max_exp_avg_sq"}, "adamw amsgrad": {"max_exp_avg_sq"}, "adamax": {"exp_inf"}}

# Ways of torch to do the same step, and the options that choose them.
WAYS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"foreach": False, "fused": True},
    "capturable": {"foreach": False, "capturable": True},
    "capturable foreach": {"foreach": True, "capturable": True},
}


def ways_of(cls: type[Optimizer]) -> list[str]:
    has = inspect.signature(cls).parameters
    return ["single", *(way for way in list(WAYS)[1:] if all(each in has for each in way.split()))]


def takes_rate(name: str, way: str) -> bool:
    """Whether the learning rate may be a tensor; torch refuses that of foreach Adam without capturable."""
    return not name.startswith("lamb") and not (name.startswith("adam") and way == "foreach" and "max" not in name)


@pytest.fixture(scope="module", autouse=True)
def capturable_on_the_cpu() -> Iterator[None]:
    """torch allows capturable=True on accelerators only, by a list of their names. Its arithmetic runs anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"):
            module = importlib.import_module(f"torch.optim.{name}")
            patch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])
        yield


class Trained:
    """One parameter, some steps old."""

    def __init__(self, name: str, num_steps: int, dtype: torch.dtype = torch.float64, **more: Any) -> None:
        cls, options = VARIANTS[name]
        options = {**options, **more}
        self.random = torch.Generator().manual_seed(num_steps)
        self.parameter = nn.Parameter(self.draw(0.02, dtype))
        self.optimizer = cls([self.parameter], **options)  # type: ignore[call-arg]
        for _ in range(num_steps):
            self.step(self.draw(0.01, dtype))

    def draw(self, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return (torch.randn(17, 11, generator=self.random, dtype=torch.float64) * scale).to(dtype)

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = gradient.clone()
        self.optimizer.step()

    def keep(self) -> Kept:
        return keep(self.optimizer, self.optimizer.param_groups[0], self.parameter)

    def undo(self, gradient: Tensor, kept: Kept) -> None:
        undo(self.optimizer, self.parameter, gradient, kept)

    def values(self) -> dict[str, Tensor]:
        state = self.optimizer.state.get(self.parameter, {})
        return {
            "parameter": self.parameter.detach().clone(),
            **{name: value.clone() for name, value in state.items() if isinstance(value, Tensor)},
        }


def distance(one: Tensor, other: Tensor, after: Tensor | None = None) -> float:
    """Of the whole tensors, as a part of the larger one of what was before the step and what was *after* it."""
    size = max(float(value.double().norm()) for value in (one, one if after is None else after))
    return float((one - other).double().norm()) / (size + 1e-30)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 12])
@pytest.mark.parametrize(
    ("name", "maximize"), [(name, up) for name in VARIANTS for up in (False, True) if not (up and "muon" in name)]
)
def test_a_step_is_taken_back(name: str, num_steps: int, maximize: bool) -> None:
    """In double precision what is left of an error is a mistake in a formula, not a rounding."""
    trained = Trained(name, num_steps, **({"maximize": True} if maximize else {}))
    before, kept, gradient = trained.values(), trained.keep(), trained.draw(0.01)
    trained.step(gradient)
    after = trained.values()
    trained.undo(gradient, kept)
    undone = trained.values()
    assert undone.keys() == before.keys()
    for key, value in before.items():
        if key in BOUNDS_ONLY.get(name, ()):
            assert bool((undone[key] >= value * (1 - 1e-12)).all())
        else:
            assert distance(value, undone[key], after.get(key)) < 1e-12, key
    trained.step(gradient)
    again = trained.values()
    limit = 1e-3 if name.startswith("muon") else 1e-12
    assert {key: distance(value, again[key]) < limit for key, value in after.items()} == dict.fromkeys(after, True)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_stays(name: str) -> None:
    trained = Trained(name, 3)
    kept, gradient = trained.keep(), trained.draw(0.01)
    trained.step(gradient)
    same = gradient.clone()
    trained.undo(gradient, kept)
    assert torch.equal(gradient, same)


def test_every_optimizer_of_torch_has_a_rule_or_a_reason() -> None:
    classes = {
        cls
        for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(cls, Optimizer) and cls is not Optimizer
    }
    assert classes | {Lamb} == set(rules.RULES)


def test_the_readme_has_the_table_of_the_rules() -> None:
    readme = Path(__file__).parents[4] / "recovery" / "README.md"
    assert table() in readme.read_text()


def test_what_is_kept_is_what_the_rule_says() -> None:
    for name in VARIANTS:
        trained = Trained(name, 5)
        kept, needs = trained.keep(), rule_of(trained.optimizer).needs
        of_parameter, group = trained.parameter.nbytes, trained.optimizer.param_groups[0]
        coupled = group.get("weight_decay") and not group.get("decoupled_weight_decay") and "momentum" not in name
        expected = {"two tensors": 2 * of_parameter, rules._PARAMETER: of_parameter if coupled else 0}
        # Scalars of the state, ASGD's two.
        scalars = [value for value in kept.values.values() if isinstance(value, Tensor) and value.dim() == 0]
        of_scalars = sum(value.nbytes for value in scalars)
        assert of_scalars <= 16
        assert kept.num_bytes - of_scalars == expected.get(needs, 0) or name == "rmsprop centered", name


@pytest.mark.parametrize(
    ("name", "way", "rate", "maximize"),
    [
        (name, way, rate, maximize)
        for name, (cls, _) in VARIANTS.items()
        for way in ways_of(cls)
        for rate in ("number", "tensor")
        for maximize in (False, True)
        if (rate == "number" or takes_rate(name, way)) and not (maximize and "muon" in name)
    ],
)
def test_the_ways_of_torch_to_do_a_step(name: str, way: str, rate: str, maximize: bool) -> None:
    """In double precision, with scalars in float32 where torch has them in tensors."""
    cls, options = VARIANTS[name]
    has = inspect.signature(cls).parameters
    more = {key: value for key, value in WAYS[way].items() if key in has}
    more |= {"maximize": True} if maximize else {}
    if rate == "tensor":
        more["lr"] = torch.tensor([options.get("lr", has["lr"].default)])
    for num_steps in (0, 1, 4, 12):
        trained = Trained(name, num_steps, **more)
        check(trained.optimizer)
        before, kept, gradient = trained.values(), trained.keep(), trained.draw(0.01)
        trained.step(gradient)
        if rate == "tensor":
            trained.optimizer.param_groups[0]["lr"].fill_(7.0)  # a scheduler
        after = trained.values()
        trained.undo(gradient, kept)
        undone = trained.values()
        assert undone.keys() == before.keys()
        for key, value in before.items():
            if value.dim() == 0:
                assert torch.equal(value, undone[key]), key
            elif key not in BOUNDS_ONLY.get(name, ()):
                assert distance(value, undone[key], after[key]) < 1e-12, key


class NoNumbers(TorchDispatchMode):
    """Any attempt to read a number out of a tensor, for which a device would be waited for, is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, (cls, _) in VARIANTS.items() for way in ways_of(cls)])
def test_nothing_waits_for_the_device_before_a_step(name: str, way: str, num_steps: int) -> None:
    cls, options = VARIANTS[name]
    has = inspect.signature(cls).parameters
    more = {key: value for key, value in WAYS[way].items() if key in has}
    if takes_rate(name, way):
        more["lr"] = torch.tensor(options.get("lr", has["lr"].default))
    trained = Trained(name, num_steps, **more)
    with NoNumbers():
        trained.keep()
        copy_of(trained.optimizer, trained.parameter)
    with pytest.raises(AssertionError), NoNumbers():
        float(trained.parameter.detach().sum())


@pytest.mark.parametrize("way", ["capturable", "capturable foreach"])
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("name", [name for name, (cls, _) in VARIANTS.items() if "capturable" in ways_of(cls)])
def test_a_copy_of_capturable_state_is_put_back_bit_for_bit(name: str, num_steps: int, way: str) -> None:
    trained = Trained(name, num_steps, torch.float32, **WAYS[way])
    before, copy = trained.values(), copy_of(trained.optimizer, trained.parameter)
    live = dict(trained.optimizer.state.get(trained.parameter, {}))
    trained.step(trained.draw(0.01, torch.float32))
    put_back(trained.optimizer, trained.parameter, copy)
    after = trained.values()
    assert {key: torch.equal(value, after[key]) for key, value in before.items()} == dict.fromkeys(after, True)
    # A captured graph writes to these very tensors.
    assert all(trained.optimizer.state[trained.parameter][key] is value for key, value in live.items())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_copy_of_nested_state_is_put_back_bit_for_bit(on_host: bool) -> None:
    """SOAP keeps lists of tensors."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = O.SGD([parameter], lr=0.1)
    entry: dict[str, Any] = {
        "GG": [torch.zeros(2, 2), []], "pair": (torch.ones(2), 1), "by_dim": {0: torch.ones(3), "order": [0, 1]},
        "seen": {1, 2}, "step": 1,
    }  # fmt: skip
    optimizer.state[parameter] = entry
    gram, pair, by_dim = entry["GG"], entry["pair"], entry["by_dim"]
    tensors = [gram[0], pair[0], by_dim[0]]
    before = [tensor.clone() for tensor in tensors]
    copy = copy_of(optimizer, parameter, on_host=on_host)
    for tensor in tensors:
        tensor.lerp_(torch.full(tensor.shape, 5.0), 0.5)
    gram[0] = torch.ones(5, 5)
    gram[1].append(3)
    by_dim["order"].reverse()
    by_dim["more"] = torch.ones(1)
    entry["seen"].add(3)
    entry |= {"pair": 0, "step": 2, "more": 1}
    put_back(optimizer, parameter, copy)
    assert optimizer.state[parameter] is entry and list(entry) == ["GG", "pair", "by_dim", "seen", "step"]
    assert entry["GG"] is gram and gram[0] is tensors[0] and gram[1:] == [[]]
    assert entry["pair"] is pair and entry["step"] == 1 and entry["seen"] == {1, 2}
    assert entry["by_dim"] is by_dim and list(by_dim) == [0, "order"] and by_dim["order"] == [0, 1]
    assert all(map(torch.equal, tensors, before))


def test_a_step_in_a_graph_and_tensors_that_torch_rounds_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(StateError, match="differentiable=True cannot be undone: it is part of a graph"):
        check(O.Adam([parameter], differentiable=True))
    betas = (torch.tensor(0.9), torch.tensor(0.999))
    with pytest.raises(StateError, match="with betas as tensors cannot be undone: pass numbers"):
        check(O.Adam([parameter], betas=betas))


@pytest.mark.parametrize("make", [O.LBFGS, O.SparseAdam])
def test_what_cannot_be_undone_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(StateError, match="cannot be undone: its"):
        rule_of(make([nn.Parameter(torch.ones(2))]))


def test_what_torch_leaves_out_cannot_be_undone() -> None:
    """torch before 2.14 does not update the whole vectors of such parameters."""
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = O.SGD([parameter], lr=0.5, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert bool((parameter == 1).any()) == LEAVES_OUT_VECTORS
    if not LEAVES_OUT_VECTORS:
        check(optimizer)
        return
    with pytest.raises(StateError, match=r"fused=True and bfloat16 parameters on the CPU .* pass fused=False"):
        check(optimizer)
    with pytest.raises(StateError, match="pass fused=False"):
        undo(optimizer, parameter, parameter.grad, keep(optimizer, optimizer.param_groups[0], parameter))
    check(O.SGD([parameter], lr=0.5, foreach=True))
    check(O.AdamW([parameter], fused=True))


def test_a_gradient_that_the_step_overwrites_cannot_be_used() -> None:
    """torch 2.13 has this one combination in which it does; when it does not any more, this refusal can go."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = O.SGD([parameter], lr=0.5, momentum=0.9, nesterov=True, foreach=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not bool((parameter.grad == 1).any())
    with pytest.raises(StateError, match="momentum to the gradients themselves; pass foreach=False"):
        check(optimizer)
    for more in ({"foreach": False}, {"foreach": True, "weight_decay": 0.1}, {"foreach": True, "maximize": True}):
        check(O.SGD([parameter], lr=0.5, momentum=0.9, nesterov=True, **more))  # type: ignore[arg-type]


def test_a_subclass_is_not_taken_for_what_it_is_made_of() -> None:
    class Mine(O.SGD): ...

    with pytest.raises(StateError, match="a step of Mine cannot be undone: its arithmetic is not known"):
        rule_of(Mine([nn.Parameter(torch.ones(2))]))


def test_the_learning_rate_of_the_step_counts() -> None:
    """A scheduler has changed it since; and it may be a tensor."""
    trained = Trained("adamw", 3, lr=torch.tensor(1e-3, dtype=torch.float64))
    before, kept, gradient = trained.values(), trained.keep(), trained.draw(0.01)
    trained.step(gradient)
    trained.optimizer.param_groups[0]["lr"].fill_(7.0)
    trained.undo(gradient, kept)
    assert all(distance(value, trained.values()[key]) < 1e-12 for key, value in before.items())


# Half of the distance between 1 and the next number.
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Bounds:
    """Those that `undo.rules` states, of one step; in double precision, per element."""

    def __init__(
        self, name: str, way: str, options: dict[str, Any], gradient: Tensor,
        before: dict[str, Tensor], after: dict[str, Tensor], scalars: dict[str, float],
    ) -> None:  # fmt: skip
        self.name, self.way, self.options = name, way, options
        self.g, self.before, self.after, self.scalars = gradient, before, after, scalars
        self.p, self.decay = before["parameter"], options.get("weight_decay", 0.0)
        decoupled = ("adamw", "adafactor", "muon", "lamb")
        self.coupled = not (options.get("decoupled_weight_decay") or name.startswith(decoupled))
        self.number = scalars["step"]

    def root(self) -> Tensor:
        """What the gradient of RMSprop, or NAdam, was divided by."""
        if self.name.startswith("nadam"):
            return (self.after["exp_avg_sq"] / (1 - self.options["betas"][1] ** self.number)).sqrt() + 1e-8
        mean = self.after["grad_avg"] if self.options.get("centered") else 0
        return (self.after["square_avg"] - mean**2).sqrt() + 1e-8

    def parameter(self, unit: float) -> Tensor:
        name, lr, decay = self.name, self.options["lr"], self.decay
        change = (self.after["parameter"] - self.p).abs()
        cancels: Tensor | float = 0.0
        if name == "sgd nesterov":
            cancels = lr * (self.g + decay * self.p).abs() if decay else 0.0
        elif name.startswith("nadam"):
            mu = self.options["betas"][0] * (1 - 0.5 * 0.96 ** (self.number * 4e-3))
            e = self.g if not self.coupled else self.g + decay * self.p
            cancels = lr * (1 - mu) / (1 - self.scalars["mu_product"]) * e.abs() / self.root()
        left = 1.0
        if not self.coupled or name in {"sgd", "sgd decay", "sgd nesterov"}:
            left = 1 - lr * decay * self.scalars.get("trust", 1.0)
        if name.startswith("asgd"):
            left = 1 - lr * (decay + 1e-4)
        k = 6 if name == "sgd nesterov" or name.startswith(("nadam", "asgd", "lamb")) else 4
        bound = k * (self.p.abs() + change + cancels) / left
        if name == "adadelta":
            bound += 32 * change
        repeated = "capturable" in self.way and name.startswith(("adam", "nadam", "radam"))
        if self.way != "single" and not repeated:
            bound += 12 * (change + cancels)
        return unit * bound

    def average(self, key: str, unit: float) -> Tensor:
        m, after, options = self.before[key], self.after[key], self.options
        beta1, beta2 = options.get("betas", (0.9, 0.999))
        wd = self.decay if self.coupled else 0.0
        e = self.g.abs() + wd * self.p.abs()
        of_p = wd * self.parameter(unit)
        if key == "acc_delta":
            return unit * (8 * m.abs() + 17 * after.abs()) / 0.9
        if key == "ax":
            weight = self.scalars["mu"]
            if weight == 1:
                return self.parameter(unit) + (m - self.p).abs()
            e, of_p, b = self.after["parameter"].abs(), torch.zeros(()), 1 - weight
        elif self.name.startswith("muon"):
            weight, b = 0.05, 0.95
        elif key == "momentum_buffer":
            b, weight = 0.9, 1 - options.get("dampening", 0.0)
            if self.name.startswith("rmsprop"):
                e, of_p = e / self.root(), of_p / self.root()
        elif key == "grad_avg":
            weight, b = 0.01, 0.99
        else:
            weight, b = 1 - beta1, beta1
        if key in {"exp_avg_sq", "sum", "square_avg", "variance", "row_var", "col_var"}:
            if self.name.startswith("adafactor"):
                weight = self.number**-0.8
                b = 1 - weight
            else:
                b = {"exp_avg_sq": beta2, "sum": 1.0, "square_avg": 0.9 if "delta" in self.name else 0.99}[key]
                weight = 1.0 if key == "sum" else 1 - b
            return (unit * (4 * m.abs() + after.abs() + 12 * weight * e**2) + weight * of_p * (2 * e + of_p)) / b
        return (unit * (4 * m.abs() + after.abs() + 7 * weight * e) + weight * of_p) / b


@settings(max_examples=400)
@given(data=st.data())
def test_the_error_is_within_the_bound_that_is_stated(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(VARIANTS)))
    # In half precision the moments of most overflow or vanish; it is trained with master weights in float32, of which
    # the model has a copy: gradients are its own.
    model_dtype = data.draw(st.sampled_from([torch.float16, torch.float32, torch.float64, torch.bfloat16]))
    dtype = torch.float32 if model_dtype == torch.float16 else model_dtype
    cls, options = VARIANTS[name]
    has = inspect.signature(cls).parameters
    way = data.draw(st.sampled_from(ways_of(cls)))
    options = {**options, "lr": 10 ** data.draw(st.floats(-5, -1))}
    if "weight_decay" in options:
        options["weight_decay"] = data.draw(st.one_of(st.just(0.0), st.floats(-5, -1).map(lambda at: 10**at)))
    if LEAVES_OUT_VECTORS and (name.startswith("sgd"), way, dtype) == (True, "fused", torch.bfloat16):
        way = "single"  # refused, see above
    if (name, way, options.get("weight_decay")) == ("sgd nesterov", "foreach", 0.0):
        way = "single"
    if "betas" in has:
        options["betas"] = data.draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.95, 0.98)]))
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    size, slope = 10 ** data.draw(st.floats(-3, 1)), 10 ** data.draw(st.floats(-4, 2))

    def draw(scale: float) -> Tensor:
        return (torch.randn(shape, generator=random) * scale).to(model_dtype).to(dtype)

    parameter = nn.Parameter(draw(size))
    rate: float | Tensor = options["lr"]
    if takes_rate(name, way) and data.draw(st.booleans()):
        rate = torch.tensor(rate)
        options["lr"] = float(rate)
    ways = {key: value for key, value in WAYS[way].items() if key in has}
    optimizer = cls([parameter], **{**options, **ways, "lr": rate})  # type: ignore[call-arg]

    def values() -> dict[str, Tensor]:
        state = optimizer.state.get(parameter, {})
        tensors = {key: value for key, value in state.items() if value.shape == parameter.shape}
        return {key: value.detach().clone().double() for key, value in {"parameter": parameter, **tensors}.items()}

    for _ in range(data.draw(st.integers(0, 12))):
        parameter.grad = draw(slope)
        optimizer.step()
    before, kept, gradient = values(), keep(optimizer, optimizer.param_groups[0], parameter), draw(slope)
    scalars = {"mu": float(optimizer.state[parameter]["mu"])} if "mu" in optimizer.state.get(parameter, {}) else {}
    parameter.grad = gradient.clone()
    optimizer.step()
    after, state = values(), optimizer.state.get(parameter, {})
    scalars |= {key: float(state[key]) for key in ("step", "mu_product", "trust") if key in state}
    scalars.setdefault("step", 0.0)
    assert parameter.grad is not None
    undo(optimizer, parameter, parameter.grad, kept)  # as the step has left it
    undone = values()
    # First order: the products of roundings are a part of 16 u more, at most.
    unit = UNITS[dtype] / (1 - 16 * UNITS[dtype])
    bounds = Bounds(name, way, options, gradient.double(), before, after, scalars)
    for key, value in before.items():
        if key in BOUNDS_ONLY.get(name, ()):
            continue
        bound = bounds.parameter(unit) if key == "parameter" else bounds.average(key, unit)
        error = (undone[key] - value).abs()
        assert bool((error <= bound + 8 * torch.finfo(dtype).tiny).all()), (name, key, dtype, way)
        if key == "parameter" and model_dtype == torch.float16:
            # The model's copy: rounded to half precision, it differs by one of its own units at most.
            half = (undone[key].half().double() - value.half().double()).abs()
            unit_of_half = 2 * UNITS[torch.float16] * torch.maximum(undone[key].abs(), value.abs()) + 2.0**-24
            assert bool((half <= unit_of_half + error).all()), (name, "copy in half precision")
