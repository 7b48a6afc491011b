"""Collect, prepare and commit between two sets of objects in one process; the bytes are copied by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum
from swift_recovery.state.incoming import Incoming
from swift_recovery.state.tensors import Layout, has_layout, layout_of, memory_bytes, new_tensor, wire_bytes
from swift_recovery.state.training_state import Outgoing, TrainingState


class Net(nn.Module):
    """Tied weights, BatchNorm, a channels-last convolution, an expanded buffer, extra state."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Linear(width, 5, bias=False)
        self.second = nn.Linear(width, 5)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0).unsqueeze(1).expand(3, 4), persistent=False)
        self.register_buffer("absent", None)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        hidden = self.norm(self.conv(x)).mean((2, 3))
        return self.first(hidden) + self.second(hidden)

    def get_extra_state(self) -> Any:
        return {"num_forwards": self.num_forwards}

    def set_extra_state(self, state: Any) -> None:
        self.num_forwards = state["num_forwards"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Worker:
    def __init__(self, seed: int, optimizer: str = "adamw", steps: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        conv, rest = (
            list(self.model.conv.parameters()),
            [p for n, p in self.model.named_parameters() if "conv" not in n],
        )
        self.optimizer = OPTIMIZERS[optimizer]([{"params": conv, "weight_decay": 0.1}, {"params": rest}])
        self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.9**epoch)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.state = TrainingState(
            {"net": self.model},
            {"optimizer": self.optimizer},
            {"scheduler": self.scheduler, "scaler": self.scaler},
        )
        self.train(steps)

    def train(self, steps: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            loss = self.model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def everything(self) -> tuple[int, Any]:
        """All that must be equal on two workers that go on alike."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        entries = {
            i: {k: layout_of(v) if isinstance(v, Tensor) else v for k, v in self.optimizer.state[p].items()}
            for i, p in enumerate(self.state.parameters())
            if p in self.optimizer.state
        }
        others = self.scheduler.state_dict(), self.scaler.state_dict(), self.model.num_forwards
        return checksum(self.state.tensors()), (groups, entries, others)


def transfer(outgoing: Outgoing, incoming: Incoming) -> None:
    """What the wire does."""
    for source, target in zip(outgoing.tensors, incoming.tensors, strict=True):
        view = memory_bytes(target)
        assert view is not None
        # Through numpy, because a transport does not tell autograd either.
        view.numpy()[:] = wire_bytes(source).numpy()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replacement_goes_on_bit_for_bit(name: str, staged: bool) -> None:
    source, fresh = Worker(1, name, steps=3), Worker(2, name)
    outgoing = source.state.collect({"position": 17, "order": torch.arange(4)})
    incoming = fresh.state.prepare(outgoing.manifest, staged)
    transfer(outgoing, incoming)
    extra = incoming.commit()
    assert extra["position"] == 17 and torch.equal(extra["order"], torch.arange(4))
    assert fresh.everything() == source.everything()
    for worker in (source, fresh):
        worker.train(3, seed=8)
    assert fresh.everything() == source.everything()


def identities(model: nn.Module) -> dict[str, tuple[int, int, bool]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors}


@pytest.mark.parametrize("staged", [False, True])
def test_identity_memory_and_gradients_stay(staged: bool) -> None:
    source, behind = Worker(1, steps=3), Worker(2, steps=2)
    behind.model(torch.randn(2, 3, 8, 8)).sum().backward()
    behind.model.conv.bias.requires_grad_(False)
    live = identities(behind.model)
    gradients = {n: (p.grad, p.grad.clone()) for n, p in behind.model.named_parameters() if p.grad is not None}
    moments = {p: entry["exp_avg"].data_ptr() for p, entry in behind.optimizer.state.items()}
    versions = {n: p._version for n, p in behind.model.named_parameters()}
    outgoing = source.state.collect()
    incoming = behind.state.prepare(outgoing.manifest, staged)
    transfer(outgoing, incoming)
    incoming.commit()
    assert identities(behind.model) == live
    for name, parameter in behind.model.named_parameters():
        # Autograd has to notice that saved tensors are gone.
        assert parameter._version > versions[name]
        if name in gradients:
            assert parameter.grad is gradients[name][0] and torch.equal(parameter.grad, gradients[name][1])
    assert moments == {p: entry["exp_avg"].data_ptr() for p, entry in behind.optimizer.state.items()}
    assert behind.model.first.weight is behind.model.second.weight
    assert behind.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert checksum(behind.state.tensors()) == checksum(source.state.tensors())


def test_an_aborted_staged_survivor_is_whole() -> None:
    source, behind = Worker(1, steps=3), Worker(2, steps=2)
    before = copy.deepcopy(behind.everything())
    outgoing = source.state.collect()
    incoming = behind.state.prepare(outgoing.manifest, staged=True)
    transfer(outgoing, incoming)
    del incoming
    assert behind.everything() == before


def test_empty_optimizer_state_clears_the_receivers() -> None:
    source, other = Worker(1), Worker(2, steps=2)
    assert not source.optimizer.state
    outgoing = source.state.collect()
    incoming = other.state.prepare(outgoing.manifest, staged=False)
    transfer(outgoing, incoming)
    incoming.commit()
    assert not other.optimizer.state
    assert other.everything() == source.everything()
    with pytest.raises(StateError, match="committed already"):
        incoming.commit()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_order_inside_of_a_group_is_that_of_the_source(name: str, staged: bool) -> None:
    """A group of a set of parameters has another order in each process; the state follows its parameter."""

    def made(seed: int, order: list[int]) -> tuple[nn.Module, Any, TrainingState]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        some = list(net[:2].parameters())
        groups = [{"params": [some[index] for index in order]}, {"params": net[2].parameters(), "weight_decay": 0.1}]
        optimizer = OPTIMIZERS[name](groups)
        return net, optimizer, TrainingState({"net": net}, {"optimizer": optimizer})

    def train(net: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        net(torch.linspace(0, 1, 12).view(3, 4)).square().mean().backward()
        optimizer.step()

    source, source_optimizer, theirs = made(1, [3, 0, 2, 1])
    fresh, fresh_optimizer, mine = made(2, [0, 1, 2, 3])
    for _ in range(3):
        train(source, source_optimizer)
    outgoing = theirs.collect()
    incoming = mine.prepare(outgoing.manifest, staged)
    transfer(outgoing, incoming)
    incoming.commit()
    for _ in range(3):
        names, groups = mine.parameter_names(), fresh_optimizer.param_groups
        assert [names[id(p)] for p in groups[0]["params"]] == [
            theirs.parameter_names()[id(p)] for p in source_optimizer.param_groups[0]["params"]
        ]
        assert checksum(mine.replicated_tensors()) == checksum(theirs.replicated_tensors())
        train(source, source_optimizer)
        train(fresh, fresh_optimizer)


def test_checksums_do_not_depend_on_the_order_inside_of_a_group() -> None:
    """A survivor's is its own for ever."""
    sums = []
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parameters = list(net.parameters())
        optimizer = torch.optim.Adam([parameters[index] for index in order])
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        sums.append(checksum(TrainingState({"net": net}, {"optimizer": optimizer}).replicated_tensors()))
    assert sums[0] == sums[1]


def test_a_learning_rate_tensor_keeps_its_identity() -> None:
    source, other = Worker(1, "adam_fused", steps=2), Worker(2, "adam_fused", steps=1)
    rates = [group["lr"] for group in other.optimizer.param_groups]
    outgoing = source.state.collect()
    incoming = other.state.prepare(outgoing.manifest, staged=True)
    transfer(outgoing, incoming)
    incoming.commit()
    for rate, mine, theirs in zip(rates, other.optimizer.param_groups, source.optimizer.param_groups, strict=True):
        assert mine["lr"] is rate and torch.equal(rate, theirs["lr"])


def test_tied_parameters_travel_once_and_the_order_is_that_of_the_manifest() -> None:
    worker = Worker(1, steps=1)
    tensors = worker.state.tensors()
    assert len({id(t) for t in tensors}) == len(tensors)
    assert sum(t is worker.model.first.weight for t in tensors) == 1
    extra = torch.zeros(3)
    with_extra = worker.state.collect({"x": extra}).tensors
    assert with_extra[-1] is extra
    assert checksum(with_extra[:-1]) == checksum(tensors)
    assert worker.state.manifest() == worker.state.collect().manifest
    assert {id(t) for t in worker.state.replicated_tensors()} < {id(t) for t in tensors} | {
        id(v) for e in worker.optimizer.state.values() for v in e.values()
    }


def test_wrappers_do_not_show_in_names() -> None:
    net = nn.Linear(2, 2)
    compiled = torch.compile(net)
    for wrapped in (net, nn.DataParallel(net), compiled, nn.DataParallel(compiled)):
        assert TrainingState({"m": wrapped}).models["m"] is net


class Attention(nn.Module):
    """With a mask that the first forward makes, and a longer input makes anew, as many have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("angles", torch.zeros(1))
        self.twin = nn.Module()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.register_buffer("mask", torch.ones(self.longest, 2).triu(1), persistent=False)
            self.angles = torch.arange(self.longest) * 0.5
            self.inner.register_buffer("table", torch.full((1, 1), 7.0).expand(self.longest, 3))
            self.twin.register_buffer("mask", self.mask, persistent=False)
        return self.inner(x)


@pytest.mark.parametrize("staged", [False, True])
def test_buffers_that_were_made_or_grown_in_training_are_installed(staged: bool) -> None:
    """Their module is as it was in the set-up here, or has grown less: a rank that began again."""
    source = Attention()
    theirs = TrainingState({"model": nn.Sequential(source)})
    source(torch.ones(5, 4))
    for length in (0, 3, 5):
        fresh = Attention()
        mine = TrainingState({"model": nn.Sequential(fresh)})
        if length:
            fresh(torch.ones(length, 4))
        outgoing = theirs.collect()
        incoming = mine.prepare(outgoing.manifest, staged)
        before = {name: buffer.clone() for name, buffer in fresh.named_buffers()}
        transfer(outgoing, incoming)
        assert all(torch.equal(dict(fresh.named_buffers())[name], one) for name, one in before.items())
        incoming.commit()
        for (name, one), (other, two) in zip(source.named_buffers(), fresh.named_buffers(), strict=True):
            assert name == other and torch.equal(one, two) and one.shape == two.shape
        assert fresh.longest == 5 and fresh.twin.mask is fresh.mask and fresh.inner.table.stride() == (0, 0)
        assert source.state_dict().keys() == fresh.state_dict().keys()
        assert checksum(mine.tensors()) == checksum(theirs.tensors())
        # It hands on what it has got, as the first source does.
        assert mine.collect().manifest == outgoing.manifest


def test_a_buffer_that_the_set_up_of_another_script_has_made_is_none_of_these() -> None:
    """Nor is one where this model has something else of that name."""
    source = nn.Linear(2, 2)
    source.register_buffer("mask", torch.ones(2))
    with pytest.raises(StateError, match="model buffers: 'mask' exists at the source but not here"):
        TrainingState({"model": nn.Linear(2, 2)}).prepare(TrainingState({"model": source}).manifest(), staged=False)
    grown, other = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs = TrainingState({"model": grown})
    grown.register_buffer("mask", torch.ones(2))
    other.mask = "none"  # type: ignore[assignment]
    with pytest.raises(StateError, match="model buffers: 'mask' exists at the source but not here"):
        TrainingState({"model": other}).prepare(theirs.manifest(), staged=False)


def test_parameters_that_have_changed_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = TrainingState({"model": model})
    assert not state.changed_parameters()
    prune.l1_unstructured(model[1], "weight", 0.5)
    model[0].bias = None
    assert state.changed_parameters() == ["model.0.bias", "model.1.weight", "model.1.weight_orig"]


def linear_state(rows: int = 3, **optimizer: Any) -> TrainingState:
    model = nn.Linear(2, rows)
    return TrainingState({"m": model}, {"o": torch.optim.SGD(model.parameters(), lr=0.1, **optimizer)})


def double() -> TrainingState:
    return TrainingState({"m": nn.Linear(2, 3).double()})


def tied() -> TrainingState:
    model = nn.Linear(2, 2)
    return TrainingState({"a": model, "b": model})


def untied() -> TrainingState:
    return TrainingState({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


def grouped(*order: int) -> TrainingState:
    model = nn.Linear(2, 2)
    parameters = list(model.parameters())
    return TrainingState({"m": model}, {"o": torch.optim.SGD([{"params": [parameters[i]]} for i in order], lr=0.1)})


def with_adam() -> TrainingState:
    model = nn.Linear(2, 3)
    return TrainingState({"m": model}, {"o": torch.optim.Adam(model.parameters())})


@pytest.mark.parametrize(
    ("source", "here", "message"),
    [
        (
            linear_state(3),
            linear_state(4),
            r"^m\.weight: the source holds float32 \[3, 2\] on cpu, this worker .*\[4, 2\]",
        ),
        (double(), TrainingState({"m": nn.Linear(2, 3)}), r"^m\.weight: .*float64"),
        (
            TrainingState({"m": nn.Linear(2, 3)}),
            TrainingState({"m": nn.Linear(2, 3, bias=False)}),
            "'bias' exists at the so",
        ),
        (TrainingState({"m": nn.BatchNorm1d(2, affine=False)}), TrainingState({"m": nn.Flatten()}), "'running_mean'"),
        (untied(), TrainingState({"a": nn.Linear(2, 2)}), "'b' exists at the source but not here"),
        (TrainingState({"m": nn.Linear(2, 3)}), linear_state(), "optimizers: 'o' exists here but not at the source"),
        (tied(), untied(), r"^b\.weight: shared with another parameter at the source"),
        (untied(), tied(), r"^b\.weight: shared with another parameter here"),
        (grouped(0, 1), grouped(1, 0), "'m.weight' as parameter 0 of group 0 at the source, 'm.bias' here"),
        (grouped(0, 1), grouped(0), "2 groups at the source and 1 here"),
        (with_adam(), linear_state(), "Adam at the source, SGD here"),
    ],
)
def test_a_manifest_that_does_not_fit_names_the_difference(
    source: TrainingState, here: TrainingState, message: str
) -> None:
    before = checksum(here.tensors())
    with pytest.raises(StateError, match=message):
        here.prepare(source.manifest(), staged=False)
    assert checksum(here.tensors()) == before


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_damaged_manifest_is_refused(cut: int) -> None:
    state = linear_state()
    with pytest.raises(StateError):
        state.prepare(state.manifest()[:cut], staged=True)


def test_mistakes_are_found_at_construction() -> None:
    model, stranger = nn.Linear(2, 3), nn.Linear(4, 5)
    both = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(
        StateError, match=r"optimizer 'o': parameter 2 of group 0 \(float32 \[5, 4\] on cpu\) belongs to no"
    ):
        TrainingState({"m": model}, {"o": both})
    with pytest.raises(StateError, match="LBFGS"):
        TrainingState({"m": model}, {"o": torch.optim.LBFGS(model.parameters())})
    with pytest.raises(StateError, match="lazy"):
        TrainingState({"m": nn.LazyLinear(3)})
    with pytest.raises(StateError, match="sampler: a object has no state_dict"):
        TrainingState({"m": model}, {}, {"sampler": object()})  # type: ignore[dict-item]
    with pytest.raises(StateError, match=r"m\.weight: a meta tensor"):
        TrainingState({"m": nn.Linear(2, 2, device="meta")})


def test_a_group_added_later_is_checked() -> None:
    state = linear_state()
    state.optimizers["o"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(StateError, match="of group 1"):
        state.collect()


def test_replicas_hold_alike_what_is_nested_in_optimizer_state_and_what_belongs_to_no_parameter() -> None:
    state = linear_state()
    optimizer = state.optimizers["o"]
    first, second = optimizer.param_groups[0]["params"]
    flat = state.replicated_tensors()
    gram, queue, other = [torch.ones(2, 2), torch.ones(3, 3)], {"b": torch.ones(1), "a": torch.ones(2)}, torch.ones(4)
    optimizer.state[first] = {"step": 1, "GG": gram, "exp_avg": torch.ones(5)}
    optimizer.state[second] = {"queue": (queue, None)}
    optimizer.state["norm"] = other
    nested = state.replicated_tensors()
    expected = [*flat, *gram, optimizer.state[first]["exp_avg"], queue["a"], queue["b"], other]
    assert [id(tensor) for tensor in nested] == [id(tensor) for tensor in expected]
    before = checksum(nested)
    gram[1].add_(1)
    assert checksum(state.replicated_tensors()) != before


class Odd:
    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return {"content": [self.content]}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("no")


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"^others\.odd\.content\[0\]: function cannot be copied"):
        TrainingState({"m": model}, {}, {"odd": Odd(lambda: 0)}).collect()
    with pytest.raises(StateError, match=r"^others\.odd\.content\[0\]: a torch.sparse_coo tensor"):
        TrainingState({"m": model}, {}, {"odd": Odd(torch.eye(2).to_sparse())}).collect()


def test_an_object_that_refuses_its_state_is_named() -> None:
    state = TrainingState({"m": nn.Linear(2, 2)}, {}, {"odd": Odd(1)})
    outgoing = state.collect()
    incoming = state.prepare(outgoing.manifest, staged=True)
    transfer(outgoing, incoming)
    with pytest.raises(StateError, match=r"odd: load_state_dict failed .ValueError: no.* has to be replaced"):
        incoming.commit()


def test_layouts() -> None:
    last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (torch.empty(2, 3), last, torch.empty(()), torch.empty(0, 4), torch.empty(4, 3).t()):
        layout = layout_of(tensor)
        assert Layout.from_text(layout.to_text()) == layout
        assert has_layout(tensor, layout) and has_layout(new_tensor(layout, tensor.device), layout)
        assert layout.num_bytes == tensor.nbytes == wire_bytes(tensor).numel()
    assert layout_of(torch.empty(4, 6)[:, ::2]).strides is None
    assert not has_layout(torch.empty(2, 3, 4, 5), layout_of(last))
    assert memory_bytes(torch.empty(4, 6)[:, ::2]) is None
    for text in (
        "float32 2,3 cpu 4,1",
        "float32 2,-3 cpu",
        "nope 2 cpu",
        "float32 2",
        "float32 2 cpu 1,1",
        "",
        "load 2 cpu",
    ):
        with pytest.raises(StateError):
            Layout.from_text(text)


class Projector:
    """As GaLore's, an object with a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_what_an_optimizer_keeps_is_named_if_it_cannot_be_copied() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState({"net": model}, {"main": optimizer})
    entry = {"step": 1, "average": torch.zeros(2), "sizes": [torch.Size([2])], "moments": (torch.ones(2), None)}
    optimizer.state[model.weight] = dict(entry)
    optimizer.state["shared"] = entry
    state.check_optimizer("main")
    places = (model.weight, r"its state of net\.weight: projector"), ("shared", r"its state: shared\.projector")
    for what, where in places:
        optimizer.state[what] = {**entry, "projector": {"first": Projector(torch.ones(2))}}
        with pytest.raises(StateError, match=rf"'main': {where}\.first: object of type .*Projector.*plain tensors"):
            state.check_optimizer("main")
        optimizer.state[what] = {**entry, "average": TwoTensor(torch.zeros(2), torch.ones(2))}
        with pytest.raises(StateError, match=r"average: a tensor of type .*TwoTensor, which keeps.*cannot be copied"):
            state.check_optimizer("main")
        optimizer.state[what] = dict(entry)


class Counted(torch.Tensor):
    """A tensor in all but its name."""


class Wrapped(torch.Tensor):
    """Operations of its own, and the values of another tensor in their place: as weights that are cast when used."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [one.inner if isinstance(one, cls) else one for one in args]
        return function(*args, **(kwargs or {}))


class Packed(Wrapped):
    """Each operation has a copy, as where values are packed otherwise."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [one.inner.clone() if isinstance(one, cls) else one for one in args]
        return function(*args, **(kwargs or {}))


def test_a_tensor_of_another_type_is_refused_where_its_memory_is_not_its_own() -> None:
    values = torch.arange(6.0).view(2, 3)
    for right in (values.as_subclass(Counted), nn.Parameter(values), Wrapped(values), Wrapped(torch.zeros(0))):
        assert layout_of(right).shape == right.shape
    assert torch.equal(wire_bytes(Wrapped(values)), wire_bytes(values))
    for wrong in (TwoTensor(values, values), Packed(values)):
        with pytest.raises(StateError, match=rf"a tensor of type .*\.{type(wrong).__name__}, which keeps its"):
            layout_of(wrong)
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(values, values.clone()))
    with pytest.raises(StateError, match=r"net\.weight: a tensor of type .*TwoTensor"):
        TrainingState({"net": model})
    model = nn.Linear(3, 2)
    model.register_buffer("table", TwoTensor(values, values))
    with pytest.raises(StateError, match=r"table: a tensor of type .*TwoTensor"):
        TrainingState({"net": model}).collect()
