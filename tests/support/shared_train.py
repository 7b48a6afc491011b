"""One of some processes that make the steps of a pipeline of one rank together: for test_shared_steps.

    echo '{"size": ..., "where": FILE, "out": FILE, "faults": {...}, ...}' | python -m tests.support.shared_train

Process 0 is the hub. At the end it writes a digest of all parameters, losses and generators into the file "out".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from swift_agent.worker.rejoin import helping
from swift_agent.worker.rejoin.shared_steps import SharedSteps
from swift_recovery.replay.team import Helper, Hub
from swift_recovery.transfer.socket_link import connected

WIDTH, MICRO_BATCHES, BATCH = 8, 7, 14


# Where nobody looks.
CALLS, INDEX = [0], [0]


def counter() -> Callable[[], None]:
    number = 0

    def count() -> None:
        nonlocal number
        number += 1

    return count


class Counting(nn.Module):
    """What must not be shared: it counts its calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen, self.count = how, [], counter()
        self.cached: Tensor | None = None
        self.num_calls = 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "late":
            CALLS[0] += 1
            self.mean.fill_(INDEX[0] * (CALLS[0] // 12))
        if self.how == "list":
            self.seen.append(x)
        if self.how == "closure":
            self.count()
        if self.how == "cache" and self.cached is None:
            self.cached = torch.ones(())
        if self.how == "attribute":
            self.num_calls += 1
        if self.how == "buffer":
            self.mean.add_(1)
        if self.how == "pair":  # one of two normal numbers is kept
            x = x + torch.randn(3)[0] * 1e-3
        if self.how == "python":
            x = x * random.random()
        if self.how == "collective":
            SHARED.num_collectives += 1
        return x


SHARED = SimpleNamespace(num_collectives=0, peeking=contextlib.nullcontext, counting=contextlib.nullcontext)


def main(orders: dict[str, Any]) -> None:
    index = orders["index"]
    INDEX[0] = index
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    halves = [nn.Sequential(*layers), nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))]
    if orders.get("counting"):
        halves[0].append(Counting(orders["counting"]))
    if orders.get("ties"):
        halves[1][1].weight = halves[0][0].weight
    kind = getattr(schedules, orders["schedule"])
    cpu = torch.device("cpu")
    if issubclass(kind, schedules.PipelineScheduleMulti):
        stages = [PipelineStage(half, number, 2, cpu) for number, half in enumerate(halves)]
        schedule: Any = kind(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    else:
        schedule = kind(PipelineStage(nn.Sequential(*halves), 0, 1, cpu), MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    parameters = list({id(one): one for half in halves for one in half.parameters()}.values())
    optimizer = torch.optim.Adam(parameters, 0.01)
    if orders.get("counting") == "hook":
        parameters[0].register_post_accumulate_grad_hook(lambda parameter: None)
    random.seed(2)
    notes: list[str] = []
    messages: Any = SimpleNamespace(shared=SHARED, discard=lambda: None)
    team = make_team(orders, notes, messages)
    stack = contextlib.ExitStack()
    if team is not None:
        refused = notes.append if index == 0 else lambda why: os._exit(0)
        shared = SharedSteps(team, messages, parameters, cpu, refused)
        stack.enter_context(shared.around())
    told: list[Any] = []
    generator = torch.Generator().manual_seed(5)
    with stack:
        for iteration in range(orders["iterations"]):
            fault(orders, "iteration", iteration)
            x, y = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)
            for _ in range(orders.get("steps", 1)):
                losses: list[Tensor] = []
                output = schedule.step(x, target=y, losses=losses)
                told += [one.item() for one in losses]
                told.append(output.sum().item())
            optimizer.step()
            optimizer.zero_grad()
    if index > 0:
        os._exit(0)
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in parameters))
    digest.update(torch.get_rng_state().numpy().tobytes())
    size_left = team.size if team is not None else 1
    said = {"digest": digest.hexdigest(), "told": told, "notes": notes, "size": size_left, "cpu_s": time.process_time()}
    Path(orders["out"]).write_text(json.dumps(said))


def make_team(orders: dict[str, Any], notes: list[str], messages: Any) -> Any:
    index, size = orders["index"], orders["size"]
    if size == 1:
        return None
    where = Path(orders["where"])
    if index == 0:
        hub = Hub("127.0.0.1", notes.append, orders.get("sum", "ordered"))
        where.with_suffix(".new").write_text(hub.where)
        where.with_suffix(".new").rename(where)
        hub.gather(size - 1, 60.0, lambda: False)
        return wrapped(helping._HubTeam(hub), orders)
    while not where.exists():
        time.sleep(0.01)
    joining = helping.Joining(None, 0, messages, print, lambda: None)  # type: ignore[arg-type]
    hub_link = joining._stack.enter_context(connected(where.read_text(), "hub", lambda: None))
    helper = Helper(hub_link, "127.0.0.1", lambda: None)
    with joining.leaving():
        helper.form()
    team = wrapped(helping._HelperTeam(helper, joining), orders)
    team.keep = joining
    return team


def wrapped(team: Any, orders: dict[str, Any]) -> Any:
    """With faults around what it does."""
    number = -1
    meet, exchange = team.meet, team.exchange

    def faulty_meet() -> None:
        nonlocal number
        number += 1
        fault(orders, "meet", number)
        meet()

    def faulty_exchange(*args: Any) -> Any:
        fault(orders, "exchange", number)
        result = exchange(*args)
        fault(orders, "exchanged", number)
        return result

    team.meet, team.exchange = faulty_meet, faulty_exchange
    return team


def fault(orders: dict[str, Any], at: str, number: int) -> None:
    for one in orders.get("faults", ()):
        if (one["at"], one["number"]) == (at, number):
            os.kill(os.getpid(), signal.SIGSTOP if one.get("stops") else signal.SIGKILL)


def serve() -> None:
    """For each line of orders: that many processes, forks of this one, which has imported torch; then a line with how
    each has ended. Those that stand still when process 0 has ended are killed."""
    for line in sys.stdin:
        orders = json.loads(line)
        faults = orders.pop("faults")
        pids = []
        for index in range(orders["size"]):
            pid = os.fork()
            if pid == 0:
                main({**orders, "index": index, "faults": [faults[str(index)]] if str(index) in faults else []})
                os._exit(0)
            pids.append(pid)
        ends = [os.waitpid(pids[0], 0)[1]]
        for index, pid in enumerate(pids[1:], 1):
            if faults.get(str(index), {}).get("stops"):
                os.kill(pid, signal.SIGKILL)
            ends.append(os.waitpid(pid, 0)[1])
        print(json.dumps([os.waitstatus_to_exitcode(end) for end in ends]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
