"""Updates that overlap the backward: the parameters of a bucket are updated as soon as its all-reduce is done.

A communication hook of DDP reduces a bucket as DDP itself would; on the thread that learns of its completion the
optimizer's own step runs for the parameters of that bucket (wait-free update, SWIFT section 2.1). `optimizer.step()` of
the script then finds nothing left to do.

So a failure may find some parameters updated and others not. Each is marked when its step has returned, under a fence
that no update passes once the stop was heard: what is reported is what there is.
`swift_recovery.planning.half_done_updates` says how the ranks get from there to one state; what that needs is kept
until the iteration counts: the reduced gradients, which lie in DDP's buckets anyway, and what
`swift_recovery.undo.undo` asks for, or, with *exact*, a copy.

Where ranks hold different parts of the model, those of one part may be through before those of another one are cut. So
the iteration counts, and what it kept is let go, when all ranks have said at its end that their updates are complete:
until then each can go back. (Updates that do not overlap are agreed on before they are made; these have been made.)

On an accelerator the update is launched when the host knows that the reduction is complete (`device_reductions`).

This module must never wait for a peer, but in `join_agreement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swift_agent.errors import PeerFailure, UsageError
from swift_agent.torch_private import autograd as torch_autograd
from swift_agent.worker.in_place import InPlace
from swift_agent.worker.line.fence import Fence
from swift_agent.worker.updates.device_reductions import Reductions
from swift_agent.worker.updates.parts import Member, Resumption, hyper, is_view, tensor_of
from swift_agent.worker.updates.tracker import UpdateTracker
from swift_recovery.state.incoming import Incoming
from swift_recovery.undo.patch import Copy, PatchState, copy_of, put_back
from swift_recovery.undo.undo import Kept, keep, undo


class OverlappedUpdates(UpdateTracker):
    """See the module. *names*: of the parameters, by id. What `overlap_checks` has found nothing against.

    *agree*: where ranks hold different parts of the model, see `UpdateTracker`. `updated` is true from the moment on
    when the last parameter has been updated, or, with *agree*, when all ranks have said so.
    """

    def __init__(
        self, ddps: Sequence[DistributedDataParallel], optimizers: Mapping[str, Optimizer], names: Mapping[int, str],
        fence: Fence | None, agree: Callable[[], None] | None = None, *, exact: bool,
        in_place: InPlace | None = None,
    ) -> None:  # fmt: skip
        super().__init__(optimizers, fence, agree, in_place)
        self._exact = exact
        self.members = [
            Member(names[id(parameter)], name, number, parameter)
            for name, optimizer in optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        # By the models: a group that was made of a set has another order on each rank.
        order = {one: number for number, one in enumerate(names)}
        self.members.sort(key=lambda member: order[id(member.parameter)])
        self._numbers = {id(member.parameter): number for number, member in enumerate(self.members)}
        self._attempt = 0
        self._done: set[int] = set()
        self._reduced: dict[int, Tensor] = {}
        self._before_update: dict[int, Kept | Copy] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._hyper: dict[str, list[dict[str, Any]]] = {}
        self._resumption = self._expected = Resumption()
        device = next((d for d in self._devices.values() if d is not None), None)
        self._reductions = None if device is None else Reductions(device, self._is_stopped)
        for ddp in ddps:
            # DDP reads annotations, and takes none for the right ones.
            ddp.register_comm_hook(ddp, lambda ddp, bucket: self._reduce(ddp, bucket))

    # ---- around the iteration, in the main thread ----

    def begin(self, *, dry_run: bool = False) -> None:
        super().begin(dry_run=dry_run)
        if not dry_run:
            self._attempt += 1
            super().settle()
            self._forget()
            self._done.update(self._resumption.numbers)

    def finish(self) -> None:
        left_out = {self.members[number].optimizer for number in self._done} - set(self._stepped)
        if left_out and not self._dry:
            raise UsageError(
                f"the backward has made the update (overlap_update=True), but the iteration called no step() of "
                f"{' and '.join(sorted(left_out))}. It cannot be left out: track without overlap_update to decide "
                "after the backward."
            )
        super().finish()
        self._expected = Resumption()
        self.settle()

    def join_agreement(self) -> None:
        """The iteration ends: return when the updates of all ranks are complete."""
        if self._agree is not None and not self._dry:
            self._pass_at_end()

    def cut(self) -> None:
        self._expected = Resumption()
        if self._fence is not None:
            with self._fence.changed:
                self._attempt += 1  # what was reduced too late must not be updated any more
            self._fence.wait_updates()
        self._wait_for_device()
        if self.updated:
            self._forget()
        elif not self._dry:
            # The buckets may be written to from now on, by a backward without communication.
            self._reduced = {number: gradient.clone() for number, gradient in self._reduced.items()}
        self._stepped.clear()  # these have changed nothing
        super().cut()

    def settle(self) -> None:
        super().settle()
        self._forget()
        self.resume()

    def expect(self, resumption: Resumption) -> None:
        """The state that is about to come is one to go on from in that way; see `resume`."""
        self._expected = resumption

    def resume(self) -> None:
        """The state that was to come is here; part of an update may be in it."""
        self._resumption = self._expected
        self._done.update(self._resumption.numbers)

    @property
    def _is_complete(self) -> bool:
        return len(self._done) == len(self.members)

    def _is_stopped(self) -> bool:
        return self._fence is not None and self._fence.interrupted

    def _wait_for_device(self) -> None:
        """Updates are launched on streams of their own; what was kept was made there, and goes back there."""
        if self._reductions is not None:
            self._reductions.wait_for_device()

    def _forget(self) -> None:
        self._hyper.clear()
        self._versions.clear()
        self._done.clear()
        self._reduced.clear()
        self._before_update.clear()

    # ---- recovery ----

    @property
    def done(self) -> tuple[int, ...]:
        return () if self.updated else tuple(sorted(self._done))

    @property
    def has_changed_nothing(self) -> bool:
        return not self._stepped and not self._done

    @property
    def num_parameters(self) -> int:
        return len(self.members)

    def take_back(self, numbers: Iterable[int]) -> str:
        """Undo the update of these parameters, those of them that have it; says which and how exactly, for people.

        Each is done and no longer marked, or not: this may be cut, and called again.
        """
        assert self._fence is not None
        undone, restored = [], []
        for number in numbers:
            member = self.members[number]
            optimizer = self._optimizers[member.optimizer]
            with self._fence.fence:
                if number not in self._done or number in self._resumption.numbers:
                    continue  # of what was resumed nothing is kept: it stays
                kept = self._before_update[number]
                if isinstance(kept, Kept):
                    undo(optimizer, member.parameter, self._reduced[number], kept)
                    undone.append(member.name)
                else:
                    put_back(optimizer, member.parameter, kept)
                    restored.append(member.name)
                self._done.discard(number)
        self._wait_for_device()
        parts = []
        if undone:
            parts.append(f"undone, within the rounding of a step: {', '.join(undone)}")
        if restored:
            parts.append(f"put back from copies, bit for bit: {', '.join(restored)}")
        return "; ".join(parts)

    def patch_of(self, numbers: Iterable[int]) -> PatchState:
        """These parameters and their state, to be sent or received."""
        members = [self.members[number] for number in numbers]
        return PatchState([(self._optimizers[member.optimizer], member.parameter) for member in members])

    def install(self, numbers: Sequence[int], incoming: Incoming, *, updated: bool) -> None:
        """Commit a patch of these parameters; *updated*: to their state after the update, of which a later plan may
        want the one before again."""
        assert self._fence is not None
        with self._fence.fence:
            if updated:
                for number in numbers:
                    member = self.members[number]
                    self._before_update[number] = copy_of(self._optimizers[member.optimizer], member.parameter)
            incoming.commit()
            (self._done.update if updated else self._done.difference_update)(numbers)

    # ---- hooks of the optimizers ----

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        return lambda _, args, named: self._on_step(name, args, named), lambda *_: self._after(name)

    def _before(self, name: str) -> None:
        if self._dry or not self._in_iteration or name in self._stepped:
            super()._before(name)
            return
        self._check_used(name)
        # A parameter without a gradient is skipped by every optimizer.
        self._dry_steps.hide(name)

    def _after(self, name: str) -> None:
        self._dry_steps.unhide()
        if not self._dry:
            self._stepped.append(name)

    def _check_used(self, name: str) -> None:
        """The script must not have come between the reduction and the step."""
        late = "overlap_update has made the update in the backward already. Track without it, or"
        optimizer = self._optimizers[name]
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            number = self._numbers.get(id(parameter))
            if number is None:
                raise UsageError(
                    f"optimizer '{name}' has a parameter, with a gradient, that was not there or was frozen when the "
                    "first iteration began: with overlap_update it would never be updated."
                )
            path = self.members[number].name
            if number not in self._done:
                raise UsageError(
                    f"optimizer '{name}': {path} has a gradient that DDP has not reduced in this iteration; "
                    "with overlap_update the last backward before the step must be one that is not under no_sync()."
                )
            if self._versions.get(number) != (id(parameter.grad), parameter.grad._version):
                raise UsageError(
                    f"the gradient of {path} was changed between backward and {name}.step() (clipping? scale_grads of "
                    f"a pipeline's schedule?), but {late} change gradients by hooks of the parameters."
                )
        if name in self._hyper and [hyper(group) for group in optimizer.param_groups] != self._hyper[name]:
            raise UsageError(
                f"hyper-parameters of '{name}' were changed between backward and step(), but {late} call "
                "scheduler.step() after optimizer.step()."
            )

    def _end_backward(self, numbers: Sequence[int]) -> None:
        """The script goes on: remember what the gradients look like, for `_check_used`, and if the update may be taken
        back yet, keep them from what the script may do to DDP's buckets."""
        for number in numbers:
            gradient = self.members[number].parameter.grad
            reduced = self._reduced.get(number)
            if reduced is not None and not self.updated and (not self._is_complete or is_view(gradient, reduced)):
                self._reduced[number] = reduced.clone()
            if gradient is not None:
                self._versions[number] = (id(gradient), gradient._version)

    # ---- buckets: the hook in the thread of the backward, the update where the reduction's end is heard ----

    def _reduce(self, ddp: DistributedDataParallel, bucket: Any) -> torch.futures.Future[Tensor]:
        group, buffer = ddp.process_group, bucket.buffer()
        # As DDP does without a hook, to the bit (for views as long as the gradient is one from the start).
        if ddp.gradient_as_bucket_view:
            buffer.div_(group.size())
        else:
            buffer.mul_(1.0 / group.size())
        resumption = self._resumption
        if resumption.num_silent and self._in_iteration and not self._dry:
            if resumption.is_silent:
                buffer.zero_()
            buffer.mul_(group.size() / (group.size() - resumption.num_silent))
        work = dist.all_reduce(buffer, group=group, async_op=True)
        future = work.get_future() if self._reductions is None else self._reductions.future_of(work, buffer)
        if self._dry or not self._in_iteration:
            return future.then(tensor_of)
        attempt, parameters, gradients = self._attempt, bucket.parameters(), bucket.gradients()
        numbers = [self._numbers[id(parameter)] for parameter in parameters if id(parameter) in self._numbers]
        if again := (self._done - resumption.numbers).intersection(numbers):
            raise UsageError(
                f"a second backward reduces the gradient of {self.members[min(again)].name} in one iteration, but "
                "overlap_update has made the update after the first: put all but the last under model.no_sync()."
            )
        torch_autograd.after_backward(lambda: self._end_backward(numbers))
        pairs = [
            (self._numbers[id(parameter)], gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if id(parameter) in self._numbers and self._numbers[id(parameter)] not in resumption.numbers
        ]
        return future.then(lambda done: self._update(attempt, pairs, done))

    def _update(self, attempt: int, pairs: Sequence[tuple[int, Tensor]], future: Any) -> Tensor:
        reduced = tensor_of(future)  # raises if the reduction has failed
        fence = self._fence
        with contextlib.nullcontext() if self._reductions is None else self._reductions.launching():
            if fence is None:
                self._step(pairs)
                return reduced
            if not fence.begin_update():
                raise PeerFailure("stopped before an update")
            try:
                if attempt == self._attempt:
                    self._step(pairs)
            finally:
                fence.end_update()
        return reduced

    @torch.no_grad()
    def _step(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        """Update these parameters, each with the step of its optimizer."""
        by_optimizer: dict[str, list[tuple[int, Tensor]]] = {}
        for number, gradient in pairs:
            by_optimizer.setdefault(self.members[number].optimizer, []).append((number, gradient))
        for name, part in by_optimizer.items():
            optimizer = self._optimizers[name]
            if name not in self._hyper:
                self._hyper[name] = [hyper(group) for group in optimizer.param_groups]
            if self._fence is not None:
                for number, gradient in part:
                    self._reduced[number] = gradient
                    self._before_update[number] = self._keep(name, self.members[number])
            try:
                self._step_of(optimizer, part)
            except BaseException as error:
                # Nobody knows how far it has come.
                self.failed, self.mixed = error, True
                raise
            self._done.update(number for number, _ in part)
        if self._agree is None and self._is_complete:
            self.updated = True

    def _step_of(self, optimizer: Optimizer, part: Sequence[tuple[int, Tensor]]) -> None:
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
        hidden = []
        for number, gradient in part:
            member = self.members[number]
            hidden.append((member.parameter, member.parameter.grad))
            groups[member.group]["params"].append(member.parameter)
            member.parameter.grad = gradient
        try:
            torch_autograd.step_groups(optimizer, groups)
        finally:
            for parameter, gradient_before in hidden:
                parameter.grad = gradient_before

    def _keep(self, name: str, member: Member) -> Kept | Copy:
        optimizer = self._optimizers[name]
        if self._exact:
            return copy_of(optimizer, member.parameter)
        return keep(optimizer, optimizer.param_groups[member.group], member.parameter)
