"""The first point of the loop: what the script has named becomes what is tracked, and its inputs are watched from then
on.

This module must never communicate: what ranks have to agree on when the loop begins is `protected`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swift_agent.errors import UsageError
from swift_agent.wire.environment import NO_AGENT, WorkerEnvironment
from swift_agent.wire.given import Given, GivenPage
from swift_agent.worker.data.inputs import Inputs
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.unprotected import Running
from swift_agent.worker.rejoin.witness import Witnesses, witnesses_of
from swift_agent.worker.tracked.named import Named
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.checkpoint.writer import Settings


def tracked(
    named: Named, checkpoints: Settings | None, running: Running, supervisor: Supervisor | None, rank: int,
    world_size: int, *, draws_alone: bool,
) -> Tracked:  # fmt: skip
    """*draws_alone*: each rank has generators of its own. Raises `UsageError` for what cannot be recovered."""
    if not named.pending["models"]:
        raise UsageError(
            "the training loop begins, but nothing is tracked: call job.track(model=..., optimizer=...) first."
        )
    told = supervisor.environment if supervisor else NO_AGENT
    logs = Path(told.message_log) if named.logs_messages and told.message_log else None
    made = Tracked(
        named.pending, named.replicas, world_size, supervisor, overlap_update=named.overlap_update, exact=named.exact,
        stage_of=rank if named.is_stage else None, logs=logs, rank=rank, checkpoints=checkpoints, in_place=running,
        lost_together=_ranks_of_this_node(told), always_logs=named.logs_always,
    )  # fmt: skip
    if told.sizes and len(made.replicas) != world_size:
        raise UsageError(
            f"--nnodes {told.sizes}: the size of a job changes only if all ranks hold replicas of one "
            "state; give one number of nodes, or all ranks to track(replicas=...)."
        )
    if checkpoints is not None and draws_alone and len(made.replicas) > 1:
        raise UsageError(
            "job.checkpoint(): with swift.init(rng='user') each rank has generators of its own, and one rank of a "
            "replica set writes the checkpoint: leave generators to the job (rng='iteration')."
        )
    return made


def _ranks_of_this_node(told: WorkerEnvironment) -> range:
    """() of a job of one node, or one whose nodes come and go."""
    if len(told.nodes) < 2 or told.sizes:
        return range(0)
    first = sum(told.nodes[: told.node])
    return range(first, first + told.nodes[told.node])


def watch_inputs(
    inputs: Inputs, tracked: Tracked, running: Running, told: WorkerEnvironment, note: Callable[[str], None], *,
    is_replacement: bool,
) -> Witnesses:  # fmt: skip
    """Under an agent. What iterations are given is kept for a replacement: on this node, and on others."""
    # In a job of a range of sizes the process before had other data.
    has_sizes, rank, world_size = bool(told.sizes), told.rank, told.world_size
    others = [] if has_sizes else witnesses_of(told.node, told.number, told.nodes)
    if tracked.messages is not None and len(tracked.replicas) == 1:  # a stage without replicas is given messages
        return Witnesses(None, rank, others, world_size, note)
    path = Path(told.directory) / f"given.{rank}"
    page = None
    try:
        page = GivenPage(path, is_replacement=is_replacement and not has_sizes)
    except OSError as error:
        note(f"what iterations are given cannot be kept for a replacement to compare: {error}")
    witnesses = Witnesses(page, rank, others, world_size, note)
    models, optimizers, checks = tracked.state.models, tracked.state.optimizers, running.checks
    say_own = checks.own_data.given if checks is not None else None
    inputs.watch(models.values(), Given(page), witnesses.show, optimizers.values(), say_own)
    return witnesses
