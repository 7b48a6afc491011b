"""Watches what iterations are given: a batch that a replacement would not have is refused or told.

- A batch that was handed out before the point at which a replacement would begin: an error at once.
- Something else that was made between two iterations, and is not known to the job (`made_before`): told at the start.
- Other data than the predecessor was given (`given`): told by the replacement, which is of no use then. For that,
  what this process is given is shown to others as soon as it has it.
- What it was given and has changed in place before it was cut (`given_again`): put back, else told.
- Of the script's own making, and what a run or an epoch began with: said to the other ranks, of which that is not true
  if the script starts again in a replacement (`own_data`). Of a loader that it goes through by itself: told at the
  start (`own_loaders`).
- Other data than the same iteration was given in its first run, or in the one that is made once more for what it leaves
  behind (`remade`): told by the process that notices.

This module must never take part in an iteration.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from swift_agent.errors import UsageError
from swift_agent.torch_private import pipelining
from swift_agent.wire.given import PLAIN, Given, fingerprint, fingerprint_of_indices, leaves
from swift_agent.worker.data.given_again import CannotPutBack, GivenAgain, storage_of
from swift_agent.worker.data.made_before import Alive, MadeBefore
from swift_agent.worker.data.own_loaders import OwnLoaders
from swift_agent.worker.data.own_state import OwnState, held_weakly, numbers_of
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.remade import FirstRuns, can_be_compared
from swift_recovery.state.sharded import local_of

_RESTARTS = "a lost worker restarts all workers"
_REMAKES = (
    "after a failure the iteration before is run once more, without effect, for what it leaves; if on a rank that was "
    "there it does not leave the same, all workers restart"
)
R = TypeVar("R")
_KNOWN: tuple[type, ...] = (*PLAIN, numpy.ndarray)


def _to_nobody() -> None: ...


class Inputs:
    """One per job. *given*: from `watch` on; *carried*: None without an agent. *note*: a line for people; *unfit*: ends
    this process, as all have to begin again."""

    def __init__(
        self, place: Place, given: Given | None, carried: MadeBefore | None, note: Callable[[str], None],
        unfit: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._place, self._given, self._carried = place, given, carried
        self._note, self._unfit = note, unfit
        self._handed: Alive = {}
        self._stale: Alive = {}
        self._has_iterated = False
        self._awaits_forward = self._is_opaque = self._has_data = False
        self._models: list[nn.Module] = []
        self._tracked: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        # As they were looked at last: what is wrong in that costs copies.
        self._places: frozenset[int | None] | None = None
        self._again = GivenAgain(self._is_state)
        self._name = ""
        self._is_given_nothing = False
        self._is_replacement = place.status == "empty"
        self._called, self._has_called = 0, False  # that iteration, and whether a run of it has called a model
        self._first_runs = FirstRuns()
        self._begins_pass = self._is_told = False
        self._starts_again: bool | None = None  # what the iteration was given first
        self._show: Callable[[], None] = _to_nobody
        self._first_own: int | None = None  # of this process: the first iteration that was given such data
        self._say_own: Callable[[int, bool, bool], None] = lambda iteration, is_again, is_first: None
        self._own_state = OwnState()
        self._own_loaders = OwnLoaders(place)
        self._at_first: Callable[[], None] | None = None

    def watch(
        self, models: Iterable[nn.Module], given: Given, show: Callable[[], None] = _to_nobody,
        optimizers: Iterable[Optimizer] = (), say_own: Callable[[int, bool, bool], None] | None = None,
    ) -> None:  # fmt: skip
        """*models*, *optimizers*: those tracked; an iteration that was given no batch calls one of the models. *show*:
        what is new in the page of *given* is to go to who keeps a copy. *say_own*: to the other ranks, of an
        iteration that is about to run, whether it was given what the script began with, and whether this replacement
        gives it something of the script's own for the first time."""
        self._say_own = say_own or self._say_own
        self._optimizers = list(optimizers)
        self._models, self._given, self._show = list(models), given, show
        self._tracked = self._models[:]
        self._own_loaders.watch()

    def begin_pass(self, number: int, loader: Any, epoch: int) -> None:
        """Of the loop, over a loader that begins at its beginning, and was told *epoch*."""
        if self._given is None:
            return
        is_known = self._given.begin_track(number, run=self._place.began)
        if number and not is_known and self._place.changing and not self._own_state.knows(loader):
            changing = sorted(self._place.changing.intersection(numbers_of(loader)))
            if changing:
                self._unfit(
                    f"{', '.join(changing)} changes from pass to pass on the other ranks, and starts over in this "
                    f"process; of pass {number} its predecessor had not been given anything yet, so nobody knows what "
                    "that would have been (see: Will my script be recovered?)"
                )
        self._begins_pass = True
        its_loader = held_weakly(loader)
        self._at_first = lambda: self._own_state.look(its_loader(), epoch)

    def passed(self, entry: Any) -> None:
        """That pass goes through *entry*, the indices of a batch or the batch, handed out or not."""
        if self._at_first is not None:
            at_first, self._at_first = self._at_first, None
            at_first()
            self._place.changing |= self._own_state.changing
        if self._given is not None and not self._given.follow(lambda begin: fingerprint_of_indices(entry, begin)):
            self._has_other_data()

    def at_point(self) -> None:
        """User code is between two steps, and nothing that was handed out waits to be used."""
        if self._handed:
            self._stale, self._handed = self._handed, {}
        self._is_opaque = self._has_data = False
        if self._given is not None:
            self._begin_given(self._given)
        if self._has_iterated:
            self._has_iterated = False
            if self._carried is not None and not self._carried.is_over:
                self._carried.at_point()

    def handed(self, batch: Any) -> None:
        """To the script, between two iterations, for the next one."""
        for leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._handed[id(leaf)] = weakref.ref(leaf)
            elif not isinstance(leaf, _KNOWN):
                self._is_opaque = True
            # A number or a text may be all that the loop's loader gives, and the data the script's own.
            self._has_data = self._has_data or type(leaf) not in PLAIN
        if self._given is not None:
            self._compare(batch)
            if self._begins_pass:
                self._show_now()

    def begin(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The script calls an iteration. Raises `UsageError` for a batch that a replacement would not have."""
        self._name, self._has_iterated = name, True
        values = [value for value in (*args, *kwargs.values()) if type(value) not in PLAIN]
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)] if values else []
        for tensor in tensors:
            found = self._stale.get(id(tensor))
            if found is not None and found() is tensor and id(tensor) not in self._handed:
                raise UsageError(
                    f"{name}() was given a batch that job.batches() had handed out before the last one and before the "
                    "last iteration: a replacement would not have it. Take a batch right before the iteration that "
                    "uses it, several for one iteration by job.batches(loader, group=k), or inside the iteration by "
                    "next()."
                )
        if self._given is None:
            return
        self._again.begin(*values)
        if self._given.iteration != self._number:
            self._begin_given(self._given)  # another one with the same batch
        others = [tensor for tensor in tensors if id(tensor) not in self._handed]
        self._awaits_forward, self._has_called, self._called = False, False, self._number
        self._starts_again = None
        self._is_given_nothing = not tensors and not (self._given.count and self._has_data)
        if others:
            self._find_carried(others)
        if others:
            self._compare_own(others)
        elif tensors and not self._given.count:
            self._compare(tensors)
        elif self._is_given_nothing:
            self._await_forward()
        if not self._given.call():
            self._has_other_data()
        self._show_now()

    def run(self) -> None:
        """What the script has called begins to run, for the first time or once more."""
        self._awaits_forward = self._is_given_nothing
        self._say()
        self._put_back(self._again, self._name, f"iteration {self._called}")

    def given_to_section(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]
                         ) -> Callable[[], R]:  # fmt: skip
        """*function* with that, given the same each time it is called: a collective may have been cut inside."""
        if self._given is None:
            return functools.partial(function, *args, **kwargs)
        again = GivenAgain(self._is_state)
        again.begin(*args, *kwargs.values())

        def call() -> R:
            self._put_back(again, getattr(function, "__name__", "a section"), "it")
            return function(*args, **kwargs)

        return call

    def _put_back(self, again: GivenAgain, name: str, what: str) -> None:
        if again.has_run:
            self._places = None
        try:
            again.run()
        except CannotPutBack as changed:
            self._unfit(
                f"{name}() has changed {changed}, which it was given, in place before {what} was cut, and begins with "
                "that when it is run again: have it change a copy (see: Will my script be recovered?)"
            )

    def ran(self) -> None:
        """The script goes on after the iteration."""
        self._place.drawn = 0
        self._again.end()
        if self._own_loaders.is_drawn_inside:
            self._tell_own_loader()

    def _is_state(self, thing: torch.Tensor | Mapping[Any, Any]) -> bool:
        """Also what `state_dict()`, `detach()` or a slice of a parameter, of a buffer or of an optimizer's state is."""
        if not isinstance(thing, torch.Tensor):
            return any(thing is slots for one in self._optimizers for slots in one.state.values())
        where = storage_of(thing)
        if where is None:
            return False
        if self._places is None or where in self._places:  # that may have moved
            self._places = self._places_of_state()
        return where in self._places

    def _places_of_state(self) -> frozenset[int | None]:
        states = itertools.chain(
            *(itertools.chain(model.parameters(), model.buffers()) for model in self._tracked),
            *(slots.values() for optimizer in self._optimizers for slots in optimizer.state.values()),
        )
        return frozenset(storage_of(local_of(state)) for state in states if isinstance(state, torch.Tensor))

    def _begin_given(self, given: Given) -> None:
        given.begin(self._number, run=self._place.began, passes=self._place.here.passes)

    @property
    def _number(self) -> int:
        """Of the iteration to come."""
        return self._place.here.iteration + (self._place.owed is not None)

    def drawn(self, batch: Any) -> None:
        """By the iteration, while it runs."""
        if self._given is not None:
            self._awaits_forward = self._awaits_forward and all(type(leaf) in PLAIN for leaf in leaves(batch))
            self._again.add(batch)
            self._compare(batch)
            self._show_now()

    def _await_forward(self) -> None:
        """Once there is a hook, it costs a little in each forward: not for those who say what they give."""
        self._awaits_forward = True
        models, self._models = self._models, []
        for model in models:
            # What `torch.compile` has made of one is called like any module: the hook comes before what is compiled.
            model.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model that `watch` has named is called."""
        if torch.compiler.is_compiling():
            return  # what compiles the code around the model compiles this, too
        if not self._awaits_forward or pipelining.tells_shapes():
            return  # each process of a stage does the latter once, in whichever iteration it begins
        self._awaits_forward = False
        inputs, place = [*args, kwargs], self._place
        if place.remaking is not None:
            if place.has_to_fit and not self._first_runs.is_same(place.remaking, inputs):
                self._unfit(
                    f"iteration {place.remaking} ran again, for what it leaves to the next one, and got other data "
                    f"than in its first run: the iteration before it, run again too, left other data. {place.carries}"
                )
            return
        assert self._given is not None
        is_first, self._has_called = not self._has_called, True
        if is_first:
            if not self._is_opaque:
                self._find_carried(inputs, in_forward=True)
            self._compare_own(inputs)
            self._show_now()
            self._say()
            self._first_runs.keep(self._called, self._given.digest or fingerprint(inputs))
        elif self._first_runs.differs(self._called, inputs, has_effect=place.inside == "iteration"):
            self._unfit(
                f"iteration {self._called} was given other data when it was run again than in its first run, and would "
                "train on it: the script keeps its place in the data itself (a position, a batch made ahead). Take it "
                "from job.batches, next() inside the iteration, or from the number of the iteration (see: Will my "
                "script be recovered?)"
            )

    def _compare(self, inputs: Any) -> None:
        assert self._given is not None
        if not self._given.add(inputs):
            self._has_other_data()

    def _compare_own(self, inputs: Any) -> None:
        """*inputs*: no batch that the job knows."""
        self._compare(inputs)
        assert self._given is not None
        # On a device nothing but shapes is known, which come again.
        if all(leaf.is_cpu for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)):
            self._starts_again = self._given.starts_again(inputs, self._place.here.epoch)
        if self._first_own is None:
            self._first_own = self._called
        if self._own_loaders.goes_on:
            self._tell_own_loader()

    def _say(self) -> None:
        if self._starts_again is not None:
            is_first = self._is_replacement and self._called == self._first_own
            self._say_own(self._called, self._starts_again, is_first)

    def _tell_own_loader(self) -> None:
        place = self._place
        if place.carries and not place.remakes:
            return
        place.remakes, place.carries = False, (
            f"{self._name}() trains on batches of a DataLoader that the script goes through by itself, from iteration "
            "to iteration, and a replacement would start over with it: give it to job.batches(), two of them as one, "
            "with a data set that gives the samples of both"
        )
        self._say_carries(_RESTARTS)

    def _show_now(self) -> None:
        self._begins_pass = False
        self._show()

    def _has_other_data(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        self._unfit(
            f"iteration {self._number} was given other data than in the process that this one replaces, and "
            "training would go on with it: a loader that begins elsewhere in a replacement, or a batch that was "
            "drawn before the iteration (see: Will my script be recovered?)"
        )

    def _find_carried(self, inputs: Any, *, in_forward: bool = False) -> None:
        """*in_forward*: the iteration was given nothing, so it may be the one before that has left it."""
        carried = self._carried
        if carried is None or not carried.is_on or self._place.carries:
            return
        tensor = carried.find(inputs, self._handed)
        if tensor is None:
            return
        place = self._place
        place.remakes = in_forward and can_be_compared(inputs) and place.can_remake()
        self._place.carries = (
            f"{self._name}() uses a tensor of shape {list(tensor.shape)} that was made before the point at which a "
            "replacement would begin, and after the iteration before: a replacement would not have it. Make it inside "
            "the iteration, or right before (a batch: by job.batches)"
        )
        self._say_carries(_REMAKES if place.remakes else _RESTARTS)

    def _say_carries(self, then: str) -> None:
        place = self._place
        if place.has_recovered and not self._is_replacement:
            self._unfit(f"{place.carries}. Workers have been lost before this was known")
        elif place.rank == 0:
            self._note(f"{place.carries}. Until then {then}.")


class _ForwardHook:
    """Stays on a model, which the script may copy or save whole: there it is something of Python's own that does
    nothing, so that who loads it needs no swift_agent."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.on_forward(args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
