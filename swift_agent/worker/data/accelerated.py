"""Has Accelerate's `accumulate()` make one update of a group of batches, and decide the same when an iteration is run
again.

It counts its calls, and looks whether its loader is at the end: by then all batches of a group have been taken, a run
that was cut has counted already, and a replacement has not. This module must never import what a script has not.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from swift_agent.worker.data.draws import Draws, Group
from swift_agent.worker.tracked.loop_state import Place


def watch(draws: Draws, place: Place) -> None:
    """From now on, in this process; nothing happens where Accelerate has not been imported."""
    kind: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    original = getattr(kind, "_do_sync", None)
    if original is None:
        return
    original = getattr(original, "_swift_original", original)  # of another job of this process, in tests
    has_counted = False

    @functools.wraps(original)
    def do_sync(accelerator: Any) -> None:
        nonlocal has_counted
        if not draws.is_inside or draws.is_in_section:
            original(accelerator)
            return
        state, begins = accelerator.gradient_state, not has_counted
        has_counted = True

        def decide(number: int, group: Group) -> tuple[int, bool]:
            # With other numbers Accelerate's own count is kept, and what comes of it is told.
            if state.sync_with_dataloader and state.num_steps == group.of > 1:
                step = (number + 1) % group.size
                return step, step == 0
            if begins and place.here.iteration and place.here.batch:
                accelerator.step = place.here.batch - 1  # those before it were its predecessor's
            original(accelerator)
            return accelerator.step, state.sync_gradients

        accelerator.step, syncs = draws.decide(decide)
        state._set_sync_gradients(syncs)
        reduces = not accelerator.use_distributed or state.plugin_kwargs.get("sync_each_batch", False)
        place.leaves = 0 if syncs or reduces or not state.sync_with_dataloader else state.num_steps

    do_sync._swift_original = original  # type: ignore[attr-defined]
    kind._do_sync = do_sync


