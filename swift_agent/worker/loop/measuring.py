"""What this rank costs: a few of its first iterations, timed and counted, are told to the agent, and once more with
what a checkpoint costs, when there is one.

It costs two readings of the clock for an iteration, and two for a message, until it is over. In each generation all
ranks begin again: some may have been through when a failure came, and others not. It must never change what it
measures.
"""

from __future__ import annotations

import shutil
import statistics
import time

import torch

from swift_agent.torch_private import groups
from swift_agent.wire import messages as msg
from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.messages.operations import Meter
from swift_agent.worker.tracked.tracked import Tracked
from swift_logging_store.log.rate import Rate
from swift_recovery.checkpoint.writer import Cost
from swift_recovery.strategy.measured import RankMeasured
from swift_recovery.strategy.sentences import size_of

# The first ones make buffers, connect and compile.
SKIPPED = 3
NUM_MEASURED = 5


class Measuring:
    """Of one process, from its first iteration on."""

    def __init__(self, rank: int, supervisor: Supervisor, tracked: Tracked, kept_in: str = "") -> None:
        """*kept_in*: where the state will be kept when the job changes its size, '' if it does not."""
        self._rank, self._supervisor, self._tracked = rank, supervisor, tracked
        self._kept_in = kept_in
        self._on_cpu = all(one.device.type == "cpu" for one in tracked.state.parameters())
        self._reset(0)

    def _reset(self, generation: int) -> None:
        self._generation, self._num_begun, self._is_over, self._has_told_all = generation, 0, False, False
        self._began_s, self._waited_before_s, self._computed_before_s = 0.0, 0.0, 0.0
        self._over_s, self._over_at = 0.0, 0
        self._iterations_s: list[float] = []
        self._computations_s: list[float] = []
        self._meter = Meter()
        self._count(None)

    def begin(self) -> None:
        """An iteration begins."""
        if self._supervisor.generation != self._generation:
            self._reset(self._supervisor.generation)
        elif self._is_over:
            self._num_begun += 1
            if not self._has_told_all and self._knows_all():
                self._tell()
            return
        now_s = time.perf_counter()
        self._num_begun += 1
        if self._num_begun <= SKIPPED:
            return
        if self._num_begun > SKIPPED + 1:
            self._iterations_s.append(now_s - self._began_s)
            if len(self._iterations_s) == NUM_MEASURED:
                self._is_over, self._over_s, self._over_at = True, now_s, self._num_begun
                self._count(None)
                self._tell()
                return
        else:
            self._count(self._meter)
        self._began_s, self._waited_before_s = now_s, self._meter.waited_s
        self._computed_before_s = time.thread_time()

    def finish(self) -> None:
        """The iteration counts."""
        if self._num_begun > SKIPPED and not self._is_over:
            waited_s = self._meter.waited_s - self._waited_before_s
            computed_s = time.perf_counter() - self._began_s - waited_s
            if self._on_cpu:
                # Others may have had the core; they have less to do while this rank repeats iterations.
                computed_s = min(computed_s, time.thread_time() - self._computed_before_s)
            self._computations_s.append(max(0.0, computed_s))

    def _count(self, meter: Meter | None) -> None:
        if self._tracked.messages is not None:
            self._tracked.messages.meter = meter

    def _knows_all(self) -> bool:
        """Also what comes later than the iterations: a checkpoint, and copies of logs, which begin with one."""
        checkpoints, messages = self._tracked.checkpoints, self._tracked.messages
        num_checkpoints = len(checkpoints.costs) if checkpoints is not None else 0
        copied = messages.log.copied if messages is not None else None
        return num_checkpoints > 1 or (num_checkpoints == 1 and (copied is None or copied.num_bytes > 0))

    def _tell(self) -> None:
        tracked, meter = self._tracked, self._meter
        checkpoints, messages = tracked.checkpoints, tracked.messages
        self._has_told_all = self._knows_all()
        cost = checkpoints.costs[-1] if checkpoints is not None and checkpoints.costs else Cost(0, 0.0, 0.0)
        written = messages.log.written if messages is not None else Rate()
        copied = messages.log.copied if messages is not None else None
        measured = RankMeasured(
            rank=self._rank,
            iteration_s=self._iteration_s(),
            computation_s=statistics.median(self._computations_s[:NUM_MEASURED]),
            state_bytes=self._state_bytes(),
            replicas=tuple(tracked.replicas),
            sent_bytes={rank: num_bytes // NUM_MEASURED for rank, num_bytes in meter.sent_bytes.items()},
            num_messages=max(meter.num_sent.values(), default=0) // NUM_MEASURED,
            checkpoint_every=checkpoints.every if checkpoints is not None else 0,
            logs=messages is not None and messages.is_complete,
            sees_waits=messages is None or not groups.has_nccl(),
            log_written=(written.num_bytes, written.seconds),
            log_copied=(copied.num_bytes, copied.seconds) if copied is not None else (0, 0.0),
            checkpoint_written=(cost.num_bytes, cost.written_s),
            checkpoint_still_s=cost.still_s,
            is_all=self._has_told_all,
            gradient_bytes=self._gradient_bytes(),
            micro_batches=tracked.pipelines.micro_batches if tracked.pipelines is not None else 0,
        )
        self._supervisor.send(msg.Measured(self._generation, measured.to_json()))
        if self._kept_in and (why := _no_room(self._kept_in, measured.state_bytes)):
            self._supervisor.note(why)
            self._kept_in = ""  # said once

    def _iteration_s(self) -> float:
        """While the first ones run, standbys are being made on the same node: later ones may take less."""
        first_s, num_since = statistics.median(self._iterations_s), self._num_begun - self._over_at
        if num_since < NUM_MEASURED:
            return first_s
        return min(first_s, (time.perf_counter() - self._over_s) / num_since)

    def _state_bytes(self) -> int:
        # Not by `collect`: that calls `state_dict` of the script's own objects, for which nothing has failed yet.
        state = self._tracked.state
        buffers = [buffer for model in state.models.values() for buffer in model.buffers()]
        return sum(map(_bytes_of, (*state.replicated_tensors(), *buffers)))

    def _gradient_bytes(self) -> int:
        models = self._tracked.state.models.values()
        return sum(_bytes_of(one) for model in models for one in model.parameters() if one.requires_grad)


def kept_in(told: WorkerEnvironment) -> str:
    """Where one worker of this node keeps the state when the job changes its size; '' of others, and of other jobs."""
    # `Go.kept` says it when it comes to that.
    return told.directory if told.sizes and told.speaks_for_node else ""


def _no_room(directory: str, num_bytes: int) -> str:
    """For a state of *num_bytes*; '' if there is room, or nobody can tell."""
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free_bytes >= num_bytes:
        return ""
    return (
        f"{directory} has room for {size_of(free_bytes)}, and {size_of(num_bytes)} of state are kept there when the "
        "job changes its size: give TMPDIR more room, on one node at least"
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
