"""The agent's end of the sockets of its workers: which process is at the other end, and what it said.

    connect --> (stranger) --first message names the worker--> bound to a local rank --> closed

The channel of a local rank belongs to the process that the agent has started for it, as the kernel tells, or to one
that this has started: scripts are run by wrappers (a shell, numactl). The first that says hello has it, as long as it
lives; so a child of the script, as of a data loader, cannot take it.

Every message becomes an event of the `machine`, or a call of what `WorkerChannels` is given. Must never start or end a
process, nor wait for a worker: what that does not take is kept for it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable, Mapping
from typing import assert_never

from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.patience import Patience
from swift_agent.agent.processes.linux import descends_from
from swift_agent.agent.processes.workers import WorkerProcess
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import ChannelClosed, Message, WorkerChannel, WorkerListener
from swift_agent.wire.environment import share_of
from swift_agent.wire.vocabulary import NotUnderstood, Vocabulary, written

log = logging.getLogger(__name__)

# Until a peer is known it may say nothing else.
HELLO: Vocabulary[wire.Hello] = Vocabulary(wire.Hello)


class WorkerChannels:
    """Registers its sockets with *selector*, whose keys' data are called when they are readable.

    *processes*: the newest process of each local rank, as of now. *on_event* takes events; *on_modules* a local rank
    and what it has imported; *on_kernels* what all ranks compute with. *why_not*: why the place of this node in a
    generation is not its own, '' if it is.
    """

    def __init__(
        self, directory: str, selector: selectors.BaseSelector, processes: Mapping[int, WorkerProcess],
        patience: Patience, on_event: Callable[[msg.Event], None],
        on_modules: Callable[[int, tuple[str, ...]], None], on_kernels: Callable[[wire.Kernels], None],
        why_not: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._selector, self._processes, self._patience = selector, processes, patience
        self._on_event, self._on_modules, self._on_kernels, self._why_not = on_event, on_modules, on_kernels, why_not
        self._listener = WorkerListener(directory)
        self._channels: dict[int, WorkerChannel] = {}  # by local rank
        self._pids: dict[int, int] = {}
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._is_deaf = False

    @property
    def path(self) -> str:
        """Where workers connect to."""
        return self._listener.path

    def send(self, local_ranks: tuple[int, ...], message: wire.ToWorker, *, may_skip: bool = False) -> None:
        """To those that are connected. A worker that is gone is heard of through its process. *may_skip*: the message
        comes again, and need not be kept for a worker that has not taken what was sent before."""
        said = written(message)
        for local_rank in local_ranks:
            channel = self._channels.get(local_rank)
            if channel is None or (may_skip and channel.stuck_since_s is not None):
                continue
            try:
                channel.post(said)
            except ChannelClosed:
                channel.stop_sending()  # what it said before is heard, then the end of that
            self._watch(local_rank, channel)

    def tick(self, now_s: float, deadline_s: float, paused: bool) -> None:
        """Tell of workers that have taken nothing for *deadline_s*, once each. *paused*: they cannot."""
        if self._is_deaf:
            self._is_deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for local_rank, channel in self._channels.items():
            if channel.stuck_since_s is None:
                continue
            if paused:
                channel.stuck_since_s = now_s
            elif now_s - channel.stuck_since_s >= deadline_s:
                channel.stuck_since_s = now_s
                self._on_event(msg.WorkerDeaf(local_rank, self._pids[local_rank], deadline_s))

    def put_off(self, for_s: float) -> None:
        """Nothing was written to them for so long."""
        for channel in self._channels.values():
            if channel.stuck_since_s is not None:
                channel.stuck_since_s += for_s

    def _watch(self, local_rank: int, channel: WorkerChannel) -> None:
        """Be called when it can be read, and written if something is kept for it."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.stuck_since_s is not None else 0)
        key = self._selector.get_key(channel)
        if key.events != wanted:
            self._selector.modify(channel, wanted, key.data)

    def hear_out(self, local_rank: int) -> None:
        """The process has ended: what it said before counts, though its end be seen first."""
        channel = self._channels.get(local_rank)
        if channel is not None:
            # Not until the end of the channel, which a child of the script may still hold.
            self._hear(local_rank, self._pids[local_rank], channel.receive_rest())
            self.drop(local_rank)

    def drop(self, local_rank: int) -> None:
        channel = self._channels.pop(local_rank, None)
        if channel is not None:
            self._selector.unregister(channel)
            channel.close()

    def drop_all(self) -> None:
        for local_rank in list(self._channels):
            self.drop(local_rank)

    def close(self) -> None:
        """The selector may be closed already."""
        self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def _accept(self) -> None:
        try:
            accepted = self._listener.accept()
        except OSError as error:
            # No descriptors, or no memory: the worker waits in the kernel's queue until the next tick.
            log.warning("a connection of a worker cannot be accepted (%s); trying on", error.strerror or error)
            self._selector.unregister(self._listener)
            self._is_deaf = True
            return
        if accepted is None:
            log.warning("refused a connection from another user")
            return
        channel, pid = accepted
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_stranger(channel, pid))

    def _on_stranger(self, channel: WorkerChannel, peer: int) -> None:
        """The first message of a worker says which one it is; until then nothing else is taken from it."""
        try:
            messages = channel.receive_ready()
            if not messages:
                return  # only a part of it so far
            hello = HELLO.read(messages[0])
        except (ChannelClosed, NotUnderstood):
            self._selector.unregister(channel)
            channel.close()
            return
        self._selector.unregister(channel)
        local_rank, generation = hello.local_rank, hello.generation
        process = self._processes.get(local_rank)
        if process is None or process.generation != generation or process.exit_code is not None:
            log.warning("refused local rank %d of generation %d: not a worker of this agent", local_rank, generation)
            channel.close()
            return
        pid, bound = process.pid, self._channels.get(local_rank)
        if not descends_from(peer, pid) or (bound is not None and bound.is_open()):
            why = "another process has that channel" if descends_from(peer, pid) else "it was not started by that"
            log.warning("refused process %d as local rank %d (process %d): %s", peer, local_rank, pid, why)
            with contextlib.suppress(ChannelClosed):
                channel.post(written(wire.Refused(why)))
            channel.close()
            return
        self.drop(local_rank)
        self._channels[local_rank], self._pids[local_rank] = channel, pid
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_worker(local_rank, channel, pid))
        is_helper = share_of(local_rank) > 0
        self._on_event((msg.HelperWaits if is_helper else msg.HelloReceived)(local_rank, pid))
        self._hear(local_rank, pid, messages[1:])

    def _on_worker(self, local_rank: int, channel: WorkerChannel, pid: int) -> None:
        try:
            channel.flush()
        except ChannelClosed:
            channel.stop_sending()
        self._watch(local_rank, channel)
        try:
            messages = channel.receive_ready()
        except ChannelClosed:
            self.drop(local_rank)  # its death is seen through its pidfd
            return
        self._hear(local_rank, pid, messages)

    def _hear(self, local_rank: int, pid: int, messages: list[Message]) -> None:
        for message in messages:
            try:
                read = wire.TO_AGENT.read(message)
            except NotUnderstood as error:
                log.warning("what local rank %d sent is not understood: %s", local_rank, error)
            else:
                (self._on_helper if share_of(local_rank) else self._on_message)(local_rank, pid, read)

    def _on_helper(self, number: int, pid: int, message: wire.ToAgent) -> None:
        """It has no place in the job: what a worker would say of its own has no meaning."""
        match message:
            case wire.Note(rank, text):
                log.info("rank %d: %s", rank, text)
            case wire.Unfit(why, _):
                self._on_event(msg.HelperUnfit(number, pid, why))
            case wire.AskPlace(asked, _):
                self.send((number,), wire.Place(asked, "a helper has no place in the job"))

    def _on_message(self, local_rank: int, pid: int, message: wire.ToAgent) -> None:
        match message:
            case wire.Report(generation, report):
                self._patience.settled(local_rank)
                self._on_event(msg.ReportReceived(local_rank, pid, generation, report))
            case wire.Holds():
                self._on_event(msg.WorkerHolds(local_rank, pid))
            case wire.Resumed(generation, iteration, phases_s):
                self._on_event(msg.WorkerResumed(local_rank, pid, generation, iteration, phases_s))
            case wire.Measured(generation, measured):
                self._on_event(msg.WorkerMeasured(local_rank, pid, generation, measured))
            case wire.Finished(generation, end):
                self._on_event(msg.WorkerFinished(local_rank, pid, generation, end))
            case wire.Promised(generation, iteration, saves):
                self._on_event(msg.WorkerPromised(local_rank, pid, generation, iteration, saves))
            case wire.Parked(generation):
                self._on_event(msg.WorkerParked(local_rank, pid, generation))
            case wire.Kept(iteration, sections):
                self._on_event(msg.WorkerKept(local_rank, pid, iteration, sections))
            case wire.At(iteration, began_s):
                self._on_event(msg.WorkerAt(local_rank, pid, iteration, began_s))
            case wire.Unfit(why, hopeless):
                self._on_event(msg.WorkerUnfit(local_rank, pid, why, hopeless))
            case wire.Suspect(why):
                log.info("local rank %d: a collective failed: %s", local_rank, why)
                self._patience.suspected(local_rank, time.monotonic())
            case wire.Again(generation, why):
                self._patience.suspected(local_rank, time.monotonic())  # it waits for the next generation
                self._on_event(msg.WorkerApart(local_rank, pid, generation, why))
            case wire.AskPlace(number, generation):
                self.send((local_rank,), wire.Place(number, self._why_not(generation)))
            case wire.Modules(names):
                self._on_modules(local_rank, names)
            case wire.Kernels():
                self._on_kernels(message)
            case wire.Note(rank, text):
                log.info("rank %d: %s", rank, text)
            case wire.Hello():
                log.warning("local rank %d said hello twice", local_rank)
            case _:
                assert_never(message)
