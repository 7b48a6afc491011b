"""Logs and messages in a recovery: a rank that repeats iterations gets what it was sent, and all others wait for it.

    has logs:  offer them --> serve ------------------------------> wait --> go on where each other stands
    repeats:   load a checkpoint, take logs --> joins, repeats --> end -'
    helps:     load a checkpoint, take logs --> repeats, with the one that repeats --> its process ends

Where no iteration is repeated there is only the last step: who stays in an iteration is sent what was under way. This
module must never decide who repeats what; that is the plan's.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.torch_private.ddp import Layout
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.line.go import Go
from swift_agent.worker.messages.messages import Messages
from swift_agent.worker.rejoin.helping import Gathering, Joining
from swift_agent.worker.rejoin.waits import Waits
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_logging_store.errors import LogError
from swift_recovery.checkpoint.writer import CheckpointError
from swift_recovery.errors import CannotReplay, CutReplay, StateError
from swift_recovery.planning.plan import Plan
from swift_recovery.replay import serving
from swift_recovery.replay.parallel import SUMS, Sum
from swift_recovery.replay.source import Connect

_POLL_S = 0.005


class Replays:
    """One object per worker; in each recovery `exchange`, `go_on` and `wait`, in this order, once groups are rebuilt.
    """

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked, device: torch.device,
        waits: Waits,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._device, self._waits = device, waits
        self._gathering: Gathering | None = None  # of a replacement that is helped
        self._joining: Joining | None = None  # of a helper
        self._stays = False  # those whose messages this replacement has taken
        self._restored = 0  # the checkpoint that this replacement began with
        self._layouts: list[Layout | None] = []  # of DDP's buckets, at that
        self._log_server = serving.LogServer(supervisor.note)

    def exchange(self, go: Go) -> None:
        """Logs go from who has them to who repeats iterations, beside all that follows."""
        messages, plan = self._tracked.messages, go.plan
        if not plan.replays:
            return
        assert messages is not None
        if self._place.rank in plan.replays:
            self._repeat(go, messages)
        else:
            self._offer(go, messages)

    def help(self, go: Go, store: StoreClient) -> None:
        """This process has nothing else to do but to repeat iterations together with the replacement of its rank. It
        ends with the last of them, or as soon as it is of no use."""
        messages, plan, place = self._tracked.messages, go.plan, self._place
        if messages is None:
            os._exit(0)
        joining = self._joining = Joining(store, place.rank, messages, self._supervisor.note, self._supervisor.check)
        with joining.leaving():
            if self._take(plan, messages, store) == plan.iteration:
                joining.leave()
        joining.join(self._tracked.state.parameters(), self._device)
        place.dry_sections = max(place.dry_sections, plan.sections)
        with joining.leaving():
            messages.begin_replay(plan.replays)
        place.begin_replay(plan.iteration, alone=True)

    def _offer(self, go: Go, messages: Messages) -> None:
        place, store, plan = self._place, self._groups.store, go.plan
        if place.replays:
            raise CannotReplay(f"rank {place.rank} has not yet sent again all that it is asked for")
        try:
            for rank in plan.replays:
                # Who stays in an iteration gives what it has sent in that, too.
                gift = messages.gift(rank, plan.iteration + plan.stays, plan.replays)
                where = self._serve(rank, gift, go.helpers) if gift is not None else ""
                offer = {"beginning": messages.beginnings.to_json(), "where": where}
                PrefixStore(f"log/{rank}", store).set(str(place.rank), json.dumps(offer))
        except (LogError, OSError) as error:
            raise CannotReplay(f"rank {place.rank} cannot read what it has sent: {error}") from None
        # To load a checkpoint may take longer than an operation of the groups has time.
        self._waits.wait_for("loaded", plan.replays, "have not taken checkpoint and logs yet")

    def _serve(self, rank: int, gift: serving.Gift, num_helpers: int) -> str:
        return self._log_server.serve(rank, self._groups.store.local_address, gift, 1 + num_helpers)

    def _repeat(self, go: Go, messages: Messages) -> None:
        place, store, plan = self._place, self._groups.store, go.plan
        if place.here.iteration > self._restored or self._tracked.updates.mixed:
            # It was cut while it repeated them together with others, and cannot begin again.
            raise CutReplay(f"iteration {place.here.iteration - 1} was the last that it had repeated with others")
        if not self._groups.is_native:
            raise CannotReplay("without the compiled library collectives would go unnoticed (swiftctl native build)")
        self._stop_sharing()
        if go.helpers:
            how: Sum = self._supervisor.environment.parallel_sum or SUMS[0]
            self._gathering = Gathering(store.local_address, go.helpers, how, self._supervisor.note, self._device)
            self._gathering.tell(store, place.rank)
        begin = self._take(plan, messages, store)
        is_alone = len(plan.replays) == 1
        if begin == plan.iteration or not is_alone:
            # Or this rank would hold a state, and lack messages of the iteration that was cut; or others who repeat
            # theirs would wait for it in an operation of the groups, which has a timeout.
            messages.wait_taken()
        self._waits.tell("loaded")
        self._waits.wait_for("loaded", plan.replays, "have not taken checkpoint and logs yet")
        messages.begin_replay(plan.replays)
        place.begin_replay(plan.iteration, alone=is_alone)
        self._stays = plan.stays
        if begin == plan.iteration:
            self.end()
        elif self._gathering is not None:
            self._gathering.begin(
                messages, self._tracked.state.parameters(), self._device, lambda: self._supervisor.interrupted
            )

    def _take(self, plan: Plan, messages: Messages, store: StoreClient) -> int:
        """The logs of the others, which come in threads, and a checkpoint; returns its iteration."""
        messages.drop_replay()  # of an attempt that was cut
        place = self._place
        links: dict[int, Connect] = {}
        for rank in set(range(dist.get_world_size())).difference(plan.replays):
            offer = json.loads(PrefixStore(f"log/{place.rank}", store).get(str(rank)))
            messages.beginnings.hear(offer["beginning"])
            if offer["where"]:
                links[rank] = partial(serving.log_of, offer["where"], rank, lambda: self._supervisor.interrupted)
        messages.take(links)  # while a checkpoint is loaded, and iterations are repeated
        begin = self._restore(plan, store)
        messages.beginnings.check(place.rank, has_checkpoint=begin > 0)
        if begin == messages.beginnings.all_began_at:
            self._tracked.make_first_steps()  # those since then are in the logs, or come
        return begin

    def go_on(self, go: Go) -> None:
        """All logs have gone to who repeats iterations, and nothing else is under way: now what was cut goes on."""
        messages, plan, rank = self._tracked.messages, go.plan, self._place.rank
        if messages is None:
            PrefixStore("told", self._groups.store).set(str(rank), "null")
            return
        compared = PrefixStore("digests", self._groups.store)
        if rank not in plan.replays:
            for other in plan.replays:
                compared.set(f"{rank}/{other}", messages.digests(other))  # type: ignore[arg-type]
        else:
            for other in set(range(dist.get_world_size())).difference(plan.replays):
                messages.compare_with(compared.get(f"{other}/{rank}"))
        store = PrefixStore("told", self._groups.store)
        if not plan.stays and not self._place.replays:
            messages.start_over()  # first: this rank does not have what it throws away
        if rank not in plan.replays:
            store.set(str(rank), json.dumps(messages.told(plan.iteration)))
        others = [other for other in range(dist.get_world_size()) if other not in plan.replays and other != rank]
        told = {other: json.loads(store.get(str(other))) for other in others}
        if None in told.values():
            return  # some ranks log nothing, so nobody repeats or stays
        counted = PrefixStore("counted", self._groups.store)
        if (mine := messages.count_by(told.values(), plan.iteration)) is not None:
            counted.set(str(rank), json.dumps(mine))
        told |= {other: json.loads(counted.get(str(other))) for other, tree in told.items() if not tree}
        try:
            messages.rejoin(told, plan.replays, plan.iteration, go.generation)
        except LogError as error:
            raise CannotReplay(f"rank {rank} cannot read what it has sent: {error}") from None

    def wait(self, plan: Plan) -> None:
        """Until all who repeat iterations have done so: not in an operation of the next iteration, which would come to
        its timeout."""
        messages = self._tracked.messages
        if self._place.rank in plan.replays or messages is None:
            return
        self._waits.wait_for("replayed", plan.replays, "repeat iterations")
        for rank in plan.replays:
            sent = PrefixStore("replayed", self._groups.store).get(str(rank))
            messages.follow(json.loads(sent), plan.iteration)

    def end(self) -> None:
        """This replacement has repeated all iterations before that of the others, and tells them; a generation that was
        stopped meanwhile is none of its business. Raises `LostLog`, `CannotReplay`."""
        messages = self._tracked.messages
        assert messages is not None
        if self._joining is not None:
            self._joining.leave()
        self._stop_sharing()
        messages.end_replay(stays=self._stays)
        with contextlib.suppress(RuntimeError):
            PrefixStore("replayed", self._groups.store).set(str(self._place.rank), json.dumps(messages.sent_before()))

    def close(self) -> None:
        """All have what they need."""
        self._log_server.close()

    def _stop_sharing(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def _restore(self, plan: Plan, from_store: StoreClient) -> int:
        """Begin with the newest checkpoint that is not after the plan's iteration; its iteration, 0 if there is none.
        The first of those who repeat says which: all must begin with the same."""
        place, tracked, checkpoints = self._place, self._tracked, self._tracked.checkpoints
        if checkpoints is None:
            return 0
        store = PrefixStore("replay from", from_store)
        if place.rank == plan.replays[0] and self._joining is None:
            try:
                # What others know to count they have begun with, or have seen it come. What is found may be newer, but
                # also what could not be loaded then; or older, where what counts is not seen by all nodes at once.
                begin = plan.checkpoint if plan.checkpoint <= plan.iteration else 0
                if not checkpoints.is_there(begin):
                    begin = max(checkpoints.find(before=plan.iteration + 1), begin)
                store.set("iteration", str(begin))
            except CheckpointError as error:
                raise CannotReplay(str(error)) from None
        while not store.check(["iteration"]):
            self._supervisor.check()
            time.sleep(_POLL_S)
        iteration = int(store.get("iteration"))
        if iteration == self._restored:
            if self._layouts:
                tracked.restore_layouts(self._layouts)
            return iteration  # of an earlier attempt, or there is none
        try:
            extra = checkpoints.load(iteration, tracked.state)
        except (OSError, StateError) as error:
            raise CannotReplay(f"the checkpoint of iteration {iteration} cannot be loaded: {error}") from None
        assert tracked.messages is not None
        tracked.messages.restore(checkpoints.counts or extra["place"].get("messages"), iteration)
        place.begin_with(extra["place"], iteration, repeats=True)
        if len(extra["layouts"]) == len(tracked.keepers):
            # In other buckets the same gradients would have other sums.
            self._layouts = extra["layouts"]
            tracked.restore_layouts(self._layouts)
        self._restored = iteration
        return iteration
