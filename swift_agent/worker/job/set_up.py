"""What a script, or a library that it uses, does before the job's loop begins and no replacement could make up for.

An optimizer makes a step: training has begun, in a loop that we do not know of. That is said at the first one.

Objects are taken from other ranks: a replacement runs the set-up alone; collectives of tensors return at once there,
with what it has itself, but of an object that another rank was to send there is nothing. That is said the first time,
at the start of the run; in a replacement nothing but a restart of all workers helps.

Numbers are drawn from generators that the script has not seeded: torch's is seeded for it, so that a replacement draws
those of its predecessor.

Tensors are summed up, or taken from other ranks, and are no parameters or other tracked state, which a replica gives:
what the script works out from them may differ in a replacement. That is said when the loop begins.

This module must never make up an object.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swift_agent.torch_private import groups, seeds
from swift_agent.worker.job import second_init
from swift_agent.worker.job.objects import NAMES, ranks_of, source_of
from swift_agent.worker.line import in_script

# Their first argument is what they fill.
_FILLING = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
MAX_TOLD = 5
_NAMES = (*NAMES, "all_gather_object")

# torch seeds itself with 64 random bits; what a script gives it, or a library draws for it, has fewer, mostly.
_OF_A_SCRIPT = 1 << 53


def seed(run: str, rank: int) -> None:
    """*run*: names this run of the job, the same in all its processes. Nothing is done if the script has seeded torch
    before."""
    if torch.initial_seed() % (1 << 64) >= _OF_A_SCRIPT and not seeds.is_given():
        digest = hashlib.sha256(f"{run} {rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1 | _OF_A_SCRIPT)


class SetUp:
    """One per process, until the loop begins. *is_over*: whether it has. *note* tells people, *unfit* has all workers
    start again, and does not return. *later* makes collectives of objects once the loop has begun."""

    def __init__(
        self, *, rank: int, is_replacement: bool, is_over: Callable[[], bool], note: Callable[[str], None],
        unfit: Callable[[str], None], later: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._rank, self._is_replacement, self._is_over = rank, is_replacement, is_over
        self._note, self._unfit, self._later = note, unfit, later
        self._told: set[str] = set()
        self._stand_ins: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._filled: dict[str, tuple[str, set[int]]] = {}  # by place: the operation, and the memory

    def watch(self) -> None:
        # First: it would keep our stand-ins, by names of its own, for code that compiles a collective.
        import torch.distributed._functional_collectives  # noqa: F401

        for name in _FILLING:
            self._watch(name, getattr(dist, name))
        for name in _NAMES:
            self._watch(name, getattr(dist, name))
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, named: Any) -> None:
        """The first one of the process."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "_init_optim_state":
                return  # torch makes one without effect, to load a snapshot
            frame = frame.f_back
        self._hook.remove()
        if not self._is_over() and self._rank == 0 and not self._is_replacement:
            self._note(
                f"an optimizer makes a step, and the job's loop has not begun ({in_script.place_of(sys._getframe())}): "
                "if a worker is lost, all start again, with what the script loads. For workers to be replaced in place "
                "name the state by job.track(), the update by @job.iteration, and take batches by job.batches() (where "
                "a library has the loop, have it iterate job.loader(loader): see Will my script be recovered?)"
            )

    def _watch(self, name: str, original: Callable[..., Any]) -> None:
        def stand_in(*args: Any, **named: Any) -> Any:
            if not self._is_over():
                (self._check_filled if name in _FILLING else self._check)(name, args, named)
            elif name in _NAMES:
                return self._later(name, original, args, named)
            return original(*args, **named)

        if name in _FILLING:
            self._stand_ins[name] = stand_in, original
        second_init.replace(name, stand_in)

    def _check_filled(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_replacement or in_script.is_called_by_torch(sys._getframe(2)):
            return
        ranks = ranks_of(args, named)
        if len(ranks) < 2 or self._rank != min(ranks):
            return
        filled = args[0] if args else next(iter(named.values()), None)
        where = in_script.place_of(sys._getframe())
        self._filled.setdefault(where, (name, set()))[1].update(groups.memory_of(filled))

    def ends(self, tracked: Iterable[torch.Tensor]) -> None:
        """The loop begins, with that state, which a replacement gets from others."""
        for name, (stand_in, original) in self._stand_ins.items():
            if getattr(dist, name) is stand_in:  # and nobody has put another one around it
                second_init.replace(name, original)  # what compiles the iteration knows torch's
        memory = groups.memory_of(list(tracked))
        unknown = [(where, name) for where, (name, of) in self._filled.items() if not of or of - memory]
        self._filled.clear()
        for where, name in unknown[:MAX_TOLD]:
            self._note(
                f"{name} ({where}) in the set-up: a replacement runs that alone, and has its own values only. If "
                "training depends on what it gives, have each rank work that out by itself, or track it"
            )

    def _check(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        ranks = ranks_of(args, named)
        if self._rank not in ranks or len(ranks) == 1:
            return
        source = None if name == "all_gather_object" else source_of(name, args, named, ranks)
        if source == self._rank:
            return
        where = in_script.place_of(sys._getframe())
        whose = "the others'" if source is None else f"rank {source}'s"
        text = (
            f"{name} ({where}) in the set-up: a replacement runs that alone, and would lack {whose} objects. Have each "
            "rank work them out by itself (in a library's trainer: see Will my script be recovered?)"
        )
        if self._is_replacement:
            self._unfit(text)
        elif self._rank == min(rank for rank in ranks if rank != source) and where not in self._told:
            self._told.add(where)
            self._note(f"{text}. Until then a lost worker restarts all workers.")

