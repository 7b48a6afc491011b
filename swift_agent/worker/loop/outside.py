"""Collectives of the script between its iterations and sections.

One that is cut there cannot be run again: its results may be anywhere in the script. So all workers would start again,
and that is said the first time one is made, with its line. A barrier of all ranks has no results: it is a section of
its own, repeated if a peer fails in it, and passed if the others have passed it.

After a recovery, ranks tell each other which it is, and meet before the first of these: a counter of the script's own
that decides on it may have started over in a replacement, and unlike collectives abort the process in gloo, or are
mixed up (`meetings`).

One in a section that the others have finished gives this rank its own values only: noted, for who runs an iteration
with them.

This module must never look at a tensor. What C++ code calls (DDP, functional collectives) is not seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from swift_agent.torch_private import groups
from swift_agent.torch_private import messages as torch_messages
from swift_agent.torch_private import works as torch_works
from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.line import in_script
from swift_agent.worker.tracked.loop_state import Place

# Of a script's lines, to be told.
MAX_TOLD = 20
# All ranks wait for each other in these.
_WAITING = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single",
)  # fmt: skip
_OF_ONE = in_script.TORCH + "distributed/algorithms/"


class Barriers(Protocol):
    def barrier(self, call: Callable[[], None], way: str) -> None:
        """Make it by *call*, until it counts. *way*: to where the script makes it."""

    @property
    def checks(self) -> Checks | None: ...


class Outside:
    """One per process, from the first point of the loop on. *note* tells people, None: nothing is protected. *begin*:
    what all workers would begin with. *unfit*: of a replacement, has all workers start again."""

    def __init__(
        self, place: Place, barriers: Barriers, note: Callable[[str], None] | None, begin: str,
        unfit: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._place, self._barriers, self._note, self._begin = place, barriers, note, begin
        self._checks = barriers.checks
        self._unfit = unfit
        self._script = threading.get_ident()
        self._told: set[str] = set()

    def watch(self) -> None:
        torch_messages.wrap_all_collectives(self._collective)

    def _collective(
        self, name: str, group: Any, is_async: Callable[[], bool], call: Callable[[], Any], what: Callable[[], str]
    ) -> Any:
        place = self._place
        if place.is_past_section and name != "barrier" and group.size() > 1:
            self._keep_local(name)
        checks = self._checks
        if checks is not None and place.inside == "section" and group.size() > 1:
            self._come_in_section(checks, group, what)
        if place.inside or not place.has_points or group.size() == 1 or threading.get_ident() != self._script:
            return call()
        # In no variable: a frame that holds itself keeps *group*, with its threads and sockets, until a collection.
        if in_script.called_by_us(sys._getframe()):
            return call()
        if name == "barrier" and not is_async() and group.size() == dist.get_world_size():
            self._barriers.barrier(lambda: _wait(call()), in_script.way_to(sys._getframe()))
            return torch_works.finished_work()
        if self._unfit is not None and (place.target is not None or place.is_behind or place.replays):
            # Its groups are those of the others, which are behind this collective: it would meet another of theirs.
            operation = in_script.operation_of(sys._getframe()) or name
            where = in_script.place_of(sys._getframe())
            if place.target is not None:
                self._unfit(
                    f"{operation} ({where}) comes before the first batch of the loop in a replacement, which begins "
                    "where the others have made it already. Decorate the function that has it with @job.resilient, or "
                    "leave it out"
                )
            if place.replays:
                self._unfit(
                    f"{operation} ({where}) comes between iterations that a replacement repeats from logs, and the "
                    "others have made it already. Decorate the function that has it with @job.resilient"
                )
            step = (place.begun_by_others or ("iteration", 0, 0))[0]
            if step != "iteration":
                self._unfit(
                    f"{operation} ({where}) comes before a {step.partition(' ')[0]} in a replacement, which begins "
                    "where the others are in that already. Decorate the function that has it with @job.resilient"
                )
            self._unfit(
                f"{operation} ({where}) comes between a batch and its iteration in a replacement, which begins where "
                "the others have made it already. Have the iteration make it"
            )
        if self._note is not None and len(self._told) < MAX_TOLD:
            operation = in_script.operation_of(sys._getframe()) or name
            self._tell(name, group, operation, in_script.place_of(sys._getframe()))
        if checks is not None and place.has_recovered and group.size() == dist.get_world_size():
            self._meet(checks, name, is_async, what)
        return call()

    def _meet(self, checks: Checks, name: str, is_async: Callable[[], bool], what: Callable[[], str]) -> None:
        # One rank alone makes these, while the others are in iterations (`Join`).
        if not in_script.is_in(sys._getframe(), _OF_ONE):
            checks.meetings.meet(
                lambda: what().replace(name, in_script.operation_of(sys._getframe()) or name, 1),
                lambda: in_script.place_of(sys._getframe()),
                waits=name in _WAITING and not is_async(),
            )

    def _come_in_section(self, checks: Checks, group: Any, what: Callable[[], str]) -> None:
        if threading.get_ident() != self._script:
            return
        checks.look_in_section()
        if checks.sections.compares and not in_script.called_by_us(sys._getframe()):
            ranks = tuple(groups.global_ranks(group))
            checks.sections.before(ranks, what(), in_script.place_of(sys._getframe()))

    def _keep_local(self, name: str) -> None:
        if self._place.local_result or threading.get_ident() != self._script or in_script.called_by_us(sys._getframe()):
            return
        operation = in_script.operation_of(sys._getframe()) or name
        self._place.local_result = f"{operation} ({in_script.place_of(sys._getframe())})"

    def _tell(self, name: str, group: Any, operation: str, where: str) -> None:
        """Once for each line, by one rank."""
        assert self._note is not None
        if where in self._told:
            return
        self._told.add(where)
        if self._place.rank == min(groups.global_ranks(group)):
            self._note(told(operation, where, self._begin, is_nccl=groups.has_nccl()))


def told(operation: str, where: str, begin: str, *, is_nccl: bool) -> str:
    if is_nccl:  # cut, it raises nothing, so nobody finds out
        return (
            f"{operation} ({where}) is outside of iterations and sections: if a peer is lost in it, its result over "
            "NCCL may be wrong without an error. Decorate the function that has it with @job.resilient, and take the "
            "result to the CPU in it."
        )
    return (
        f"{operation} ({where}) is outside of iterations and sections: if a peer is lost in it, all workers "
        f"start again, with {begin}. Decorate the function that has it with @job.resilient."
    )


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
