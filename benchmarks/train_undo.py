"""The script of experiments.py's loss curves: DDP with updates in the backward, a lost rank in the middle of one.

In iteration `--stop-at` the last rank, in its first life, stands still in the backward once it has updated the last
layers, and leaves its process id in "stopped": the program that started the job kills it. Rank 0 appends "iteration
loss" at the end of each iteration, and "began again: difference part" when it repeats that one: the largest difference
of a parameter from what it was when the iteration began first, and the largest part of its documented bound
(recovery/README.md) that a parameter has used up.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift

INPUTS, WIDTH, CLASSES, BATCH_SIZE = 32, 64, 10, 64
BUCKET_MB = 0.01  # one for each layer
LIMIT_S = 60.0
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def batch_of(iteration: int, rank: int) -> tuple[Tensor, Tensor]:
    """Classes that a fixed random network has made up."""
    generator = torch.Generator().manual_seed(1009 * iteration + rank)
    x = torch.randn(BATCH_SIZE, INPUTS, generator=generator)
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    return x, (x @ teacher).argmax(1)


class Stop:
    """Where the last rank stands still."""

    def __init__(self, directory: Path, layers: nn.Sequential) -> None:
        self._path, self._last = directory / "stopped", next(reversed(list(layers.parameters())))
        self.is_due = False
        # Its backward begins with the last layer, and comes to the first one at the end.
        layers[0].register_forward_hook(lambda _module, _inputs, out: self._watch(out))

    def _watch(self, out: Tensor) -> None:
        if self.is_due and not self._path.exists():
            before = self._last.detach().clone()
            out.register_hook(lambda _gradient: self._stand_still(before))

    def _stand_still(self, before: Tensor) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while torch.equal(self._last.detach(), before) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.2)  # the others make the same updates meanwhile
        self._path.with_suffix(".new").write_text(str(os.getpid()))
        os.replace(self._path.with_suffix(".new"), self._path)
        time.sleep(max(0.0, deadline_s - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--stop-at", type=int, default=-1, metavar="N")
    parser.add_argument("--exact", action="store_true", help="with copies, so that an update is taken back exactly")
    parser.add_argument("--log-to", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 saves the final weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = swift.init("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )
    model = DistributedDataParallel(layers, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.track(model=model, optimizer=optimizer, overlap_update=True, exact=args.exact)
    stop = Stop(args.log_to, layers)
    kept: list[Tensor] = []

    def say(text: str) -> None:
        if job.rank == 0:
            with open(args.log_to / "losses", "a") as file:
                print(text, file=file)

    def compare(began: list[Tensor]) -> None:
        """*began*: what this attempt began with; the update is made."""
        differences = [(a - b).abs() for a, b in zip(kept, began, strict=True)]
        bounds = [
            4 * UNIT_ROUNDOFF * (old.abs() + (p.detach() - old).abs())
            for old, p in zip(kept, layers.parameters(), strict=True)
        ]
        part = max(float((d / b).max()) for d, b in zip(differences, bounds, strict=True))
        say(f"began again: {max(float(d.max()) for d in differences)!r} {part!r}")

    @job.iteration
    def train(x: Tensor, y: Tensor) -> Tensor:
        number = job.iteration_number
        stop.is_due = number == args.stop_at and job.rank == job.world_size - 1
        began = [p.detach().clone() for p in layers.parameters()] if number == args.stop_at else []
        is_repeated = bool(kept)
        if not is_repeated:
            kept.extend(began)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if began and is_repeated:
            compare(began)
        return loss.detach()

    for iteration in job.iterations(args.iterations):
        loss = train(*batch_of(iteration, job.rank))
        say(f"{iteration} {loss.item()!r}")
    if job.rank == 0:
        torch.save(layers.state_dict(), args.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
