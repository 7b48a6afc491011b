"""Stands between torch and its process groups: numbers each message of an iteration, logs it, makes it, or serves it.

    script --> send --> number --> log --> torch, or nothing: its receiver has it
    script --> recv --> number --> torch, or what the predecessor of this rank had received

Every Python caller of c10d's point-to-point operations (`isend`, `irecv`, `batch_isend_irecv`, object lists,
`torch.distributed.pipelining`) ends in `ProcessGroup.send` and `recv`, which are wrapped for all groups. Outside of an
iteration nothing is done. This module must never decide which rank repeats what, or stays.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from swift_agent.errors import UsageError
from swift_agent.torch_private import autograd as torch_autograd
from swift_agent.torch_private import messages as torch_messages
from swift_agent.torch_private import works as torch_works
from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.worker.in_place import InPlace
from swift_agent.worker.messages.collective_counts import Collectives
from swift_agent.worker.messages.collective_results import Outputs, Results
from swift_agent.worker.messages.cpp_messages import Unseen
from swift_agent.worker.messages.log_settings import compares
from swift_agent.worker.messages.operations import Owner, Receive, Send
from swift_logging_store.format.record import Channel
from swift_logging_store.log import transfer
from swift_logging_store.log.digests import Digests
from swift_logging_store.log.log import SentLog
from swift_recovery.errors import CannotReplay
from swift_recovery.replay.message_counts import Counts
from swift_recovery.replay.source import Repetition

_OUTSIDE = "a message outside of iterations is in no log"
_NOBODY_REPEATS = "without the compiled library nobody can repeat iterations with them (swiftctl native build)"


class Interception:
    """Of the rank *rank*, from `install` on. *owner*: `Messages`, which says which iteration is under way, and
    lends what is counted, logged and served."""

    def __init__(
        self, rank: int, owner: Owner, in_place: InPlace, log: SentLog, counts: Counts, digests: Digests,
        repetition: Repetition, collectives: Collectives, unseen: Unseen, told: WorkerEnvironment,
    ) -> None:  # fmt: skip
        self._rank, self._owner, self._in_place = rank, owner, in_place
        self._log, self._counts, self._digests, self._repetition = log, counts, digests, repetition
        self._collectives, self._unseen = collectives, unseen
        self.results = Results(rank, repetition, self.log_sent)
        self.thread = threading.get_ident()
        self.iteration = -1
        """Under way; -1: none is."""
        self.generation = 0
        self.has_agreed = False
        """To the update of the iteration."""
        self._refuses = False
        self._peeks = self._counts_only = False
        self._unread: Collection[int] = ()
        # What has come while it peeked: its memory, where that begins, and its version.
        self._peeked: dict[tuple[Channel, int], tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self.helps = told.share > 0
        """This process repeats iterations for another one of the same rank: nothing that it sends is logged."""
        self.is_strict, self.is_off = True, False
        self.is_behind = False
        """The last iteration that has begun here was repeated: others have what comes after it behind them."""
        self._compares = compares(told)
        self.num_collectives = 0
        """Those of iterations, so far."""
        self.unlogged: frozenset[int] = frozenset()
        """Ranks to which messages are not logged."""
        # What they were sent in this iteration, and in the one before it until all have agreed to this one's update: to
        # be sent again if a failure elsewhere cuts it on its way.
        self._sent: dict[Channel, dict[int, torch.Tensor]] = {}
        self._sent_before: dict[Channel, dict[int, torch.Tensor]] = {}
        # By the name of the group, the peer's rank in it, and the tag.
        self._to: dict[tuple[str, int, int], Channel] = {}
        self._from: dict[tuple[str, int, int], Channel] = {}
        self.waiting: dict[Channel, deque[Receive]] = {}
        # How to send on a channel again: torch's operation, the group, and the rank in it.
        self._routes: dict[Channel, tuple[Any, Any, int]] = {}
        self.again: list[Any] = []
        """Messages that were sent again in this iteration: they have their memory to themselves."""

    def install(self) -> None:
        """For the life of the process."""
        make = self._unseen.make
        torch_messages.intercept_messages(
            "log",
            lambda original, *its: self.send(partial(make, original), *its),
            lambda original, *its: self.recv(partial(make, original), *its),
            self.recv_from_any,
        )
        torch_messages.wrap_collectives(self.collective)

    def refuse(self, error: UsageError) -> None:
        """A rule for messages is broken. Raises *error*; or nothing is logged, or counted, from now on, where another
        rank holds the same as this one, and the script has not asked for logs."""
        if self.is_strict:
            raise error
        self.is_off = True
        self._log.give_up(str(error).partition(":")[0], for_good=True)

    def begin_unlogged(self, ranks: frozenset[int]) -> None:
        """An iteration begins. Messages to these ranks are not logged, in this one and all that follow."""
        self._sent = {}  # of one that was cut
        self.is_behind = self._repetition.is_whole
        self.unlogged |= ranks

    def agreed(self) -> None:
        """All have agreed to the update: they have all of the iteration before."""
        self._sent_before = {}

    def end_unlogged(self) -> None:
        """The iteration counts. Others may still wait for what it has sent."""
        self._sent, self._sent_before = {}, self._sent

    def take_unlogged(self, missing: dict[Channel, range]) -> list[tuple[Channel, torch.Tensor]]:
        """Those of *missing* that were kept here, in their order; they are taken out of it. What is left of a channel
        comes first: it was sent before the log group began to hold, and is in the log."""
        found: list[tuple[Channel, torch.Tensor]] = []
        for channel in [channel for channel in missing if channel.destination in self.unlogged]:
            sent = {**self._sent_before.get(channel, {}), **self._sent.get(channel, {})}
            numbers = missing.pop(channel)
            first = next((number for number in numbers if number in sent), numbers.stop)
            if first > numbers.start:
                missing[channel] = range(numbers.start, first)
            found += [(channel, sent[number]) for number in range(first, numbers.stop)]
        return found

    def let_go(self) -> None:
        """Of receives that were not waited for."""
        for queue in self.waiting.values():
            while queue:
                queue.popleft().let_go()

    def receive_again(self) -> None:
        """All are connected again: what is waited for begins again."""
        for queue in self.waiting.values():
            for receive in queue:
                receive.post()

    def send_again(self, channel: Channel, tensor: torch.Tensor) -> Any:
        original, group, dst = self._routes[channel]
        return original(group, [tensor], dst, channel.tag)

    def send(self, original: Any, group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self.iteration >= 0 and self.has_agreed and not self.is_off:
            self.refuse(
                UsageError(
                    "a message is sent in an iteration after its update: who was cut before that would never send it, "
                    "and a replacement could not repeat the iteration. Send it before optimizer.step()."
                )
            )
        if self.iteration < 0 or self.is_off:
            self._check_outside()
            return original(group, tensors, dst, tag)
        if self._peeks:
            return torch_works.finished_work()
        self._owner.note_thread()
        key = (group.group_name, dst, tag)
        channel = self._to.get(key)
        if channel is None:
            channel = self._to[key] = Channel(key[0], self._rank, _global_rank(group, dst), tag)
            self._routes[channel] = (original, group, dst)
        (tensor,) = tensors
        number = self._counts.send(channel)
        repetition = self._repetition
        if self.helps:
            return torch_works.finished_work()
        if repetition.is_on and self._compares:
            repetition.check_sent(channel, number, self.iteration, tensor)
        if self._owner.meter is not None:
            self._owner.meter.sent(channel.destination, tensor.numel() * tensor.element_size())
        if channel.destination in self.unlogged:
            self._keep_sent(channel, number, tensor)
        else:
            self.log_sent(channel, number, tensor)
        if repetition.is_over(channel.destination):
            if self._counts.is_waited_for(channel, number):
                # If it is cut its receiver will ask for it in the next generation.
                with contextlib.suppress(RuntimeError):
                    self.again.append(self.send_again(channel, tensor.detach().clone()))
            return torch_works.finished_work()
        if self._counts.is_had(channel, number):
            return torch_works.finished_work()
        try:
            inner = original(group, tensors, dst, tag)
            return inner if inner is None else Send(self._owner, inner)  # None: only its batch has a work
        except Exception as error:
            cut = error
        try:
            self._owner.stay(cut)  # by now it is under way: it is in the log
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

    @contextlib.contextmanager
    def peeking(self, unread: Collection[int] = ()) -> Iterator[None]:
        """Inside, of an iteration that is repeated, messages come as they will come once more after it, and none is
        sent. *unread*: where memory begins that nobody reads inside, by the time that something comes for it, which is
        left out."""
        self._peeks, self._unread, self._peeked = True, unread, {}
        before = self._counts.asked.copy()
        try:
            yield
        finally:
            self._peeks = False
            self._counts.asked = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, of an iteration that is repeated, messages that come are counted, and not looked at."""
        self._counts_only = True
        try:
            yield
        finally:
            self._counts_only = False

    def _check_outside(self) -> None:
        if self._refuses:
            raise CannotReplay(_OUTSIDE)
        if self.is_behind and not (self._in_place.is_inside or self._in_place.is_dry_run):
            self._in_place.give_up(f"iterations cannot be repeated from logs: {_OUTSIDE}")

    def _keep_sent(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        # The script may change it as soon as it is sent.
        self._sent.setdefault(channel, {})[number] = tensor.detach().clone()
        if not self._collectives.are_known and not self._log.incomplete:
            self._log.give_up(_NOBODY_REPEATS, for_good=True)

    def log_sent(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        if self.helps:
            return
        num_bytes = tensor.numel() * tensor.element_size()
        limit, why = transfer.MAX_MESSAGE_BYTES, ""
        if not self._collectives.are_known:
            why = _NOBODY_REPEATS
        elif num_bytes > limit:
            why = f"a message of {num_bytes} bytes is more than the {limit} that can be handed on"
        if why and not self._log.incomplete:
            self._log.give_up(why, for_good=True)
        self._log.append(channel, number, tensor, iteration=self.iteration, generation=self.generation)

    def recv(self, original: Any, group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self.iteration < 0 or self.is_off:
            self._check_outside()
            return original(group, tensors, src, tag)
        self._owner.note_thread()
        key = (group.group_name, src, tag)
        channel = self._from.get(key)
        if channel is None:
            channel = self._from[key] = Channel(key[0], _global_rank(group, src), self._rank, tag)
        (tensor,) = tensors
        number = self._counts.ask(channel)
        if self._repetition.is_on and self._repetition.gives(channel, number):
            if not self._counts_only:
                self._fill(tensor, channel, number)
            if not (self._peeks or self.helps):
                self._received(channel, number, tensor)
            return torch_works.finished_work()
        queue = self.waiting.get(channel)
        if queue is None:
            queue = self.waiting[channel] = deque()
        work = Receive(
            self._owner, queue, lambda: original(group, tensors, src, tag),
            lambda: self._received(channel, number, tensor),
        )  # fmt: skip
        try:
            work.post()
        except Exception as error:
            cut = error
        else:
            if work.inner is not None:
                return work
            # Only its batch has a work, on NCCL: nobody stays in such an iteration, so it is not waited for here.
            queue.pop()
            self._counts.receive(channel)
            return None
        try:
            self._owner.stay(cut)
        finally:
            del cut
        return work

    def _fill(self, tensor: torch.Tensor, channel: Channel, number: int) -> None:
        if self._peeks and tensor.data_ptr() in self._unread:
            return
        was = None if self._peeks else self._peeked.pop((channel, number), None)
        # By the tensor itself: in torch 2.15 a new one, with nothing in it, may begin where that was, and be as old.
        if was is not None and was[0]() is tensor and was[1:] == (tensor.data_ptr(), tensor._version):
            return  # nobody has changed it since
        self._repetition.fill(tensor, channel, number, self.iteration)
        if self._peeks:
            self._peeked[channel, number] = weakref.ref(tensor), tensor.data_ptr(), tensor._version

    def _received(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        self._counts.receive(channel)
        self._digests.add(channel, number, tensor)

    def recv_from_any(self, original: Any, group: Any, tensors: list[torch.Tensor], tag: int) -> Any:
        if self.iteration >= 0 and not self.is_off:
            self.refuse(
                UsageError(
                    "a receive from any source inside an iteration: in which order its messages come is not logged, so "
                    "it could not be repeated. Name the source."
                )
            )
        return original(group, tensors, tag)

    def collective(self, name: str, group: Any, outputs: Outputs, call: Callable[[], Any]) -> Any:
        is_one = self.iteration >= 0 and not self._collectives.is_aside and group.size() > 1
        is_one = is_one and not self._in_place.is_dry_run
        # Those of several threads have no order that could be repeated; those of a backward have that of its graph.
        if not is_one or (threading.get_ident() != self.thread and not torch_autograd.is_in_backward()):
            return call()
        self._collectives.has_any = True
        self.num_collectives += 1
        return self.results.make(name, group, outputs, call)


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)
