"""The training script of test_pipelines: a transformer in stages, one per rank, with the faults of fault_train's
orders.

"schedule" of the orders names a schedule of torch.distributed.pipelining, or is "ByHand"; with "Halves" after it each
stage is on two ranks (tensor parallelism, by hand too). With "seedless" each process begins with another state, with
"collective" there is an all-reduce in each iteration, "called" by Python or "compiled"; if that is "in a stage" those
of the halves are. "clips" cuts the gradients of all stages to a common norm, where the first and the last one have the
same words, and "tells" all of them what the last one has lost, after the update; with "evaluates" there is an
evaluation in some iterations; with "reports" the last stage sends its losses to the first one, which receives them
after its update, on "thread" in a thread that begins before; "late" sends one after the update; with "section" there is
one of these now and then, which "communicates", has "messages", or neither; "loses_logs" names iterations after which
nothing of a log is left on its node that is in a store; with "counts" each stage counts its calls, so that its steps
are not shared with helpers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import swift_agent as swift
from swift_agent.worker.loop import recovery
from swift_agent.worker.rejoin import rejoin, replays, waits
from tests.support.fault_train import (
    DEVICE,
    DIR,
    ITERATIONS,
    OF,
    ORDERS,
    RANK,
    arm_agreement,
    arm_private_places,
    fault,
    init,
    leave_result,
    now,
    take_checkpoints,
    until_it_counts,
    update,
    wait_for,
)

WIDTH, LENGTH, WORDS, BATCH, MICRO_BATCHES = 16, 6, 20, 16, 8
BY_HAND = {"ByHand": 1, "ByHandHalves": 2}  # ranks of a stage


# Of each stage, in this iteration: where no module has it.
calls: Counter[int] = Counter()


class Block(nn.Module):
    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if is_first else None
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS) if is_last else None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        # A module that counts by itself is not shared with helpers.
        self.calls += bool(ORDERS.get("counts"))
        calls[id(self)] += 1
        if calls[id(self)] % MICRO_BATCHES == 3:
            fault("forward")
        x = self.layer(x)
        if x.requires_grad and calls[id(self)] % MICRO_BATCHES == 5:
            x.register_hook(lambda grad: fault("backward"))
        return x if self.head is None else self.head(x)


class Clipping:
    """Of the gradients of all stages to a common norm. The words of the first stage and those of the last one are the
    same: their gradients are added."""

    def __init__(self, blocks: nn.ModuleList, world_size: int) -> None:
        self._blocks = blocks
        self._group = dist.new_group([0, world_size - 1])
        self._words = [layer.weight for block in blocks for layer in (block.embedding, block.head) if layer is not None]
        for words in self._words:
            nn.init.normal_(words, std=0.3, generator=torch.Generator().manual_seed(5))

    def __call__(self) -> None:
        for words in self._words:
            fault("tying")
            work = dist.all_reduce(words.grad, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                time.sleep(0.0002)
        gradients = [parameter.grad for parameter in self._blocks.parameters()]
        mine = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        fault("clipping")
        squares = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(squares, mine)
        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        fault("clipped")
        scale = (2.0 / (torch.stack(squares).sum().sqrt() + largest)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)


class Copied(torch.autograd.Function):
    """What goes into the parts of a layer: their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Added(torch.autograd.Function):
    """What comes out of them is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        if ORDERS.get("collective") == "in a stage":
            return functional.wait_tensor(functional.all_reduce(x, "sum", group))  # type: ignore[no-any-return]
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class HalfBlock(nn.Module):
    """One of two parts of a stage, on two ranks."""

    def __init__(self, is_first: bool, is_last: bool, pair: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if is_first else None
        self.head = nn.Linear(WIDTH, WORDS) if is_last else None
        torch.manual_seed(RANK)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self._pair = pair

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        self.calls += 1
        if self.calls % MICRO_BATCHES == 3:
            fault("forward")
        x = x + Added.apply(self.out(F.gelu(self.into(Copied.apply(x, self._pair)))), self._pair)
        if self.calls % MICRO_BATCHES == 5:
            x.register_hook(lambda grad: fault("backward"))
        return x if self.head is None else self.head(x)


class ByHand:
    """GPipe with blocking sends and receives, and a tag for each direction; a stage has *width* ranks."""

    def __init__(self, block: nn.Module, rank: int, world_size: int, width: int = 1) -> None:
        self._block, self._rank, self._width = block, rank, width
        self._is_first, self._is_last = rank < width, rank >= world_size - width

    def step(self, x: Tensor | None = None, target: Tensor | None = None, losses: list[Tensor] | None = None) -> None:
        inputs, outputs = [], []
        for number in range(MICRO_BATCHES):
            if x is not None:
                inputs.append(x.chunk(MICRO_BATCHES)[number])
            else:
                received = torch.empty(BATCH // MICRO_BATCHES, LENGTH, WIDTH, device=DEVICE)
                dist.recv(received, self._rank - self._width, tag=1)
                inputs.append(received.requires_grad_())
            outputs.append(self._block(inputs[-1]))
            if not self._is_last:
                dist.send(outputs[-1].detach(), self._rank + self._width, tag=1)
        for number, output in enumerate(outputs):
            if target is not None and losses is not None:
                losses.append(loss_of(output, target.chunk(MICRO_BATCHES)[number]))
                (losses[-1] / MICRO_BATCHES).backward()
            else:
                gradient = torch.empty_like(output)
                work = dist.irecv(gradient, self._rank + self._width, tag=2)
                assert work is not None
                work.wait()
                output.backward(gradient)
            if not self._is_first:
                dist.send(inputs[number].grad, self._rank - self._width, tag=2)  # type: ignore[arg-type]


class Reports:
    """The losses of an iteration go from the last rank to the first one, in two messages."""

    def __init__(self, how: str | None, world_size: int) -> None:
        self._how, self._last = how, world_size - 1
        self._works: list[Any] = []
        self._received: list[Tensor] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._received = [torch.zeros(MICRO_BATCHES // 2) for _ in range(2)]
        if self._how == "thread" and RANK == 0:
            self._error, self._thread = None, threading.Thread(target=self._receive)
            self._thread.start()

    def send(self, losses: list[Tensor]) -> None:
        if self._how is not None and self._last == RANK:
            halves = torch.stack([loss.detach() for loss in losses]).chunk(2)
            self._works = [(dist.isend(half, 0, tag=9), half) for half in halves]

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self) -> list[Tensor]:
        """On the first rank, what it has received, but by a thread: that is not told when it is passed over."""
        for work, _ in self._works:
            work.wait()
        self._works = []
        if self._how == "late" and self._last == RANK:
            dist.isend(torch.zeros(1), 0, tag=9)
        if self._how is None or RANK != 0:
            return []
        if self._how != "thread":
            self._receive()
        self.join()
        if self._error is not None:
            raise self._error
        return [] if self._how == "thread" else list(torch.cat(self._received))

    def _receive(self) -> None:
        try:
            for number, received in enumerate(self._received):
                fault(f"report {number}")
                dist.recv(received, self._last, tag=9)
        except Exception as error:
            self._error = error


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def stages_of(rank: int, world_size: int, name: str) -> list[int]:
    """The indices of a rank's stages: one; two, every *world_size*; or two of a V."""
    if name in BY_HAND or "Halves" in name or not issubclass(getattr(schedules, name), schedules.PipelineScheduleMulti):
        return [rank]
    return [rank, 2 * world_size - 1 - rank] if "ZBV" in name else [rank, rank + world_size]


def lose_log(job: swift.Job) -> None:
    running: Any = job._running
    log = running._begun.tracked.messages.log
    log._writer.roll()
    deadline_s = time.monotonic() + 60.0
    while log._writer._queue or not log._archive.wait(0.01):
        assert time.monotonic() < deadline_s, "not in the store"
    for path in log._directory.glob("*.seg"):
        if path.name in log._archive.stored:
            path.unlink()


def arm_logs() -> None:
    """Places where copies of a log are made and go, and where what a checkpoint covers goes from the node."""
    from swift_logging_store.log import transfer
    from swift_logging_store.log.archive import Archive
    from swift_logging_store.log.log import SentLog
    from swift_logging_store.log.writer import LogWriter

    recovery.TELL_S = ORDERS.get("progress_s", recovery.TELL_S)
    waits.TELL_S = ORDERS.get("waits_s", waits.TELL_S)
    do, drop, delete, drops = Archive._do, SentLog.drop, LogWriter._delete, [False]
    pieces = transfer._pieces
    transfer.PIECE_BYTES = ORDERS.get("piece_bytes", transfer.PIECE_BYTES)

    def slow(*args: Any) -> Any:
        for number, piece in enumerate(pieces(*args)):
            fault("piece", number)
            time.sleep(ORDERS.get("piece_s", 0.0))
            yield piece

    def doing(self: Archive, task: Any) -> None:
        fault(f"log: before {task.kind}")
        do(self, task)
        fault(f"log: after {task.kind}")

    def dropping(self: SentLog, before: int) -> None:
        fault("log: before drop")
        drops[0] = True
        drop(self, before)
        drops[0] = False
        fault("log: after drop")

    def deleting(self: LogWriter, segments: Any) -> int:
        if drops[0]:
            fault("log: in drop")
        return delete(self, segments)

    transfer._pieces = slow
    Archive._do = doing  # type: ignore[method-assign]
    SentLog.drop = dropping  # type: ignore[method-assign]
    LogWriter._delete = deleting  # type: ignore[method-assign]


def arm_helpers() -> None:
    """Places in a repetition that is shared: before a helper joins, in each step, and in what they exchange."""
    from swift_agent.worker.rejoin import helping, shared_steps
    from swift_recovery.replay import team

    def around(owner: Any, name: str, at: str, after: str = "") -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            fault(at)
            result = original(*args, **named)
            if after:
                fault(after)
            return result

        setattr(owner, name, wrapped)

    around(helping.Joining, "join", "joins", "joined")
    around(team.Hub, "gather", "gathers", "gathered")
    around(shared_steps.SharedSteps, "_rehearse", "rehearses", "rehearsed")
    for kind in (helping._HubTeam, helping._HelperTeam):
        around(kind, "meet", "meets")
        around(kind, "exchange", "exchanges", "exchanged")
    around(team, "pass_on", "adds")
    waiting = replays.Replays.wait

    def wait(self: Any, plan: Any) -> None:
        if plan.replays:
            fault("awaits")
            fault("awaits again")
        waiting(self, plan)

    replays.Replays.wait = wait  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    arm_helpers()
    arm_private_places()
    arm_logs()
    arm_agreement()
    if "connect_s" in ORDERS:
        rejoin.CONNECT_TIMEOUT = timedelta(seconds=ORDERS["connect_s"])
    job = init()
    name = ORDERS.get("schedule", "Schedule1F1B")
    indices = stages_of(RANK, job.world_size, name)
    last = len(indices) * job.world_size - 1
    stages = []
    if "Halves" in name:
        indices, last = [RANK // 2], job.world_size // 2 - 1
        pairs = [dist.new_group([first, first + 1]) for first in range(0, job.world_size, 2)]
        columns = [dist.new_group([*range(first, job.world_size, 2)]) for first in range(2)]
    for index in indices:
        if ORDERS.get("seedless"):
            torch.seed()
        else:
            torch.manual_seed(7 + index)
        if "Halves" in name:
            half = HalfBlock(index == 0, index == last, pairs[index])
            if name in BY_HAND:
                stages.append(SimpleNamespace(submod=half))  # type: ignore[arg-type]
            else:
                stages.append(PipelineStage(half, index, last + 1, DEVICE, group=columns[RANK % 2]))
            continue
        stages.append(PipelineStage(Block(index == 0, index == last), index, last + 1, DEVICE))
    blocks = nn.ModuleList(stage.submod for stage in stages)
    blocks.to(DEVICE, getattr(torch, ORDERS.get("dtype", "float32")))
    if name in BY_HAND:
        schedule: Any = ByHand(stages[0].submod, RANK, job.world_size, BY_HAND[name])  # type: ignore[arg-type]
    else:
        kind = getattr(schedules, name.removesuffix("Halves"))
        schedule = kind(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    take_checkpoints(job)
    reports = Reports(ORDERS.get("reports"), job.world_size)
    clip = Clipping(blocks, job.world_size) if ORDERS.get("clips") else None
    if name in BY_HAND:
        job.track(model=blocks, optimizer=optimizer, scheduler=scheduler, replicas=[RANK], log_messages=True)
    else:
        job.track(model=stages, optimizer=optimizer, scheduler=scheduler)
    with open(DIR / f"{OF}calls.{RANK}", "a") as begun, open(DIR / f"{OF}losses.{RANK}", "a") as losses:

        @job.resilient
        def decay() -> float:
            """Inside an iteration it is a part of that: it draws what comes next there."""
            return 0.01 + 0.01 * torch.rand(1).item()

        @job.resilient
        def look() -> float:
            size = blocks[0].layer.linear1.weight.detach().norm()
            if ORDERS.get("section") == "communicates":
                dist.all_reduce(size)
            if ORDERS.get("section") == "messages":
                x = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=DEVICE)
                schedule.eval(*([x] if 0 in indices else []), target=x if last in indices else None, losses=[])
            return size.item()

        @job.iteration
        def train(x: Tensor, y: Tensor) -> list[Tensor]:
            now["iteration"] = job.iteration_number
            print(job.iteration_number, os.getpid(), file=begun, flush=True)
            until_it_counts(job)
            if ORDERS.get("drifts") == [RANK, job.iteration_number]:
                # Not the same in its second process, as with kernels whose sums have no order.
                lives = len((DIR / f"pids.{RANK}").read_text().splitlines())
                with torch.no_grad():
                    blocks[0].layer.linear1.weight.mul_(1.001 if lives == 2 else 1.0)
            x, y = x.to(DEVICE), y.to(DEVICE)
            found: list[Tensor] = []
            calls.clear()
            if ORDERS.get("evaluates") and job.iteration_number % 4 == 2:
                with torch.no_grad():
                    schedule.eval(*([x] if 0 in indices else []), target=y if last in indices else None, losses=[])
            optimizer.zero_grad()
            optimizer.param_groups[0]["weight_decay"] = decay()
            reports.begin()
            try:
                schedule.step(
                    *([x] if 0 in indices else []), target=y if last in indices else None,
                    losses=found if last in indices else None,
                )  # fmt: skip
                if ORDERS.get("collective") == "compiled":
                    functional.wait_tensor(functional.all_reduce(torch.zeros(1), "sum", dist.group.WORLD))
                elif ORDERS.get("collective") == "called":
                    dist.all_reduce(torch.zeros(1))
                if clip is not None:
                    clip()
                reports.send(found)
                update([optimizer])
                scheduler.step()
                if ORDERS.get("tells"):
                    mean = torch.stack(found).mean().detach() if found else torch.zeros(())
                    dist.broadcast(mean, job.world_size - 1)
                    fault("told")
                return found + reports.end()
            finally:
                reports.join()

        for number in job.iterations(ITERATIONS):
            x = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
            found = train(x, (x + 1) % WORDS)
            if "Halves" in name and RANK % 2:
                found = []  # the other half of the stage tells
            print(number, *(loss.item().hex() for loss in found), file=losses, flush=True)
            fault("between", job.iteration_number - 1)
            if number in ORDERS.get("loses_logs", ()):
                lose_log(job)
            if "pace_s" in ORDERS and number > 3:
                wait_for(DIR / "free", ORDERS["pace_s"])
            if "section" in ORDERS and number % 3 == 1:
                size = look()
                optimizer.param_groups[0]["lr"] *= 1 + 0.001 * size  # what it finds counts
    leave_result(job, blocks, [optimizer])


if __name__ == "__main__":
    with open(DIR / f"{OF}pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
