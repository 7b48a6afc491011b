"""Point-to-point messages of iterations: counted, logged by their sender, and served again to a replacement; and
beside them what collectives gave (`results`).

A message is identified by its channel (group, source, destination, tag) and its number there, which a rank that repeats
an iteration counts again from where that began. Where messages are made is `interception`.

While a replacement repeats the iterations of its predecessor, what survivors had sent it comes from their logs, and
what it sends to them is dropped: they have it. It logs again what it sends, so that the next failure finds complete
logs. It begins with what set-up gives, or with a checkpoint: what was sent before the newest one that counts is gone.

Where survivors stay in the middle of the iteration that was cut, the logs reach into that, too: the replacement goes
on with what comes live when they end, and drops what its receivers have. Between survivors, too, all is lost that was
under way: it is sent again from the logs, and receives begin again (`counts`, `operations`).
This module must never decide which rank repeats what, or stays; the plan does.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swift_agent.torch_private import groups
from swift_agent.torch_private import messages as torch_messages
from swift_agent.wire.environment import NO_AGENT, WorkerEnvironment
from swift_agent.worker.in_place import Alone, InPlace
from swift_agent.worker.messages.beginnings import Beginnings
from swift_agent.worker.messages.collective_counts import Collectives
from swift_agent.worker.messages.cpp_messages import Unseen, Ways
from swift_agent.worker.messages.interception import Interception
from swift_agent.worker.messages.log_settings import bytes_for_logs, copied_to, counters
from swift_agent.worker.messages.operations import Meter, waiting
from swift_agent.worker.messages.trees import count_on, from_tree, inventory_of, to_tree, tree_of, tree_of_counts
from swift_logging_store.format.record import Channel
from swift_logging_store.log import transfer
from swift_logging_store.log.digests import Digests
from swift_logging_store.log.log import SentLog
from swift_logging_store.log.predecessor import SentBefore
from swift_recovery.errors import CannotReplay
from swift_recovery.replay.message_counts import Counts, Stand
from swift_recovery.replay.serving import Gift
from swift_recovery.replay.source import Connect, Repetition


class Messages:
    """Of the rank *rank*; its `log` is written below *directory*, which is local to the node. One per process.

    *note* tells people; *check* raises when a recovery is cut; *is_ours*: see `Archive`; *in_place*: asked when one is
    cut; *log_group*: the ranks to which none are logged, asked in each iteration; *is_strict*: see `Interception`.
    """

    def __init__(
        self, rank: int, directory: Path, note: Callable[[str], None], check: Callable[[], object] = lambda: None,
        is_ours: Callable[[], bool] = lambda: True, in_place: InPlace | None = None,
        log_group: Callable[[], frozenset[int]] = frozenset, told: WorkerEnvironment = NO_AGENT, is_strict: bool = True,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._in_place = in_place or Alone()
        self.beginnings = Beginnings()
        self._note, self._check, self._log_group = note, check, log_group
        self._sent_before = SentBefore(directory, rank, told.restart_count)
        self._has_predecessors = True  # for all that is known
        prefix = f"helper-{rank}-" if told.share else self._sent_before.prefix
        self._directory = directory / f"{prefix}{uuid.uuid4().hex[:8]}"
        room, self._counters = bytes_for_logs(told, directory), counters(told)
        self.log = SentLog(rank, self._directory, *room, note, is_ours, copied_to(told, rank))
        self._complete_from = 0
        self.checkpoint = 0
        """The iteration of the newest one that counts: what was sent before it is gone."""
        self._counts = Counts()
        self._digests = Digests()
        self._asked_at: dict[int, dict[Channel, int]] = {}  # by the iteration of a checkpoint that may come to count
        self._repetition = Repetition(self._directory / "taken", self._sent_before, note)
        self._sent_here: dict[Channel, int] = {}  # to this rank, before the plan's iteration, while it repeats others
        self._is_uncounted = False  # it has the state of a replica, and begins to count where the others are
        self.reconnected, self._has_threads = 0, False
        self.meter: Meter | None = None
        """Counts while the job is measured."""
        self._again_before: list[Any] = []  # sent again in the last iteration
        self._collectives, unseen = Collectives(), Unseen()
        self._unseen, self._ways = unseen, Ways(unseen, lambda error: self._its.refuse(error))
        self._its = Interception(
            rank, self, self._in_place, self.log, self._counts, self._digests, self._repetition, self._collectives,
            unseen, told)  # fmt: skip
        self._its.is_strict = is_strict
        self._results = self._its.results
        self._its.install()

    @property
    def is_complete(self) -> bool:
        """Whether a lost neighbour finds here all that it was sent, from a state on that it can begin with."""
        if self.log.incomplete or self._is_uncounted:  # its numbers are not those that others count
            return False
        return 0 < self._complete_from <= self.checkpoint or (self._complete_from == 0 and self._has_begin)

    @property
    def unlogged(self) -> frozenset[int]:
        """The ranks to which nothing is logged, or not since some iteration."""
        return self._its.unlogged

    @property
    def shared(self) -> Interception:
        """For who repeats iterations together with others of the same rank."""
        return self._its

    @property
    def _has_begin(self) -> bool:
        return bool(self.beginnings.origins) or self.checkpoint > 0

    # ---- iterations ----

    def begin(self, iteration: int, generation: int) -> None:
        """An iteration begins; its messages count."""
        its = self._its
        its.iteration, its.generation, its.has_agreed = iteration, generation, False
        its.begin_unlogged(self._log_group())
        self._counts.begin()
        self._collectives.begin()
        self._ways.begin()
        self._results.begin(iteration)

    def end(self) -> None:
        """The iteration, or a section, is over, and counts."""
        self._results.end()  # first: it is of this iteration what they log
        was_iteration, self._its.iteration = self._its.iteration >= 0, -1
        self.log.end_iteration()
        self._counters.tell(self.log.figures)
        if not was_iteration:
            return
        self._its.let_go()
        self._its.end_unlogged()
        self._counts.end()
        self._collectives.end()
        self._ways.end()
        # All that an iteration sends is received in it; it may not be known here yet.
        self._again_before, self._its.again = self._its.again, []
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
        self._its.iteration = -1
        self._its.let_go()
        self._collectives.end()
        self._results.cut()
        self._counts.rewind()
        self._digests.keep_before(self._counts.here)

    # ---- checkpoints ----

    def begin_checkpoint(self, iteration: int) -> None:
        """A checkpoint of the state before *iteration* is taken; `counts` belong to it. A log that was given up begins
        again."""
        self._asked_at[iteration] = self._counts.asked.copy()
        if self.log.begin_checkpoint(iteration):
            self._complete_from = iteration

    def counts(self) -> dict[str, Any]:
        """Of all messages of this rank so far: a process that takes it over goes on counting."""
        return tree_of_counts(self.rank, self._counts)

    def take_over(self, counts: Mapping[str, Any] | None) -> None:
        """This process has the state of its predecessor or of a replica, whose *counts* say nothing here; but not the
        log of what its predecessor had sent."""
        self._is_uncounted = counts is not None and not count_on(self.rank, self._counts, counts)
        if not self.log.incomplete:
            self.log.give_up("this process has taken over a state, without the log of what was sent")

    def restore(self, counts: Mapping[str, Any] | None, iteration: int) -> None:
        """This process begins with that checkpoint; None: it was taken where nothing was logged."""
        count_on(self.rank, self._counts, counts)
        self._complete_from = self.checkpoint = iteration

    def checkpointed(self, iteration: int) -> None:
        """That checkpoint counts: what was sent before it is not needed any more."""
        self.checkpoint = iteration
        self.log.drop(iteration)
        self._digests.keep_from(self._asked_at.get(iteration, {}))
        self._asked_at = {number: asked for number, asked in self._asked_at.items() if number > iteration}

    def close(self) -> None:
        """The end: what was sent is not needed any more."""
        self.log.close()

    def discard(self) -> None:
        """The end of a process that has helped to repeat iterations: nothing of it is left."""
        self._repetition.close()
        self.log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # ---- recovery ----

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

    def begin_replay(self, repeating: Collection[int]) -> None:
        """From the next iteration on messages come from what is taken, but for those of the ranks *repeating*, which
        repeat theirs, too; and are sent to those only. Raises `LostLog` if it is known already that not all comes."""
        # Alone it goes on when others are lost: if the giver is, the link tells.
        self._repetition.begin(repeating, self._check if len(repeating) > 1 else lambda: None)

    @property
    def repeating(self) -> Collection[int]:
        """The ranks that repeat iterations, this one among them."""
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

    def none_between(self) -> contextlib.AbstractContextManager[None]:
        """See `Interception`."""
        return self._its.none_between()

    # ---- staying in the middle of an iteration ----

    def unwinds(self, *, updated: bool = False) -> str:
        """Why this rank cannot stay in the middle of its iteration, or after its update, '' if it can. May be called
        from any thread."""
        if groups.has_nccl():
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
        """In the rest of this iteration."""
        self._collectives.refuse()

    def refusal(self, error: Exception) -> str:
        """In words, if *error* comes from that; else ''."""
        return self._collectives.refusal(error)

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
            self._its.has_agreed = True
            with self._collectives.aside(), waiting(self.meter):
                agree()
            self._its.agreed()

        return agree_aside

    def told(self, iteration: int) -> dict[str, Any] | None:
        """For the `rejoin` of others, with *iteration*. {}: it does not know (`count_by`); None: it counts no more."""
        if self._is_uncounted or self._its.is_off:
            return None if self._its.is_off else {}
        return tree_of(self._counts.told(self._stands(iteration), self._repetition.ends(self._counts.here)))

    def count_by(self, told: Iterable[Mapping[str, Any]], iteration: int) -> dict[str, Any] | None:
        """*told*: by the others, which all begin with *iteration*. A rank with the state of a replica counts on from
        there, and this is what it tells itself; None of any other rank."""
        if not self._is_uncounted:
            return None
        self._is_uncounted = False
        self._counts.set_as_seen(self.rank, [inventory_of(tree) for tree in told if tree])
        return self.told(iteration)

    def _stands(self, iteration: int) -> Stand:
        if self._its.iteration < 0:
            return "begin"
        return "middle" if self._its.iteration == iteration else "end"

    def digests(self, source: int) -> bytes:
        """What that rank, which repeats iterations, has sent here, for its `compare_with`."""
        return self._digests.to_bytes(source)

    def compare_with(self, digests: bytes) -> None:
        """What this rank sends again with what another one has received. Raises `ValueError`."""
        self._repetition.compare_with(digests)

    def rejoin(
        self, told: Mapping[int, Mapping[str, Any]], replays: Collection[int], iteration: int, generation: int
    ) -> None:
        """All are connected again and go on with *iteration*, from where they stand if they can. *told*: by the other
        ranks, but for *replays*, which repeat iterations. Inside `aside`. Raises `LogError`, and `CannotReplay` if
        ranks have counted differently."""
        self._its.generation = generation
        stands = self._stands(iteration)
        others = {rank: inventory_of(tree) for rank, tree in told.items()}
        missing = self._counts.rejoin(stands, others, replays)
        self._sent_here = {}
        for other in others.values():
            self._follow(stands, other.sent)
        kept = self._its.take_unlogged(missing)
        logged = transfer.logged(self.log, missing, self._check)
        self._its.again = [self._its.send_again(*message) for message in (*logged, *kept)]
        self._its.receive_again()
        self.reconnected += 1

    def sent_before(self) -> list[list[Any]]:
        """By this rank, which has repeated all iterations before the plan's, for `follow`."""
        return to_tree(self._counts.sent)

    def follow(self, sent: Iterable[Sequence[Any]], iteration: int) -> None:
        """*sent*: before *iteration*, by a rank that has repeated those. Raises `CannotReplay`."""
        self._follow(self._stands(iteration), from_tree(sent))

    def _follow(self, stands: Stand, sent: Mapping[Channel, int]) -> None:
        mine = {channel: count for channel, count in sent.items() if channel.destination == self.rank}
        if self._repetition.is_whole:
            self._sent_here |= mine  # this rank does not stand there yet
        elif (channel := self._counts.follow(stands, mine)) is not None:
            raise CannotReplay(
                f"ranks {channel.source} and {channel.destination} do not agree how many messages of {channel} there "
                "were before this iteration: what is sent in an iteration must be received in it, and waited for"
            )

    def start_over(self) -> None:
        """All are connected again, and begin the iteration that was cut from its start."""
        self._repetition.close()

    def stay(self, error: Exception) -> None:
        """See `operations.Owner`."""
        # Only the script's own thread can join the others.
        if self._its.iteration < 0 or threading.get_ident() != self._its.thread or not self._in_place.stays(error):
            try:
                raise error
            finally:
                del error  # else its traceback has this frame, and this frame it: tensors of the script live on

    def expect_cut(self, error: Exception) -> None:
        """See `operations.Owner`."""
        if self._its.iteration < 0 or threading.get_ident() != self._its.thread or not self._in_place.was_cut(error):
            try:
                raise error
            finally:
                del error

    def note_thread(self) -> None:
        """See `operations.Owner`."""
        if threading.get_ident() != self._its.thread:
            self._has_threads = True
