"""The objects that a script has named with `job.track()`, and what the session has to do with them around an iteration.

Everything about how a state is described and copied is in `swift_recovery`; everything about DDP's inside is in
`swift_agent.worker.tracked.ddp_buckets`. This module must never communicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swift_agent.errors import UsageError
from swift_agent.torch_private import ddp as torch_ddp
from swift_agent.torch_private import fsdp as torch_fsdp
from swift_agent.torch_private import groups, pipelining
from swift_agent.wire.environment import NO_AGENT
from swift_agent.worker.groups import transfer
from swift_agent.worker.in_place import InPlace
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.messages.cpp_messages import ways_past
from swift_agent.worker.messages.messages import Messages
from swift_agent.worker.tracked import ddp_buckets
from swift_agent.worker.tracked.named import Pending, check, ddps_of
from swift_agent.worker.tracked.object_results import ObjectResults
from swift_agent.worker.tracked.pipeline_steps import Pipelines
from swift_agent.worker.tracked.refusals.first_steps import FirstSteps
from swift_agent.worker.tracked.structure import Structure
from swift_agent.worker.updates import left_behind, overlapped, touched
from swift_agent.worker.updates.around_steps import told_of_left_out
from swift_agent.worker.updates.carried import CarriedGradients, GradientWatch
from swift_agent.worker.updates.touched import ChangedWithoutStep, TouchedParameters
from swift_agent.worker.updates.tracker import UpdateTracker
from swift_recovery.checkpoint.writer import Checkpoints, Settings
from swift_recovery.state.checksum import checksum
from swift_recovery.state.sharded import is_sharded, local_of, replicas_of
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Tracked:
    """All that is tracked, from the first iteration on. *replicas*: global ranks that hold the same parameters."""

    def __init__(
        self, pending: Pending, replicas: Sequence[int] | None, world_size: int, supervisor: Supervisor | None,
        *, overlap_update: bool = False, exact: bool = False, stage_of: int | None = None,
        logs: Path | None = None, rank: int = 0, checkpoints: Settings | None = None,
        in_place: InPlace | None = None, lost_together: Collection[int] = (), always_logs: bool = False,
    ) -> None:  # fmt: skip
        """*stage_of*: the rank, if what is tracked is a stage of a pipeline, which nobody else holds unless it says so.
        *logs*: where its messages are logged, if no rank of another node has the same part of the model, or it
        *always_logs*. *checkpoints*: if and where they are taken. *in_place*: asked when a peer fails in the middle of
        an iteration. *lost_together*: the ranks of this node, () if there is no other node."""
        check(pending, overlap_update=overlap_update, replicas=replicas)
        self.state = TrainingState(pending["models"], pending["optimizers"], pending["others"])
        ddps, optimizers = ddps_of(pending), pending["optimizers"]
        has_shards = any(map(is_sharded, self.state.parameters()))
        if replicas is None and stage_of is not None and not ddps and not has_shards:
            replicas = [stage_of]
        self.replicas: list[int] = _replica_set(ddps, self.state.parameters(), replicas, world_size)
        self.differed_after = 0
        """So many iterations after which replicas were seen to differ, before anything had failed; 0: they were not."""
        self.computes = ""
        """With what this rank computes (`swift_recovery.replay.kernels`), once the loop has begun."""
        self.rounded = False
        """Replicas were seen to differ because they do not compute alike."""
        self.apart: frozenset[str] = frozenset()
        """Objects of the script's own that were seen to have another state on other replicas."""
        self.apart_is_told = False
        self.objects = ObjectResults(world_size)
        self.has_shards_alone = has_shards and len(self.replicas) == 1
        """The model is sharded, and no other rank holds what this one does."""
        told = supervisor.environment if supervisor is not None else NO_AGENT
        self.messages: Messages | None = None
        is_logged = always_logs or len(self.replicas) == 1 or set(self.replicas) <= set(lost_together)
        # An update that overlaps the backward is made before the iteration's last messages are sent.
        is_logged = is_logged and len(self.replicas) < world_size and not (has_shards or overlap_update)
        if supervisor is not None and logs is not None and is_logged:
            is_strict = always_logs or len(self.replicas) == 1
            if is_strict and (error := ways_past()):
                raise error
            is_ours = lambda: not supervisor.ask_place(supervisor.generation)  # noqa: E731
            self.messages = Messages(
                rank, logs, supervisor.note, supervisor.check, is_ours, in_place,
                lambda: supervisor.log_group, told, is_strict,
            )  # fmt: skip
        self.pipelines: Pipelines | None = None
        if supervisor is not None and pipelining.has_schedules():
            self.pipelines = Pipelines(in_place, lambda: ddp_buckets.without_reduction(ddps))
        self.checkpoints: Checkpoints | None = None
        if supervisor is not None and checkpoints is not None:
            self.checkpoints = Checkpoints(
                checkpoints, rank, world_size, self.replicas, supervisor.note,
                run="" if told.share else told.run, why_not=supervisor.ask_place,
            )  # fmt: skip
        self._supervisor = supervisor
        several_sets = len(self.replicas) < world_size and (len(self.replicas) > 1 or self.messages is not None)
        if overlap_update and len(self.replicas) == 1 < world_size:
            raise UsageError(
                "job.track(): overlap_update=True needs replicas of what this rank holds: without any, there is no "
                "reduction to overlap with; leave it out."
            )
        agree = transfer.agree if supervisor and several_sets else None
        if agree is not None and self.messages is not None:
            agree = self.messages.agreeing(agree)
        self.updates = (
            overlapped.OverlappedUpdates(
                ddps, optimizers, self.state.parameter_names(), supervisor, agree, exact=exact, in_place=in_place
            )
            if overlap_update
            else UpdateTracker(optimizers, supervisor, agree, in_place)
        )
        if overlap_update:
            pipelining.watch_schedules(lambda schedule, first: ddp_buckets.without_reduction(ddps if first else ()))
        for name, each in optimizers.items():
            _refuse_new_groups(name, each)
        self._sharded = _sharded_roots(pending)
        self._scaled = any(isinstance(other, torch.amp.GradScaler) for other in pending["others"].values())
        self.keepers: list[ddp_buckets.BucketKeeper] = []
        self._carried: CarriedGradients | None = None
        self._left: GradientWatch | None = None
        self._touched: TouchedParameters | None = None
        self._unstepped: ChangedWithoutStep | None = None
        self._first_steps: FirstSteps | None = None
        self._tells = rank == self.replicas[0]
        self.structure = Structure(self.state, supervisor.note if supervisor is not None and self._tells else None)
        self._may_leave_out, self._agrees = len(optimizers) > 1 and not overlap_update, agree is not None
        if supervisor is None:
            return
        self._carried = CarriedGradients(optimizers.values(), self._sharded)
        self._first_steps = FirstSteps(self.state)
        if not overlap_update:
            self._touched = TouchedParameters(optimizers.values())
            self._unstepped = ChangedWithoutStep(optimizers.values())
        for module in ddps:
            try:
                self.keepers.append(ddp_buckets.BucketKeeper(module))
            except ddp_buckets.UnsupportedModule as error:
                raise UsageError(f"job.track(): {error}") from None
            ddp_buckets.sync_buffers_after_forward(module)
        if self._tells and self.pipelines is not None and (apart := ddp_buckets.buffers_apart(ddps)):
            supervisor.note(
                f"in a pipeline DDP does not make {', '.join(apart)} equal on ranks {self.replicas}: a replacement "
                "gets those of another rank (a norm without running statistics has none)"
            )

    @property
    def unwinds(self) -> str:
        """See `RankReport`; of an iteration that is under way."""
        if self.messages is None:
            return ""
        return "have DDP in their stage" if self.keepers else self.messages.unwinds(updated=self.updates.updated)

    def refusal(self, error: Exception) -> str:
        """In words, if *error* comes from a collective that this rank, past its update, was not to make; else ''."""
        return "" if self.messages is None else self.messages.refusal(error)

    def begin(self, iteration: int, *, dry_run: bool = False) -> None:
        """Iteration number *iteration* begins."""
        self.objects.begin("iteration", iteration, dry_run=dry_run)
        for keeper in self.keepers:
            keeper.begin(iteration)
            if dry_run:
                keeper.begin_alone()
        self.updates.begin(dry_run=dry_run)
        if self._carried is not None:
            self._carried.begin(dry_run=dry_run)
        if self._left is not None and not dry_run:
            self._left.start()
        if self._touched is not None:
            self._touched.begin(dry_run=dry_run)
        if self._unstepped is not None:
            self._unstepped.begin(dry_run=dry_run)
        if self.messages is not None and not dry_run:
            assert self._supervisor is not None
            self.messages.begin(iteration, self._supervisor.generation)

    def check_repeatable(self) -> None:
        """An iteration is over, one of the first. Raises `UsageError` for gradients that it has taken over from the one
        before, for an update without a step, and for what an optimizer has made; says it if the script changes what one
        updates."""
        self.structure.end()
        if self._first_steps is not None and not self._first_steps.look():
            self._first_steps = None
        if self._unstepped is not None and self._unstepped.end(updated=self.updates.num_steps > 0):
            if self._unstepped.found:
                raise UsageError(touched.without_step(self.names_of(map(id, self._unstepped.found))))
            self._unstepped = None
        if self._may_leave_out and self.updates.left_out:
            self._may_leave_out = False
            if self._tells and self._supervisor is not None:
                left_out = self.updates.left_out
                stepped = [name for name in self.state.optimizers if name not in left_out]
                self._supervisor.note(told_of_left_out(stepped, left_out, is_kept=not self._agrees))
        if self._carried is not None and self._carried.end(updated=self.updates.num_steps > 0):
            self._carried = None
        if self._touched is not None and self._touched.end(updated=self.updates.num_steps > 0):
            if self._touched.found and self._tells and self._supervisor is not None:
                self._supervisor.note(touched.told(self.names_of(self._touched.found)))
            self._touched = None

    def names_of(self, ids: Iterable[int]) -> list[str]:
        """Of parameters, by id, or the id of the part that is here."""
        names = self.state.parameter_names()
        known = {id(local_of(p)): names[id(p)] for p in self.state.parameters()}
        return sorted(known.get(one, "a part of one") for one in ids)

    def end(self) -> None:
        """The iteration, or a section, is over, and counts."""
        self.objects.end()
        if self.messages is not None:
            self.messages.end()
        if self.pipelines is not None:
            self.pipelines.end()

    def pass_over(self) -> None:
        """The iteration was cut after all that it had to send; it counts, or an update comes that does."""
        if self.messages is not None:
            self.messages.pass_over()
        if self.pipelines is not None:
            self.pipelines.pass_over()

    def rewind(self) -> None:
        """It was cut, and will be run again."""
        if self.messages is not None:
            self.messages.rewind()
        if self.pipelines is not None:
            self.pipelines.rewind()

    def settle(self) -> None:
        """The state here is that of an iteration, whole."""
        self.updates.mixed = False
        self.updates.settle()

    def offer(self) -> dict[str, Any]:
        """What who takes over the state of this rank needs besides: objects, of first steps, and of messages."""
        offered: dict[str, Any] = {"objects": self.objects.offer()}
        if self.pipelines is not None:
            offered["pipelines"] = self.pipelines.offer()
        return offered if self.messages is None else {**offered, "messages": self.messages.counts()}

    def count_on(self, offer: Mapping[str, Any]) -> None:
        """Go on with the messages of the rank that has made this `offer`."""
        if self.messages is not None:
            self.messages.take_over(offer.get("messages"))

    def give_first_steps(self, steps: Mapping[str, Any]) -> None:
        """A replacement's, by an `offer`."""
        if self.pipelines is not None:
            self.pipelines.give(steps)

    def make_first_steps(self) -> None:
        """All stages have begun with this checkpoint, or at iteration 0, and make them together; or they are in logs.
        """
        if self.pipelines is not None:
            self.pipelines.begin_anew()

    def reset_shards(self) -> None:
        """After the groups were stopped, on a survivor: FSDP forgets the iteration that was cut, what it had gathered
        and was reducing; parameters are this rank's parts again."""
        for root in self._sharded:
            torch_fsdp.reset_fsdp(root)

    def layouts_for(self, iteration: int) -> list[torch_ddp.Layout | None]:
        """On a survivor, before `restore_layouts`: the DDP buckets with which *iteration* begins."""
        return [keeper.layout_for(iteration) for keeper in self.keepers]

    def restore_layouts(self, layouts: Sequence[torch_ddp.Layout | None]) -> None:
        """On every rank, after the groups were stopped: get DDP ready for another forward, with these buckets."""
        for keeper, layout in zip(self.keepers, layouts, strict=True):
            keeper.restore(layout)

    def carry_gradients(self, *, may_refuse: bool = True) -> bool:
        """An iteration has ended without an update: the gradients that it has left are a part of the state from now on.
        Whether there are any. Raises `UsageError` for those that no replica can have, if it *may_refuse* them."""
        overlaps = isinstance(self.updates, overlapped.OverlappedUpdates)
        why_not = "overlap_update=True" if overlaps else ""
        self.state.carried = left_behind.digest(
            self.state.parameters(), self._sharded, why_not=why_not, may_refuse=may_refuse
        )
        return self.state.carried != 0

    def watch_gradients(self) -> None:
        """See whether the next iteration adds to the gradients that are carried into it."""
        self._left = GradientWatch(self.state.optimizers.values(), self._sharded)

    def uses_gradients(self) -> bool | None:
        """Whether the iteration that is over, or cut after its update, has done so; None if nobody has looked."""
        watch, self._left = self._left, None
        if watch is None:
            return None
        has_seen = watch.has_seen
        watch.stop()
        return has_seen

    def copy_buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.detach().clone()) for model in self.state.models.values() for buffer in model.buffers()]

    @staticmethod
    def put_buffers(buffers: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for live, saved in buffers:
                live.copy_(saved)

    @contextlib.contextmanager
    def without_reduction(self, *, finite: bool) -> Iterator[None]:
        """Forward and backward of tracked DDP models stay local.

        *finite*: the update was made, so the gradients of all ranks together were finite. A GradScaler has to come to
        the same decision, and gradients of this rank alone say nothing about it: it is shown zeros.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(ddp_buckets.without_reduction(keeper.ddp for keeper in self.keepers))
            stack.enter_context(pipelining.without_last_backward())
            if finite and self._scaled:
                for parameter in self.state.parameters():
                    if parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(_clear_gradient)  # type: ignore[no-untyped-call]
                        stack.callback(hook.remove)
            yield

    def script_side(self) -> Snapshot:
        """A snapshot, still empty, of what only the script changes: not of a GradScaler, which sees all ranks'
        gradients, nor of what a step writes into its groups.
        """
        state = self.state
        others = {n: other for n, other in state.others.items() if not isinstance(other, torch.amp.GradScaler)}
        side = TrainingState(state.models, state.optimizers, others)
        side.carried = state.carried
        return Snapshot(side, modes=True, stays=self.updates.written)

    def checksum(self) -> int:
        return checksum(self.state.replicated_tensors())


def _refuse_new_groups(name: str, optimizer: Optimizer) -> None:
    """From the first point of the loop on: a replacement's set-up makes the groups of the beginning."""

    def add_param_group(group: object) -> NoReturn:
        raise UsageError(
            f"optimizer '{name}' gets another group of parameters while it trains, and a replacement, or a checkpoint, "
            "could not have it. Make all groups in the set-up, with lr=0 or with frozen parameters (requires_grad_()), "
            "and give those a learning rate when they are to be trained"
        )

    optimizer.add_param_group = add_param_group  # type: ignore[assignment,method-assign]


def _clear_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.detach().zero_()


def _sharded_roots(pending: Pending) -> list[FSDPModule]:
    """The outermost modules that `fully_shard` was applied to."""
    roots: list[FSDPModule] = []
    below: set[int] = set()
    for model in pending["models"].values():
        for module in model.modules():  # parents first
            if torch_fsdp.is_fsdp(module) and id(module) not in below:
                roots.append(module)
                below |= {id(child) for child in nn.Module.modules(module)}  # type: ignore[arg-type]
    return roots


def _replica_set(
    ddps: list[DistributedDataParallel], parameters: Sequence[Any], given: Sequence[int] | None, world_size: int
) -> list[int]:
    """Global ranks that hold the same as this one: of a DDP module those of its group, with whatever shards it has;
    of other sharded parameters those along the replicated dimensions of their mesh."""
    if given is not None:
        return sorted(given)
    ranks = set(range(world_size))
    for module in ddps:
        ranks &= set(groups.global_ranks(module.process_group))
    in_ddp = {id(parameter) for module in ddps for parameter in module.parameters()}
    known: dict[Any, list[int]] = {}
    for parameter in parameters:
        if is_sharded(parameter) and id(parameter) not in in_ddp:
            where = (parameter.device_mesh, tuple(parameter.placements))
            if where not in known:
                known[where] = replicas_of(parameter)
            ranks &= set(known[where])
    return sorted(ranks)
