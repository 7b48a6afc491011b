"""The training script of test_replicated_stages: a transformer in stages, each on the "width" ranks of a node in DDP,
with the faults of fault_train's orders.

"schedule" names a schedule of torch.distributed.pipelining. Each column of the mesh is a pipeline with data of its own.
"clips" cuts the gradients of all stages to a common norm. With "by_hand" the replicas add up gradients by an all-reduce
of the script's own. "mixed": of three stages on six ranks only the first has its replicas on one node. With "late" the
last stage sends something to the first one after the update, which that receives "from any" rank or from it.
"evaluates" does so after some iterations, "between" them or in a "resilient" section. With "norm" the second stage has
running statistics.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from tests.support import pipeline_train
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

BATCH, LENGTH, WORDS = pipeline_train.BATCH, pipeline_train.LENGTH, pipeline_train.WORDS


def clip(model: nn.Module) -> None:
    """By the norm of all stages, which the ranks of a column tell each other."""
    square = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()
    dist.all_reduce(square)
    fault("clipped")
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((4.0 / square.sqrt()).clamp(max=1.0))


def main() -> None:
    torch.set_num_threads(1)
    pipeline_train.arm_helpers()
    arm_private_places()
    pipeline_train.arm_logs()
    arm_agreement()
    job = init()
    width = ORDERS["width"]
    if ORDERS.get("mixed"):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 4], [3, 5]], mesh_dim_names=("pipe", "data"))
    else:
        mesh = init_device_mesh("cpu", (job.world_size // width, width), mesh_dim_names=("pipe", "data"))
    index, num_stages, column = mesh.get_local_rank("pipe"), mesh.size(0), mesh.get_local_rank("data")
    is_last, by_hand = index == num_stages - 1, bool(ORDERS.get("by_hand"))
    torch.manual_seed(7 + index)
    block = pipeline_train.Block(index == 0, is_last).to(DEVICE)
    if ORDERS.get("norm") and index == 1:
        block = nn.Sequential(block, nn.BatchNorm1d(LENGTH))  # type: ignore[assignment]
    replicas = mesh["data"].get_group()
    # Several buckets, and another layout of them after the first backward.
    net = block if by_hand else DistributedDataParallel(block, process_group=replicas, bucket_cap_mb=0.003)
    stage = PipelineStage(net, index, num_stages, DEVICE, group=mesh["pipe"].get_group())
    kind = getattr(schedules, ORDERS.get("schedule", "Schedule1F1B"))
    overlap = bool(ORDERS.get("overlap"))
    loss_of, num_chunks = pipeline_train.loss_of, pipeline_train.MICRO_BATCHES
    schedule = kind(stage, num_chunks, loss_fn=loss_of, scale_grads=not overlap)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    take_checkpoints(job)
    members = dist.get_process_group_ranks(replicas)
    job.track(
        model=stage, optimizer=optimizer, replicas=members if by_hand else None, log_messages=ORDERS.get("mixed"),
        overlap_update=overlap,
    )  # fmt: skip
    with open(DIR / f"{OF}calls.{RANK}", "a") as begun, open(DIR / f"{OF}losses.{RANK}", "a") as losses:

        @job.iteration
        def train(x: Tensor, y: Tensor) -> list[Tensor]:
            now["iteration"] = job.iteration_number
            print(job.iteration_number, os.getpid(), file=begun, flush=True)
            until_it_counts(job)
            found: list[Tensor] = []
            pipeline_train.calls.clear()
            optimizer.zero_grad()
            given: dict[str, Any] = {"target": y, "losses": found} if is_last else {}
            schedule.step(*([x] if index == 0 else []), **given)
            if by_hand:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad, group=replicas)
            if ORDERS.get("clips"):
                clip(net)
            update([optimizer])
            if ORDERS.get("late") and is_last:
                dist.send(torch.ones(1), RANK - (num_stages - 1) * width, tag=7)
            elif ORDERS.get("late") and index == 0:
                dist.recv(
                    torch.zeros(1), None if ORDERS["late"] == "from any" else RANK + (num_stages - 1) * width, tag=7
                )
            return found

        def evaluate(number: int) -> None:
            fault("evaluate", number)
            x = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
            with torch.no_grad():
                schedule.eval(*([x] if index == 0 else []), **({"target": x, "losses": []} if is_last else {}))

        section = job.resilient(evaluate) if ORDERS.get("evaluates") == "resilient" else evaluate
        for number in job.iterations(ITERATIONS):
            x = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * number + column))
            found = train(x, (x + 1) % WORDS)
            print(number, *(loss.item().hex() for loss in found), file=losses, flush=True)
            if ORDERS.get("evaluates") and number % 2:
                section(number)
            fault("between", job.iteration_number - 1)
            if "pace_s" in ORDERS and number > 3:
                wait_for(DIR / "free", ORDERS["pace_s"])
    leave_result(job, net, [optimizer])


if __name__ == "__main__":
    with open(DIR / f"{OF}pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
