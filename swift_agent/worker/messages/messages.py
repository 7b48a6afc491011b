"""Point-to-point messages of iterations: counted, logged by their sender, and served again to a replacement; and
beside them what collectives gave (`results`).

Every Python caller of c10d's point-to-point operations (`isend`, `irecv`, `batch_isend_irecv`, object lists,
`torch.distributed.pipelining`) ends in `ProcessGroup.send` and `recv`, which are wrapped here for all groups. Outside
of an iteration nothing is done. A message is identified by its channel (group, source, destination, tag) and its number
there, which a rank that repeats an iteration counts again from where that began.

While a replacement repeats the iterations of its predecessor, what survivors had sent it comes from their logs, and
what it sends to them is dropped: they have it. It logs again what it sends, so that the next failure finds complete
logs. It begins with what set-up gives, or with a checkpoint: what was sent before the newest one that counts is gone.

Where survivors stay in the middle of the iteration that was cut, the logs reach into that, too: the replacement goes
on with what comes live when they end, and drops what its receivers have. Between survivors, too, all is lost that was
under way: it is sent again from the logs, and receives begin again (`counts`, `operations`).
This module must never decide who repeats what, or stays; the plan does.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swift_agent.errors import UsageError
from swift_agent.torch_private import (
    autograd as torch_autograd,
)
from swift_agent.torch_private import (
    groups,
    pipelining,
)
from swift_agent.torch_private import (
    messages as torch_messages,
)
from swift_agent.torch_private import (
    works as torch_works,
)
from swift_agent.worker.in_place import Alone, InPlace
from swift_agent.worker.messages.collective_counts import Collectives
from swift_agent.worker.messages.collective_results import Outputs, Results
from swift_agent.worker.messages.cpp_messages import Unseen, Ways
from swift_agent.worker.messages.log_settings import bytes_for_logs, copied_to
from swift_agent.worker.messages.operations import Receive, Send
from swift_logging_store.format.record import Channel
from swift_logging_store.log import transfer
from swift_logging_store.log.digests import Digests
from swift_logging_store.log.log import SentLog
from swift_logging_store.log.predecessor import SentBefore
from swift_recovery.errors import CannotReplay
from swift_recovery.replay.message_counts import Counts, Stand, Told
from swift_recovery.replay.serving import Gift
from swift_recovery.replay.source import Connect, Repetition


class Messages:
    """Of the rank *rank*; its `log` is written below *directory*, which is local to the node. One per process.

    *origin*: what this process's set-up gave; *origins*: what that of the first process of each rank gave, empty if
    that is not known. *note* tells people; *check* raises when a recovery is cut; *is_ours*: see
    `Archive`; *in_place*: asked when a message is cut.
    """

    def __init__(
        self, rank: int, directory: Path, note: Callable[[str], None], check: Callable[[], object] = lambda: None,
        is_ours: Callable[[], bool] = lambda: True, in_place: InPlace | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._in_place = in_place or Alone()
        self.origin: list[int] = []
        self.origins: list[list[int]] = []
        self._note, self._check = note, check
        self._sent_before = SentBefore(directory, rank)
        self._has_predecessors = True  # for all that is known
        self._directory = directory / f"{self._sent_before.prefix}{uuid.uuid4().hex[:8]}"
        self.log = SentLog(rank, self._directory, *bytes_for_logs(directory), note, is_ours, copied_to(rank))
        self.all_began_at = 0
        """The iteration of the checkpoint with which all ranks began together; 0: with what set-up gave."""
        self._complete_from = 0  # the iteration
        self.checkpoint = 0
        """The iteration of the newest one that counts: what was sent before it is gone."""
        self._iteration = -1  # not in one
        self._has_agreed = False  # to the update of the iteration
        self._refuses = False
        self._generation = 0
        self._counts = Counts()
        self._digests = Digests()
        self._asked_at: dict[int, dict[Channel, int]] = {}  # by the iteration of a checkpoint that may come to count
        # By the name of the group, the peer's rank in it, and the tag.
        self._to: dict[tuple[str, int, int], Channel] = {}
        self._from: dict[tuple[str, int, int], Channel] = {}
        self._repetition = Repetition(self._directory / "taken", self._sent_before, note)
        self._sent_here: dict[Channel, int] = {}  # to this rank, before the plan's iteration, while it repeats others
        self.reconnected = 0
        self._thread = threading.get_ident()
        self._has_threads = False
        self._waiting: dict[Channel, deque[Receive]] = {}
        # How to send on a channel again: torch's operation, the group, and the rank in it.
        self._routes: dict[Channel, tuple[Any, Any, int]] = {}
        # Sent again in this iteration, and in the last one: they have their memory to themselves.
        self._again: list[Any] = []
        self._again_before: list[Any] = []
        self._collectives, self._unseen = Collectives(), Unseen()
        self._ways = Ways(self._unseen)
        self._has_collective_steps = pipelining.first_steps_are_collective()
        self._results = Results(rank, self._repetition, self._log)
        make = self._unseen.make
        torch_messages.intercept_messages(
            "log",
            lambda original, *its: self._send(partial(make, original), *its),
            lambda original, *its: self._recv(partial(make, original), *its),
            self._recv_from_any,
        )
        torch_messages.wrap_collectives(self._collective)

    @property
    def is_complete(self) -> bool:
        """Whether a lost neighbour finds here all that it was sent, from a state on that it can begin with."""
        if self.log.incomplete:
            return False
        return 0 < self._complete_from <= self.checkpoint or (self._complete_from == 0 and self._has_begin)

    @property
    def _has_begin(self) -> bool:
        return bool(self.origins) or self.checkpoint > 0

    # ---- iterations ----

    def begin(self, iteration: int, generation: int) -> None:
        """An iteration begins; its messages count."""
        self._iteration, self._generation, self._has_agreed = iteration, generation, False
        self._counts.begin()
        self._collectives.begin()
        self._ways.begin()
        self._results.begin(iteration)

    def end(self) -> None:
        """The iteration, or a section, is over, and counts."""
        self._results.end()  # first: it is of this iteration what they log
        was_iteration, self._iteration = self._iteration >= 0, -1
        self.log.end_iteration()
        if not was_iteration:
            return
        self._let_go()
        self._counts.end()
        self._collectives.end()
        self._ways.end()
        # All that an iteration sends is received in it; it may not be known here yet.
        self._again_before, self._again = self._again, []
        repetition = self._repetition
        if repetition.is_on and not repetition.is_whole:
            repetition.close()
        if self._has_predecessors and not repetition.is_on:
            self._has_predecessors = False
            self._sent_before.forget()
            self.log.forget_predecessors()

    def pass_over(self) -> None:
        """The iteration was cut after all that it had to send; the rest of it is left out."""
        self._results.pass_over()
        self.end()
        self._counts.pass_over()

    def rewind(self) -> None:
        """The iteration was cut, and will be run again."""
        self._iteration = -1
        self._let_go()
        self._collectives.end()
        self._results.cut()
        self._counts.rewind()
        self._digests.keep_before(self._counts.here)

    def _let_go(self) -> None:
        for queue in self._waiting.values():
            while queue:
                queue.popleft().let_go()

    # ---- checkpoints ----

    def begin_checkpoint(self, iteration: int) -> None:
        """A checkpoint of the state before *iteration* is taken; `counts` belong to it. A log that was given up begins
        again."""
        self._asked_at[iteration] = self._counts.asked.copy()
        if self.log.begin_checkpoint(iteration):
            self._complete_from = iteration

    def counts(self) -> dict[str, Any]:
        """Of all messages of this rank so far: who takes it over goes on counting."""
        return {"sent": _to_tree(self._counts.sent), "received": _to_tree(self._counts.asked)}

    def take_over(self, counts: Mapping[str, Any] | None) -> None:
        """This process has the state of its predecessor, but not the log of what that had sent."""
        if counts is not None:
            self._count_on(counts)
        if not self.log.incomplete:
            self.log.give_up("this process has taken over a state, without the log of what was sent")

    def _count_on(self, counts: Mapping[str, Any]) -> None:
        self._counts.set(_from_tree(counts["sent"]), _from_tree(counts["received"]))

    def restore(self, counts: Mapping[str, Any] | None, iteration: int) -> None:
        """This process begins with that checkpoint; None: it was taken where nothing was logged."""
        if counts is not None:
            self._count_on(counts)
        self._complete_from = self.checkpoint = iteration

    def checkpointed(self, iteration: int) -> None:
        """That checkpoint counts: nobody needs what was sent before it."""
        self.checkpoint = iteration
        self.log.drop(iteration)
        self._digests.keep_from(self._asked_at.get(iteration, {}))
        self._asked_at = {number: asked for number, asked in self._asked_at.items() if number > iteration}

    def close(self) -> None:
        """The end: nobody needs what was sent."""
        self.log.close()

    # ---- recovery ----

    def beginning(self) -> list[Any]:
        """What a replacement has to know of the begin of the job, for its `begin_as`."""
        return [self.origins, self.all_began_at]

    def begin_as(self, beginning: Sequence[Any]) -> None:
        """A replacement hears that from another rank, which may not know it."""
        if beginning[0] or not self.origins:
            self.origins, self.all_began_at = beginning

    def gift(self, destination: int, before: int, replays: Collection[int]) -> Gift | None:
        """For a replacement of rank *destination*, one of *replays*: what it was sent in the iterations before that
        one, as far as this rank will not send it once more, and the results that both had; None if there is nothing.
        Any thread may call it with the link and a check; see `transfer.send`. Raises `LogError` if there is no log.
        """
        ends = {channel: end for channel, end in self._counts.sent.items() if channel.destination == destination}
        ends |= self._results.ends(destination, before, replays)
        return partial(transfer.send, self.log, self.log.segments(), before, ends) if ends else None

    def take(self, links: Mapping[int, Connect]) -> None:
        """What these ranks give, in threads. Raises `CannotReplay` if there is no place for it."""
        self._repetition.take(links)

    def wait_taken(self) -> None:
        """Until all has come. Raises `LostLog` if it does not, and when the recovery is cut."""
        self._repetition.wait(self._check)

    @property
    def is_lost(self) -> bool:
        """Whether it is known that not all that is to be taken will come. Any thread may ask."""
        return self._repetition.is_lost

    @property
    def waited_s(self) -> float:
        """By a replacement, for messages that had not come yet."""
        return self._repetition.waited_s

    def check_origin(self, rank: int, *, has_checkpoint: bool) -> None:
        """Raise CannotReplay if set-up gave something else here than for the first process of this rank, as far as that
        is known: another seed, or, where no checkpoint takes its place, another state."""
        first_origin = self.origins[rank] if self.origins else self.origin
        for mine, first, what in zip(self.origin, first_origin, ("state", "seed"), strict=True):
            if mine != first and not (what == "state" and has_checkpoint):
                raise CannotReplay(
                    f"rank {rank}: the script's set-up gives another {what} than when the job began. It must give the "
                    "same each time: seed it (torch.manual_seed), and load no checkpoint that the job itself writes"
                )

    def begin_replay(self, repeating: Collection[int]) -> None:
        """From the next iteration on messages come from what is taken, but for those of the ranks *repeating*, which
        repeat theirs, too; and are sent to those only. Raises `LostLog` if it is known already that not all comes."""
        # Alone it goes on when others are lost: if that is who gives, the link tells.
        self._repetition.begin(repeating, self._check if len(repeating) > 1 else lambda: None)

    @property
    def repeating(self) -> Collection[int]:
        """Those who repeat iterations, this rank among them."""
        return self._repetition.together

    def drop_replay(self) -> None:
        """It was cut before it began."""
        self._repetition.close()

    def end_replay(self, *, stays: bool) -> None:
        """All iterations that are complete have been repeated. *stays*: the one that was cut follows, and what was
        taken is used as far as it goes; else it was not needed, and all begin that one again. Raises `LostLog` if
        not all comes that was to be taken."""
        self._repetition.end_whole()
        self._follow("begin", self._sent_here)
        if not stays:
            self._repetition.close()

    # ---- staying in the middle of an iteration ----

    def unwinds(self, *, updated: bool = False) -> str:
        """Why this rank cannot stay in the middle of its iteration, or after its update, '' if it can. May be called
        from any thread."""
        if "nccl" in groups.backends_by_device(dist.get_backend_config()).values():
            return "have messages on NCCL, which does not say whether one that was cut has come"
        if self._has_threads:
            return "have messages in threads of the script's own"
        # An iteration that is updated will not be started over.
        return "" if updated and self._collectives.are_known else self._collectives.why

    @property
    def passes_over(self) -> bool:
        """Whether this rank, past its update, cannot go on with the rest of its iteration: there might be a collective
        that others have passed over."""
        return self._collectives.has_any

    def refuse_collectives(self) -> None:
        """In the rest of this iteration (`collective_counts.REFUSED`)."""
        self._collectives.refuse()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, messages and collectives are none of an iteration, although one may be under way."""
        with self._collectives.aside(), self._unseen.aside(), torch_messages.plain_messages(), torch.no_grad():
            yield

    def agreeing(self, agree: Callable[[], None]) -> Callable[[], None]:
        """*agree* to the update of an iteration, a collective that is none of the script's."""

        def agree_aside() -> None:
            self._ways.check_seen()
            self._results.agree()
            self._has_agreed = True
            with self._collectives.aside():
                agree()

        return agree_aside

    def told(self, iteration: int) -> dict[str, Any]:
        """What this rank has of what the others send it, for their `rejoin`; all go on with *iteration*."""
        told = self._counts.told(self._stands(iteration), self._repetition.ends(self._counts.here))
        return {"stands": told.stands, "has": _to_tree(told.has), "sent": _to_tree(told.sent)}

    def _stands(self, iteration: int) -> Stand:
        if self._iteration < 0:
            return "begin"
        return "middle" if self._iteration == iteration else "end"

    def digests(self, source: int) -> bytes:
        """What that rank, which repeats iterations, has sent here, for its `compare_with`."""
        return self._digests.to_bytes(source)

    def compare_with(self, digests: bytes) -> None:
        """What this rank sends again with what another one has received. Raises `ValueError`."""
        self._repetition.compare_with(digests)

    def rejoin(
        self, told: Mapping[int, Mapping[str, Any]], replays: Collection[int], iteration: int, generation: int
    ) -> None:
        """All are connected again and go on with *iteration*, those who can from where they stand. *told*: by the other
        ranks, but for *replays*, which repeat iterations. Inside `aside`. Raises `LogError`, and `CannotReplay` if
        ranks have counted differently."""
        self._generation = generation
        stands = self._stands(iteration)
        others = {rank: _told(tree) for rank, tree in told.items()}
        missing = self._counts.rejoin(stands, others, replays)
        self._sent_here = {}
        for other in others.values():
            self._follow(stands, other.sent)
        self._again = [self._send_again(*message) for message in transfer.logged(self.log, missing, self._check)]
        for queue in self._waiting.values():
            for receive in queue:
                receive.post()
        self.reconnected += 1

    def sent_before(self) -> list[list[Any]]:
        """By this rank, which has repeated all iterations before the plan's, for `follow`."""
        return _to_tree(self._counts.sent)

    def follow(self, sent: Iterable[Sequence[Any]], iteration: int) -> None:
        """*sent*: before *iteration*, by a rank that has repeated those. Raises `CannotReplay`."""
        self._follow(self._stands(iteration), _from_tree(sent))

    def _follow(self, stands: Stand, sent: Mapping[Channel, int]) -> None:
        mine = {channel: count for channel, count in sent.items() if channel.destination == self.rank}
        if self._repetition.is_whole:
            self._sent_here |= mine  # this rank does not stand there yet
        elif (channel := self._counts.follow(stands, mine)) is not None:
            raise CannotReplay(
                f"ranks {channel.source} and {channel.destination} do not agree how many messages of {channel} there "
                "were before this iteration: what is sent in an iteration must be received in it, and waited for"
            )

    def _send_again(self, channel: Channel, tensor: torch.Tensor) -> Any:
        original, group, dst = self._routes[channel]
        return original(group, [tensor], dst, channel.tag)

    def start_over(self) -> None:
        """All are connected again, and begin the iteration that was cut from its start."""
        self._repetition.close()

    def stay(self, error: Exception) -> None:
        """See `operations.Owner`."""
        # Only the script's own thread can join the others.
        if self._iteration < 0 or threading.get_ident() != self._thread or not self._in_place.stays(error):
            try:
                raise error
            finally:
                del error  # else its traceback has this frame, and this frame it: tensors of the script live on

    def expect_cut(self, error: Exception) -> None:
        """See `operations.Owner`."""
        if self._iteration < 0 or threading.get_ident() != self._thread or not self._in_place.was_cut(error):
            try:
                raise error
            finally:
                del error

    def note_thread(self) -> None:
        """See `operations.Owner`."""
        if threading.get_ident() != self._thread:
            self._has_threads = True

    # ---- operations ----

    def _send(self, original: Any, group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self._iteration < 0:
            self._check_outside()
            return original(group, tensors, dst, tag)
        if self._has_agreed:
            raise UsageError(
                "a message is sent in an iteration after its update: who was cut before that would never send it, and "
                "a replacement could not repeat the iteration. Send it before optimizer.step()."
            )
        self.note_thread()
        key = (group.group_name, dst, tag)
        channel = self._to.get(key)
        if channel is None:
            channel = self._to[key] = Channel(key[0], self.rank, _global_rank(group, dst), tag)
            self._routes[channel] = (original, group, dst)
        (tensor,) = tensors
        number = self._counts.send(channel)
        repetition = self._repetition
        if repetition.is_on:
            repetition.check_sent(channel, number, self._iteration, tensor)
        self._log(channel, number, tensor)
        if repetition.is_over(channel.destination):
            if self._counts.is_waited_for(channel, number):
                # If it is cut its receiver will ask for it in the next generation.
                with contextlib.suppress(RuntimeError):
                    self._again.append(self._send_again(channel, tensor.detach().clone()))
            return torch_works.finished_work()
        if self._counts.is_had(channel, number):
            return torch_works.finished_work()
        try:
            return Send(self, original(group, tensors, dst, tag))
        except Exception as error:
            cut = error
        try:
            self.stay(cut)  # by now it is under way: it is in the log
        finally:
            del cut
        return torch_works.finished_work()

    @contextlib.contextmanager
    def none_between(self) -> Iterator[None]:
        """Inside, between iterations that are repeated, a message is an error: it was not logged."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    def _check_outside(self) -> None:
        if self._refuses:
            raise CannotReplay("a message outside of iterations is in no log")

    def _log(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        limit, why = transfer.MAX_MESSAGE_BYTES, ""
        if not self._collectives.are_known:
            why = "without the compiled library nobody can repeat iterations with them (swiftctl native build)"
        elif self._has_collective_steps:
            why = (
                "a schedule of torch.distributed.pipelining begins with a collective of all stages from torch 2.15 on, "
                "which a replacement would make alone (install torch 2.13 or 2.14)"
            )
        elif num_bytes > limit:
            why = f"a message of {num_bytes} bytes is more than the {limit} that can be handed on"
        if why and not self.log.incomplete:
            self.log.give_up(why, for_good=True)
        self.log.append(channel, number, tensor, iteration=self._iteration, generation=self._generation)

    def _recv(self, original: Any, group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self._iteration < 0:
            self._check_outside()
            return original(group, tensors, src, tag)
        self.note_thread()
        key = (group.group_name, src, tag)
        channel = self._from.get(key)
        if channel is None:
            channel = self._from[key] = Channel(key[0], _global_rank(group, src), self.rank, tag)
        (tensor,) = tensors
        number = self._counts.ask(channel)
        if self._repetition.is_on and self._repetition.gives(channel, number):
            self._repetition.fill(tensor, channel, number, self._iteration)
            self._received(channel, number, tensor)
            return torch_works.finished_work()
        queue = self._waiting.get(channel)
        if queue is None:
            queue = self._waiting[channel] = deque()
        work = Receive(
            self, queue, lambda: original(group, tensors, src, tag), lambda: self._received(channel, number, tensor)
        )  # fmt: skip
        try:
            work.post()
        except Exception as error:
            cut = error
        else:
            return work
        try:
            self.stay(cut)
        finally:
            del cut
        return work

    def _received(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        self._counts.receive(channel)
        self._digests.add(channel, number, tensor)

    def _recv_from_any(self, original: Any, group: Any, tensors: list[torch.Tensor], tag: int) -> Any:
        if self._iteration >= 0:
            raise UsageError(
                "a receive from any source inside an iteration: in which order its messages come is not logged, so it "
                "could not be repeated. Name the source."
            )
        return original(group, tensors, tag)

    def _collective(self, name: str, group: Any, outputs: Outputs, call: Callable[[], Any]) -> Any:
        is_one = self._iteration >= 0 and not self._collectives.is_aside and group.size() > 1
        is_one = is_one and not self._in_place.is_dry_run
        # Those of several threads have no order that could be repeated; those of a backward have that of its graph.
        if not is_one or (threading.get_ident() != self._thread and not torch_autograd.is_in_backward()):
            return call()
        self._collectives.has_any = True
        return self._results.make(name, group, outputs, call)


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _to_tree(counts: Mapping[Channel, int]) -> list[list[Any]]:
    return [[*astuple(channel), count] for channel, count in counts.items()]


def _told(tree: Mapping[str, Any]) -> Told:
    stands = tree["stands"]
    if stands not in ("begin", "middle", "end"):
        raise ValueError(f"a rank stands at {stands!r}")
    return Told(stands, _from_tree(tree["has"]), _from_tree(tree["sent"]))


def _from_tree(tree: Iterable[Sequence[Any]]) -> dict[Channel, int]:
    return {Channel(*fields): count for *fields, count in tree}
