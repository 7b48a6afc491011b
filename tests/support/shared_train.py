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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from swift_agent.torch_private import pipelining
from swift_agent.worker.rejoin import helping
from swift_agent.worker.rejoin.shared_steps import SharedSteps
from swift_recovery.errors import CannotReplay
from swift_recovery.replay import team as team_module
from swift_recovery.replay.team import Helper, Hub
from swift_recovery.transfer.socket_link import connected
from tests.support.shared_oddities import LAYERS, SECOND_STAGES, Records, Script, loss_of

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
        self.last: Any = None
        self.seen: list[int] = [0]
        self.generator = torch.Generator().manual_seed(7)
        self.codes = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inputs":
            x.mul_(0.5)
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
        if self.how == "none":
            self.last = x.mean().detach() if self.last is None else self.last * 0.5 + x.mean().detach()
            x = x + self.last
        if self.how == "list":
            self.seen[0] += 1
            x = x * (1 + self.seen[0] / 100)
        if self.how == "generator":
            x = x * torch.rand(x.shape, generator=self.generator)
        if self.how == "parameter":
            self.codes.data.add_(0.01)
            x = x + self.codes
        if self.how == "first of two":
            self.mean.add_(0.01)
            x = x + self.mean
        if self.how == "collective":
            SHARED.num_collectives += 1
        return x


class Twice(nn.Module):
    """One layer, in two parts whose activations are computed again: gradients are added in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


class Images(nn.Module):
    """Its gradients are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, 4 * WIDTH, 3, padding=1)
        self.back = nn.Conv2d(4 * WIDTH, WIDTH, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.layer(x[:, :, None, None].expand(-1, -1, 3, 3))).mean((2, 3))


class Context:
    """Around forwards of a stage, from torch 2.15 on: it draws, and may change by each."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.num_calls = counts, 0

    @contextlib.contextmanager
    def __call__(self, info: Any) -> Iterator[None]:
        torch.rand(1)
        self.num_calls += self.counts
        yield


SHARED = SimpleNamespace(
    iteration=-1, num_collectives=0, peeking=contextlib.nullcontext, counting=contextlib.nullcontext
)  # fmt: skip


def main(orders: dict[str, Any]) -> None:
    index = orders["index"]
    if index in orders.get("strange", ()):  # as on a node with another torch
        on_this = team_module.computes_with
        team_module.computes_with = lambda device=None: on_this(device).replace("torch", "another torch")
    INDEX[0] = index
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    halves = [nn.Sequential(*layers), nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))]
    if orders.get("counting"):
        is_first = orders["counting"] == "inputs"
        halves[0].insert(0 if is_first else len(halves[0]), Counting(orders["counting"]))
    if orders.get("counting") == "first of two":
        halves[0].append(Counting(""))
    if orders.get("twice"):
        halves[0].append(Twice())
    if orders.get("channels_last"):
        halves[0].append(Images())
    odd = orders.get("odd", "")
    if odd in LAYERS:
        halves[0].append(LAYERS[odd](WIDTH))
    if odd in SECOND_STAGES:
        halves[1] = nn.Sequential(SECOND_STAGES[odd](WIDTH))
    if orders.get("ties"):
        halves[1][1].weight = layers[0].weight
    seen: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if orders.get("counting") == "loss":
            seen.append(len(output))
        return nn.functional.mse_loss(output, target) * (1 + len(seen) / 100)

    odd_loss, in_loss = loss_of(odd, index, WIDTH, loss_fn)
    if odd_loss is not loss_fn:
        loss_fn = odd_loss  # type: ignore[assignment]
    kind = getattr(schedules, orders["schedule"])
    cpu = torch.device("cpu")
    if issubclass(kind, schedules.PipelineScheduleMulti):
        stages = [PipelineStage(half, number, 2, cpu) for number, half in enumerate(halves)]
        schedule: Any = kind(stages, MICRO_BATCHES, loss_fn=loss_fn)
    else:
        module: nn.Module = nn.Sequential(*halves)
        module = Records(module) if odd == "object" else module
        schedule = kind(PipelineStage(module, 0, 1, cpu), MICRO_BATCHES, loss_fn=loss_fn)
    if orders.get("context"):
        for stage in pipelining.stages_of(schedule):
            stage.register_forward_context(Context(counts=orders["context"] == "counts"))
    parameters = list({id(one): one for half in halves for one in half.parameters()}.values())
    if in_loss is not None:
        parameters += in_loss.parameters()
    script = Script(odd, [*halves, *([nn.Sequential(in_loss)] if in_loss is not None else [])], parameters, WIDTH)
    optimizer = torch.optim.Adam(parameters, 0.01)
    if orders.get("counting") == "hook":
        parameters[0].register_post_accumulate_grad_hook(lambda parameter: None)
    if orders.get("unfreezes"):
        layers[0].weight.requires_grad_(False)
    if orders.get("wide"):
        optimizer = torch.optim.SGD(parameters, 0.01)
        for one in parameters:
            one.grad_dtype = torch.float64
    if orders.get("counting") == "main_grad":
        main = torch.zeros(WIDTH, WIDTH)
        def add(g: Tensor) -> None:
            main.add_(g)
        layers[0].weight.register_hook(add)
    flat = torch.zeros(sum(one.numel() for one in parameters))
    if orders.get("flat"):
        for one, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            one.grad = part.view_as(one)
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
            SHARED.iteration = iteration + (index in orders.get("ahead", ()))
            if iteration == 1 and index in orders.get("drifts", ()):
                parameters[0].data.mul_(1.001)
            x, y = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)
            if orders.get("unfreezes") and iteration == 2:
                layers[0].weight.requires_grad_(True)
            if orders.get("sets"):
                layers[1].p = 0.3 - iteration / 100
            x, beside = script.begins(iteration, x)
            for _ in range(orders.get("steps", 1)):
                losses: list[Tensor] = []
                try:
                    output = schedule.step(x, target=y, losses=losses, **beside)
                except CannotReplay as error:  # all workers restart
                    Path(orders["out"]).write_text(json.dumps({"cannot": str(error)}))
                    return
                told += [one.item() for one in losses]
                told.append(output.sum().item())
            told += script.ends(x)
            if orders.get("flat"):
                told.append(flat.norm().item())
            if orders.get("clips"):
                nn.utils.clip_grad_norm_(parameters, 0.1)
            if orders.get("counting") == "main_grad":
                layers[0].weight.grad.copy_(main)
                main.zero_()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not orders.get("flat"))
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
    joining = helping.Joining(None, 0, messages, notes.append, lambda: None)  # type: ignore[arg-type]
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
