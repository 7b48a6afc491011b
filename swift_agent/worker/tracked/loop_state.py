"""Where one worker stands in the training loop, and what small state it keeps in case an iteration is cut.

The main thread moves it; the supervisor's thread reads it for a report, and `rejoin` moves it to where another rank
stands. What a report reads changes only under the lock, or between the supervisor's `enter` and `leave`. This module
must never communicate.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, replace
from typing import Any, Literal

from torch import Tensor

from swift_agent import native
from swift_agent.errors import SwiftError
from swift_agent.worker.tracked import others
from swift_agent.worker.tracked.given_state import GivenState
from swift_agent.worker.tracked.position import Position, Units
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.planning.reports import RankReport, Status
from swift_recovery.state.sharded import local_of
from swift_recovery.state.snapshots.by_hand import copies_of, put_back
from swift_recovery.state.snapshots.snapshot import Snapshot, put_gradients


class Place:
    """One per worker. *lock* is the supervisor's: it guards *status*, *inside*, *owed* and the counts of *here*, but
    where `Supervisor.enter` does.

    *here*: where the loop is. *target*: where a replacement has to get to; *later*: the same, when it has come to the
    end of the last loop of epochs before that. *dry_iterations*, *dry_sections*: a replacement holds the state before
    that iteration, its script is still before it; what comes earlier runs without effect, and what is small comes into
    force when the script gets there. *repeats*: a replacement has not come to an iteration of its own yet;
    *replays_before*: it repeats those before that one from logs; *replays_alone*: and needs nobody for it;
    *restored_sections*: so many are in the checkpoint that it began with. *units*: of the batches of *here*;
    *target_units*: of those of *target*, which may be those of a job of another size. *drawn*: so many batches have
    been handed out since the point was kept, and no iteration has used them yet: a replacement gets them again.
    *local_result*: since the last point, the collective of a section that the others had finished: this rank has its
    own values only. *passed*: a replacement has arrived in a loop without a loader, this is where its loader is.
    *is_before_epoch*: it is in an epoch before that of *target*, or before its loop, and what it does there has been
    counted. *carries*: why this script's replacements cannot go on as their predecessors would have, empty if that is
    not known; *remakes*: but can once the iteration before has been run once more (`remade`), which is due before the
    next one if *has_to_remake*; *remaking*: the one that runs now for that; *has_to_fit*: and has to be given what it
    was given at first; *lacks*: the checkpoint that all have begun with does not have what is carried. *began*: the
    generation in which all began, rank 0's, the same on all ranks. *has_recovered*: this process, once.
    *gradients_differ*: replicas begin the next iteration with gradients that are not the same, which do no harm if it
    clears them first. *leaves*: a library has said that the call which runs leaves its update, with gradients of this
    rank only, and makes one of so many batches; 0: none has. *changing*: numbers that loaders, samplers and streams of
    the script keep from pass to pass, as far as this process has seen, or was told. *begun*: which step has begun last
    ("iteration", "section" or "barrier" with the way to it), and after how many iterations and sections;
    *begun_by_others*: of the rank that gave a replacement its state, until it comes there.
    """

    def __init__(self, rank: int, seeds: Seeds, lock: threading.RLock) -> None:
        self.rank, self.seeds, self.lock = rank, seeds, lock
        self.status: Status = "fresh"
        self.inside: Literal["", "iteration", "section"] = ""
        self.has_points = True
        """False while something runs as a whole that no other rank runs now: nothing in it is a point, at which this
        process could join the others."""
        self.here = Position()
        self.target: Position | None = None
        self.later: Position | None = None
        self.owed: others.Owed | None = None
        self.dry_iterations = 0
        self.repeats = False
        self.replays_before = 0
        self.replays_alone = True
        self.dry_sections = 0
        self.restored_sections = 0
        self.tracked: Tracked | None = None
        self.units = Units()
        self.target_units = Units()
        self.drawn = 0
        self.passed: Position | None = None
        self.is_before_epoch = False
        self.carries = ""
        self.remakes = self.has_to_remake = self.has_to_fit = self.lacks = self.has_recovered = False
        self.remaking: int | None = None
        self.is_past_section = False
        """Inside a section that the others have finished, which is run for its result."""
        self.local_result = ""
        self.began = 0
        self.gradients_differ = False
        self.dry_run: int | None = None
        """The number of an iteration that is run for its result only, and is counted already."""
        self.leaves = 0
        self.changing: set[str] = set()
        self.begun: tuple[str, int, int] = ("", 0, 0)
        self.begun_by_others: tuple[str, int, int] | None = None
        self._point_at = astuple(Position())
        self._point_units = Units()
        self._catch_up: Mapping[str, Any] | None = None
        self._arrived: list[tuple[Tensor, Tensor]] = []
        self._given: GivenState | None = None
        self._moved = False  # an iteration or section has begun since the last point, and `start` is its snapshot

    def can_remake(self) -> bool:
        """Whether an iteration can be run once more for what it leaves in the script's variables: it is all that the
        loop's body needs, and draws no batch of a loader that is positioned."""
        tracked = self.tracked
        if tracked is None:
            return False
        is_plain = tracked.messages is None and tracked.pipelines is None and not tracked.has_shards_alone
        return is_plain and not (self.here.passes or self.here.batch or self.drawn)

    def hold(self, tracked: Tracked) -> None:
        """The loop begins: from here on there is state to keep."""
        self.tracked = tracked
        library = native.load()
        watch = library.Watch if library else None
        self.point = Snapshot(tracked.state, watch)
        self.start = Snapshot(tracked.state, watch, by_hand=True, modes=True)
        tracked.structure.snapshots = (self.point, self.start)
        self._keeps_generators = self.seeds.keeps_generators
        for optimizer in tracked.state.optimizers.values() if self.start.by_hand else ():
            optimizer.register_step_post_hook(self.start.by_hand.note_step)

    # ---- snapshots ----

    def keep_point(self) -> None:
        """User code is between two steps. Not while an iteration is owed: who owes holds the state before it, so a
        replacement that gets this must begin before it as well. Nor while batches wait: it must get those."""
        if self.drawn:
            return
        if self._keeps_generators or not self.point.is_current():
            self.point.take(rng=self._keeps_generators)
        here = self.here
        # Not a `Position`: to make one takes longer, and this is done in every iteration.
        self._point_at = (
            here.iteration, here.epoch, here.passes, here.batch, here.sections, here.epoch_passes, here.epoch_sections,
            here.is_told, here.peeks, here.loop, here.is_end,
        )  # fmt: skip
        self._point_units = self.units
        self._moved = False

    def put_back_arrived(self) -> None:
        """A replacement's parameters are again what it was given, whatever its script, which is still before that, has
        done."""
        if self._arrived:
            put_back(self._arrived)
            self.start.by_hand.settle()

    def _have_arrived(self, *, all_of_them: bool = False, from_checkpoint: bool = False) -> None:
        """Parameters have their values from another rank: nothing that the script has done."""
        assert self.tracked is not None
        self.start.by_hand.settle()
        if self._catch_up is not None:
            state = self.tracked.state
            all_of_them = all_of_them or len(self._arrived) == len(state.parameters())
            kept = map(local_of, state.parameters()) if all_of_them else state.loose_parameters()
            self._arrived = copies_of(list(kept))
        is_between = self.is_before_epoch and self.target is not None and (self.target.loop or 0) > 1
        if from_checkpoint or is_between or self._given is not None:
            self._given = GivenState(self.tracked.state)  # it may begin parts of a model again, as the others have

    def carry_gradients(self) -> None:
        """An iteration has left gradients without an update: what is kept does not have them."""
        self.point.forget()
        self.start.forget()

    @property
    def carried(self) -> int:
        """See `TrainingState`; of where the others are, also if this replacement's script has not come there."""
        assert self.tracked is not None
        carried: int = self.tracked.state.carried if self._catch_up is None else self._catch_up.get("carried", 0)
        return carried

    def keep_start(self) -> None:
        """An iteration or section begins. A replacement has caught up here."""
        if self.owed is not None:
            return
        if self._catch_up is not None:
            self.put_back_arrived()
            self._arrived = []
            self.start.install(self._catch_up, rng=self._keeps_generators)
            self._catch_up = self.begun_by_others = None
        if self._given is not None and self.here.iteration > self.dry_iterations:
            self._given = None  # it goes through its data by itself, and comes to no point
        if self._keeps_generators or not self.start.is_current():
            self.start.take(rng=self._keeps_generators)
        self._moved = True

    # ---- the loop ----

    @property
    def is_before_loop(self) -> bool:
        """A replacement has not come to the loop of epochs of its point."""
        return self.target is not None and (self.target.loop or 0) > (self.here.loop or 0)

    def arrive(self, *, in_no_loader: bool = False) -> None:
        """A replacement has reached the point at which it joined: from here on it is like the others."""
        assert self.target is not None
        self.here.iteration = self.target.iteration
        self.here.passes = self.target.passes
        # Those among the batches that are skipped are not called again; others it may have made after that point.
        self.here.sections = max(self.here.sections, self.target.sections)
        self.here.peeks = self.target.peeks
        self.is_before_epoch = False
        self.passed, self.target = self.target if in_no_loader and self.target.batch else None, None
        if self._given is not None:
            self._given.put_back()
            self.start.by_hand.settle()
            self._given = None
        self.point.restore()  # what the script has done on its way to small things is done in it already

    @property
    def is_behind(self) -> bool:
        """A replacement has come to its point, and the others have begun an iteration or section since: what its script
        does until it begins that, too, they have behind them."""
        return self._catch_up is not None

    def is_elsewhere(self, what: str) -> bool:
        """A replacement begins *what*, and the others have begun another step after as many iterations and sections."""
        others = self.begun_by_others
        return others is not None and others[0] != what and others[1:] == (self.here.iteration, self.here.sections)

    def enter(self, what: Literal["iteration", "section"]) -> None:
        self.inside = what

    def leave(self) -> None:
        with self.lock:
            self.inside = ""

    @contextlib.contextmanager
    def without_points(self) -> Iterator[None]:
        """See `has_points`."""
        before, self.has_points = self.has_points, False
        try:
            yield
        finally:
            self.has_points = before

    # ---- between ranks ----

    def offer(self) -> dict[str, Any]:
        """What goes to a replacement besides parameters and optimizer state; for `take_over`, through the codec.

        *start* is what is small where an iteration or section began, if that differs from the point.
        """
        start = self._catch_up
        if start is None and self._moved:
            start = self.start.tree()
        position, units = asdict(Position(*self._point_at)), asdict(self._point_units)
        offered: dict[str, Any] = {"position": position, "units": units, "point": self.point.tree(), "start": start}
        offered |= {"common_seed": self.seeds.common, "began": self.began}
        offered |= {"carries": self.carries, "remakes": self.remakes}
        offered["changing"] = sorted(self.changing)
        # A replacement that has not come to where they are passes on what it was told.
        offered["begun"] = list(self.begun if self._catch_up is None else self.begun_by_others or ("", 0, 0))
        assert self.tracked is not None
        return offered | self.tracked.offer()

    def take_over(self, offer: Mapping[str, Any], iteration: int, *, from_checkpoint: bool = False) -> None:
        """The state of another rank before *iteration* has arrived: continue from its point. A replacement also takes
        its place in the loop.
        """
        assert self.tracked is not None
        if not from_checkpoint:
            self.tracked.count_on(offer)
        self.tracked.objects.take(offer.get("objects", ()))
        target, start = Position(**{"loop": None} | offer["position"]), offer["start"]
        target.peeks = tuple(target.peeks)
        self.seeds.common = offer.get("common_seed", self.seeds.common)
        if not from_checkpoint:
            self.carries, self.began = offer.get("carries", ""), offer.get("began", 0)
            self.remakes = offer.get("remakes", False)
            self.changing |= set(offer.get("changing", ()))
        else:
            self.has_to_remake = self.lacks = bool(offer.get("carries")) and iteration > 0
            self.remakes = self.lacks and bool(offer.get("remakes"))
        rng = self.seeds.keeps_generators
        self.point.install(offer["point"], rng=rng)
        with self.lock:
            self.tracked.settle()
            if self.status == "empty":
                self.here = target.begun_again()
                self.is_before_epoch = target.is_told or bool(target.loop)
                self.target, self.target_units = target, Units(**offer["units"])
                self.tracked.give_first_steps(offer.get("pipelines", {}))
                self.dry_iterations, self._catch_up = iteration, start
                what, iterations, sections = offer.get("begun", ("", 0, 0))
                is_told = start is not None and what and not from_checkpoint
                self.begun_by_others = (what, iterations, sections) if is_told else None
            elif start is not None:
                self.start.install(start, rng=rng)
            self._point_at, self._point_units = astuple(target), Units(**offer["units"])
            self.status = "holding"
        self._have_arrived(all_of_them=iteration > target.iteration, from_checkpoint=from_checkpoint)

    def begin_with(self, offer: Mapping[str, Any], iteration: int, *, repeats: bool) -> None:
        """The checkpoint of the state before *iteration* has been loaded. *repeats*: what comes after it has yet to be
        repeated, see `begin_replay`; until that begins nothing is held."""
        with self.lock:
            self.status = "empty"
            self.take_over(offer, iteration, from_checkpoint=True)
            if not repeats:
                assert self.tracked is not None
                self.tracked.make_first_steps()  # all stages are new, and tell each other
            else:
                self.status = "empty"
                self.restored_sections = self.here.sections if self.target is None else self.target.sections

    def begin_replay(self, iteration: int, alone: bool) -> None:
        """A replacement has the logs to repeat all iterations before *iteration*; if it does that *alone* they may
        still be on their way."""
        with self.lock:
            self.status = "holding"
            self.repeats, self.replays_before, self.replays_alone = True, iteration, alone

    @property
    def replays(self) -> bool:
        """The next iteration is one that is repeated from logs."""
        return self.here.iteration < self.replays_before

    def roll_forward(self, iteration: int, install: Callable[[], Any]) -> None:
        """A survivor that owes the update before *iteration* gets it by *install*, which has all of it at hand, but
        keeps what its own script has done to small things, where that has nothing to do with the update (an average of
        the weights has). No report is made while it is half in place."""
        assert self.tracked is not None
        if self.owed is None or self.owed.iteration + 1 != iteration:
            here = self.here.iteration
            raise SwiftError(f"rank {self.rank} stands at iteration {here} and cannot skip to {iteration}")
        mine, tracked = self.tracked.script_side(), self.tracked
        mine.take()
        dry_run, now = self.owed.dry_run, others.held(tracked.state.others)
        with self.lock:
            offer = install()
            trees, same_place = others.trees_of(offer, iteration, self.here)
            updated = dry_run.of_replica(now, tracked.apart, same_place=same_place)
            mine.replace_others({name: trees[name] for name in updated.intersection(trees)})
            mine.restore(buffers=False)
            self._carry(offer)
            self.here.iteration = iteration
            self.owed = None
            self.tracked.settle()
        self._have_arrived()
        # The point is before the update: a replacement that gets it makes a dry run of the iteration, and catches up.
        self.keep_start()

    def _carry(self, offer: Mapping[str, Any] | None) -> None:
        """The gradients with which another rank goes on that has been through the iteration which is owed here."""
        assert self.tracked is not None
        tree = (offer["start"] or offer["point"]) if offer else {}
        self.tracked.state.carried = tree.get("carried", 0)
        if self.tracked.state.carried:
            put_gradients(self.tracked.state.parameters(), tree["gradients"])
            self.carry_gradients()

    def adopt(self, install: Callable[[], Any]) -> None:
        """A survivor gets the state of another one before the same iteration, by *install*, in the place of its own;
        what its own script has done to small things stays."""
        assert self.tracked is not None
        mine = self.tracked.script_side()
        mine.take()
        with self.lock:
            install()
            mine.restore(buffers=False)
            self.tracked.settle()
        self._have_arrived()

    def next_iteration(self) -> int:
        """The first iteration that this rank has not begun; called by the supervisor's thread with the lock held."""
        return self.here.iteration + (self.inside == "iteration")

    def report(self) -> dict[str, Any]:
        """What this rank holds; called by the supervisor's thread with the lock held, after the fence is up."""
        tracked, status, iteration, lacks = self.tracked, self.status, self.here.iteration, ""
        if tracked is not None and status == "holding":
            if tracked.updates.mixed:
                status = "empty"
                lacks = f"had begun update {iteration}, which may not be whole, and cannot take it back"
            elif self.inside == "iteration" and tracked.updates.updated:
                iteration += 1
            iteration = max(iteration, self.dry_iterations)
            if self.replays:
                # With all that it needs it gets there, even if others are lost. Together with others it may not.
                gets_there = self.replays_alone and tracked.messages is not None and not tracked.messages.is_lost
                status, iteration = ("holding", self.replays_before) if gets_there else ("empty", 0)
                lacks = "" if gets_there else "were repeating iterations from logs"
        report = RankReport(self.rank, status, iteration, self.here.sections, lacks=lacks)
        if tracked is not None:
            updates, holds = tracked.updates, status == "holding"
            report = replace(
                report,
                replicas=tuple(tracked.replicas),
                updated=updates.done if holds else (),
                num_parameters=updates.num_parameters,
                reduced=holds and self.inside == "iteration" and self.owed is None and updates.reduced,
                logs=tracked.messages is not None and tracked.messages.is_complete,
                unlogged=tuple(sorted(tracked.messages.unlogged)) if tracked.messages is not None else (),
                checkpoint=tracked.checkpoints.newest if tracked.checkpoints is not None else 0,
                unwinds=tracked.unwinds if holds and self.inside == "iteration" and not self.replays else "",
            )
        return report.to_json()
