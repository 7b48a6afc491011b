"""Private parts of autograd and of optimizers: where a backward is, and a step for some parameters only.

It must never choose the parameters or the moment (that is `worker.updates`), and must never run an optimizer's hooks:
they belong to the step of all parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def is_in_backward() -> bool:
    """Whether the calling thread is one of torch's, that works for a backward while another one waits."""
    is_theirs = isinstance(threading.current_thread(), threading._DummyThread)
    return is_theirs and torch._C._current_graph_task_id() >= 0


def after_backward(action: Callable[[], None]) -> None:
    """In a communication hook: run *action* in this thread when the backward is over, DDP's own end of it included."""
    engine = torch.autograd.Variable._execution_engine
    # DDP queues its end when the last bucket is ready, which is later than now: so ours is queued at the end.
    engine.queue_callback(lambda: engine.queue_callback(action))


def step_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Make the optimizer's step for the parameters of *groups* only, with its own state, without its hooks.

    *groups*: copies of its parameter groups with fewer parameters. Several threads may do so for different parameters.
    """
    hooked = type(optimizer).step
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.param_groups = groups
    getattr(hooked, "__wrapped__", hooked)(part)
