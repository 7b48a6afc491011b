"""Knows, at any instant, whether the update of this iteration has been made; through hooks of the optimizers.

With one optimizer an iteration is untouched before its step and complete after it; the fence in front of the step and
the report at the fence make that exact. With several, an iteration may be cut between two steps: unless all are made,
and follow each other without a backward in between (then no peer failure can be noticed between them), the parameters
and state that an earlier step overwrites are kept until the last one is done, or the iteration, so that it can be taken
back. A step that is given a closure is untouched until that has returned (`closures`).

This module must never communicate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from swift_agent.errors import UsageError
from swift_agent.worker.in_place import Alone, InPlace
from swift_agent.worker.line.fence import Fence
from swift_agent.worker.updates import closures
from swift_agent.worker.updates.around_steps import Gradients, Kept, cuda_device, wait_until_reduced
from swift_agent.worker.updates.closures import StepClosure, closure_of, with_closure
from swift_agent.worker.updates.dry_steps import DrySteps


class UpdateTracker:
    """Hooks into *optimizers*; `updated` and `reduced` may be read from any thread.

    *agree*: where ranks hold different parts of the model. Returns, on each rank, only if all have called it: right
    before the update, so that nobody makes one that others cannot make too. Who was cut in it or after it has all its
    gradients, and can still update (`finish_update`). *in_place*: asked when it was cut.
    """

    def __init__(
        self, optimizers: Mapping[str, Optimizer], fence: Fence | None,
        agree: Callable[[], None] | None = None, in_place: InPlace | None = None,
    ) -> None:  # fmt: skip
        self._optimizers = dict(optimizers)
        self._in_place = in_place or Alone()
        self._fence = fence
        self._agree = agree
        self._agreed = self._finishing = self._goes_on = self._is_at_end = False
        self._in_iteration = False
        self._dry = False
        self._stepped: list[str] = []
        self._kept: dict[str, Kept] = {}
        self._gradients = Gradients(self._optimizers)
        self._dry_steps = DrySteps(self._optimizers)
        self.written = self._dry_steps.written
        # Whether a backward follows an optimizer's step before the last step; unknown counts as yes.
        self._apart: dict[str, bool] = {}
        self._in_step = False
        self._running = ""
        self._closing: StepClosure | None = None
        # Whether an optimizer changes parameters before a call of its closure; unknown counts as yes.
        self._within = {name: agree is None and name in self._dry_steps.others for name in optimizers}
        # The usual case has nothing to keep, and must cost next to nothing.
        self._is_simple = (
            len(optimizers) == 1 and agree is None and not any(map(cuda_device, optimizers.values()))
            and not self._dry_steps.others
        )  # fmt: skip
        self._devices = {name: cuda_device(optimizer) for name, optimizer in optimizers.items()}
        self.updated = False
        self.reduced = False
        """The gradients of the iteration are complete, and none of its steps was made."""
        self.mixed = False
        """The iteration was cut between two steps and nothing was kept: this rank's state is of no iteration."""
        self.failed: BaseException | None = None
        """What an optimizer has raised in another thread than the script's."""
        for name, optimizer in self._optimizers.items():
            before, after = self._hooks(name)
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)

    @property
    def num_steps(self) -> int:
        return len(self._stepped)

    @property
    def left_out(self) -> list[str]:
        """Optimizers without a step in this iteration, so far, if another one has made its own."""
        return [name for name in self._optimizers if name not in self._stepped] if self._stepped else []

    @property
    def is_open(self) -> bool:
        """An update is under way, or stands between two steps that cannot be taken back: no report is made before it
        is whole, or cut."""
        return self._in_step

    @property
    def done(self) -> tuple[int, ...]:
        """Parameters, by number, that a half-done update has reached: none, where a step updates all at once."""
        return ()

    @property
    def has_changed_nothing(self) -> bool:
        """In this iteration, so far."""
        return not self._stepped

    @property
    def num_parameters(self) -> int:
        """How many numbers there are for `done`."""
        return 0

    def begin(self, *, dry_run: bool = False) -> None:
        """An iteration begins. *dry_run*: its steps must have no effect."""
        self._in_iteration, self._dry = True, dry_run
        self._agreed = self._goes_on = self._is_at_end = self.reduced = False
        if self._in_step:  # a step failed, and the script has caught that
            self._leave_step()
        self._stepped, self._running, self._closing = [], "", None
        if self._kept:
            self._kept.clear()
        if not dry_run and not self._is_simple:
            self._dry_steps.forget()
        self.updated = False

    def finish(self) -> None:
        """The iteration has ended as it should."""
        if not self._is_simple:
            for name in self._stepped:
                self._apart.setdefault(name, False)
            if self.left_out and self._agree is None:
                self._apart.clear()  # no other step may follow in the next iteration, either
        if self._kept:
            self._kept.clear()
        self._in_iteration, self._dry = False, False
        self.updated = self.reduced = False
        if self._in_step:
            self._leave_step()

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, an iteration is repeated that others have made long ago: its steps count, and ask nobody."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def join_agreement(self) -> None:
        """The iteration ends; the others may wait for who makes no step in it."""
        if self._agree is None or self._stepped:
            return
        if not self._agreed and not self._dry and not self._finishing:
            self._agreed = True
            self._pass_at_end()

    def _pass_at_end(self) -> None:
        """Agree when this iteration changes nothing more: with that it is complete."""
        assert self._agree is not None and self._fence is not None
        # From now on this rank gets to the state after it by itself.
        self.reduced = self._is_at_end = True
        # One way or the other no report is made until this is through.
        self._pass(self._agree, self._wait_for_devices, self._fence.enter_step)
        self.updated, self.reduced = True, False
        self._fence.leave()

    def _wait_for_devices(self) -> None:
        for name in self._optimizers:
            self._wait_for_gradients(name)

    def _pass(self, *barriers: Callable[[], object]) -> bool:
        """Pass them in this order, from the first one again where this process stays in its iteration; False: without
        them, the update is to be made. Raises what has cut them."""
        while True:
            try:
                for barrier in barriers:
                    barrier()
                return True
            except Exception as error:
                cut = error
            try:
                way = self._in_place.after_cut_agreement(cut)
                if way == "update":
                    return False
                if way != "agree":
                    raise cut
            finally:
                del cut  # its traceback has this frame: what the script holds would live on with it

    def finish_update(self) -> None:
        """The iteration was cut when all its gradients were complete: make its steps. With the report's lock held."""
        if not self._is_at_end:
            self._finishing = True
            try:
                for optimizer in self._optimizers.values():
                    optimizer.step()
            finally:
                self._finishing = False
        self.updated, self.reduced = True, False

    def settle(self) -> None:
        """The state here is that of an iteration again; what was kept of a half-done update is let go."""
        self.updated = False

    def cut(self) -> None:
        """The iteration was interrupted: take back the steps of a half-done update. Afterwards `updated` says whether
        this rank holds the state after the iteration, `mixed` whether it holds none."""
        self._dry_steps.end_all()
        begun = [*self._stepped, self._running] if self._running else self._stepped
        if not self._dry and not self.updated:
            for name in begun:
                if name in self._kept:
                    self._kept[name].put_back(self._optimizers[name])
                else:
                    self.mixed = True
            self._dry_steps.forget()
        self._kept.clear()
        self._in_iteration, self._dry = False, False
        self._running = ""
        self._leave_step()  # last: the report is made as soon as no step is under way

    # ---- hooks ----

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is called in every iteration, with cold caches: for the usual case in as few steps as can be."""
        fence = self._fence
        if not self._is_simple or fence is None:
            return lambda _, args, named: self._on_step(name, args, named), lambda *_: self._after(name)

        def before(_: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if self._dry or not self._in_iteration or self._stepped or len(args) > 1 or named:
                return self._on_step(name, args, named)
            if not self._in_step:  # else the class calls the step of another one, which has hooks of its own
                fence.enter_step()
            self._in_step, self._running = True, name
            return None

        def after(*_: Any) -> None:
            if self._dry or self._closing is not None:
                self._after(name)
                return
            self._running = ""
            if self._in_step:
                self._stepped.append(name)
                self.updated, self._in_step = True, False
                fence.leave()

        return before, after

    def _on_step(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A step begins; returns what it is to be called with, None for what it was."""
        self._dry_steps.begin(name, dry=self._dry)
        closure = closure_of(args, named)
        if isinstance(closure, StepClosure):
            return None  # the class calls the step of another one
        if closure is None or self._fence is None or self._finishing or not (self._in_iteration or self._dry):
            self._before(name)
            return None
        optimizer = self._optimizers[name]
        if not self._within[name]:
            begins = functools.partial(self._closed, name)
            self._closing = StepClosure(optimizer, closure, begins, self._in_between(name))
        else:
            if not self._dry:
                self._before(name)
                self._kept[name] = Kept(optimizer, every=True)
            self._closing = StepClosure(optimizer, closure, None, self._in_between(name))
        return with_closure(self._closing, args, named)

    def _closed(self, name: str, closing: StepClosure) -> None:
        """The closure has returned for the first time: the update begins."""
        if closing.is_late:
            self._note_within(name)
        self._before(name)

    def _in_between(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        """How a closure is called with the update begun: it may be cut if what was overwritten is kept."""

        def call(closure: Callable[[], Any]) -> Any:
            if self._dry:
                return closure()
            if name not in self._kept:
                self._note_within(name)
                return closure()
            self._leave_step()
            result = closure()
            self._wait_for_gradients(name)
            assert self._fence is not None
            self._fence.enter_step()
            self._in_step = True
            return result

        return call

    def _note_within(self, name: str) -> None:
        if self._agree is not None:
            raise UsageError(closures.within(name))
        self._within[name] = True  # from the next step on, what it overwrites is kept

    def _check_closed(self, name: str) -> None:
        """A step that was given a closure is over."""
        closing, self._closing = self._closing, None
        if closing is None:
            return
        closing.check(name)
        if closing.is_plain:
            self._within[name] = False

    def _before(self, name: str) -> None:
        if self._finishing:
            return
        if self._dry:
            self._dry_steps.hide(name)
            return
        if not self._in_iteration:
            if self._fence is not None:
                raise UsageError(
                    f"optimizer '{name}' made a step outside a function decorated with @job.iteration: "
                    "such an update could not be recovered. Move the step into the iteration."
                )
            return
        if name in self._stepped:
            raise UsageError(
                f"optimizer '{name}' makes a second step in one iteration. An iteration is one update: "
                "call the @job.iteration function once per step."
            )
        if self._fence is None:
            return
        moved = self._notice_backward(name)
        if moved or not self._in_step:
            self._wait_for_gradients(name)
        if self._agree is not None and not self._agreed:
            self._reach_agreement(name)
        if not self._in_step:
            self._fence.enter_step()
            self._in_step = True
        self._running = name
        if name not in self._kept and self._must_keep(name):  # else the class calls the step of another one
            self._kept[name] = Kept(self._optimizers[name], every=name in self._dry_steps.others)

    def _reach_agreement(self, name: str) -> None:
        """Once in an iteration: before its first step, if no backward follows before the last one, else before that."""
        first, is_last = not self._stepped, len(self._stepped) + 1 == len(self._optimizers)
        if not is_last and not (first and not any(self._apart.get(other, True) for other in self._optimizers)):
            return
        assert self._agree is not None
        self._agreed = True
        self.reduced = first
        assert self._fence is not None
        if not first:
            # Nobody else may count on this update, and with a step under way no plan would come.
            self._agree()
            self._wait_for_gradients(name)
        elif self._devices[name] is not None:
            self._goes_on = self._in_step = not self._pass(self._agree)
            if not self._in_step:
                self._wait_for_gradients(name)
        else:
            # Who is stopped right after it has agreed as well.
            self._goes_on = not self._pass(self._agree, self._fence.enter_step)
            self._in_step = True

    def _after(self, name: str) -> None:
        self._dry_steps.end(name, dry=self._dry)
        if self._finishing:
            return
        self._check_closed(name)
        if self._dry:
            self._dry_steps.unhide()
            return
        self._running = ""
        if name not in self._stepped:  # else its class has called the step of another one
            self._stepped.append(name)
        if len(self._stepped) == len(self._optimizers):
            self.updated = True
        self.reduced = False
        if self._fence is not None:
            self._gradients.note(other for other in self._optimizers if other not in self._stepped)
            # An update that cannot be taken back is not open to a report, or to the fence, before it is whole.
            if self.updated or (not self._goes_on and all(step in self._kept for step in self._stepped)):
                self._leave_step()

    def _leave_step(self) -> None:
        if self._in_step and self._fence is not None:
            self._in_step = False
            self._fence.leave()

    def _must_keep(self, name: str) -> bool:
        if len(self._optimizers) == 1 or len(self._stepped) + 1 == len(self._optimizers):
            return False
        return self._apart.get(name, True)

    def _notice_backward(self, name: str) -> bool:
        """Gradients that moved since the last step mean that a backward, which may be cut, lies between the steps."""
        if self._stepped and self._gradients.have_moved(name):
            self._apart.update(dict.fromkeys(self._stepped, True))
            return True
        return False

    def _wait_for_gradients(self, name: str) -> None:
        device = self._devices[name]
        if device is not None:
            assert self._fence is not None
            wait_until_reduced(device, self._fence)
