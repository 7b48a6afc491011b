"""The script that the benchmarks train: DDP, AdamW, a model of a given size. Under torchrun and under swift-run.

Both ways share model, data and update. Under torchrun (`--plain`) the script does what a careful user does: every 50
iterations rank 0 writes a checkpoint to the local disk, and after a restart all load the newest one. Under swift-run it
names its state and its iteration. Every rank appends "time pid iteration" to its file at the end of each iteration.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_EVERY = 50
HOLD_AT = 20
NUM_LAYERS = 4
BATCH_SIZE = 4
BYTES_PER_PARAMETER = 12  # float32, with AdamW's two moments


class Trainer:
    """Model, optimizer and one update; `step(t)` depends on the state, the rank and *t* alone."""

    def __init__(self, state_mb: float, rank: int, device: torch.device, batch_size: int = BATCH_SIZE) -> None:
        self.rank, self._device, self._batch_size = rank, device, batch_size
        self.width = max(8, int((state_mb * 1e6 / BYTES_PER_PARAMETER / NUM_LAYERS) ** 0.5))
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(self.width, self.width), nn.Tanh())]
        self.model = DistributedDataParallel(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, iteration: int) -> None:
        data = torch.Generator().manual_seed(iteration * 1009 + self.rank)
        batch = torch.randn(self._batch_size, self.width, generator=data).to(self._device)
        loss = (self.model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Until the device has done what was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Log:
    """One line per finished iteration, written at once: it has to be there when the process is killed."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fd = os.open(directory / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def ended(self, iteration: int) -> None:
        os.write(self._fd, f"{time.monotonic():.6f} {os.getpid()} {iteration}\n".encode())


def hold(iteration: int, directory: Path) -> None:
    """Early in the run, wait until the parent has made the file "go": failures come when a job has long been running,
    so with all that a launcher prepares in the background in place."""
    while iteration == HOLD_AT and not (directory / "go").exists():
        time.sleep(0.01)


class Gate:
    """Lets the parent say how many iterations to run next; see `overhead.py`. Each rank has a pair of FIFOs."""

    def __init__(self, directory: Path, rank: int, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._orders = open(directory / f"orders{rank}")  # noqa: SIM115  # open until the process ends
        self._answers = open(directory / f"answers{rank}", "w", buffering=1)  # noqa: SIM115
        self._left = self._count = 0
        self._began_s = self.inside_s = 0.0

    def closed(self) -> bool:
        """Between iterations: answer for a block that is done, and wait for the next. True when there is none."""
        if self._left == 0:
            if self._count:
                self._synchronize()
                print(time.perf_counter() - self._began_s, self.inside_s, file=self._answers)
            self._left = self._count = int(self._orders.readline())
            if self._count == 0:
                return True
            self._began_s, self.inside_s = time.perf_counter(), 0.0
        self._left -= 1
        return False

    def timed(self, step: Callable[[int], None]) -> Callable[[int], None]:
        def run(iteration: int) -> None:
            began_s = time.perf_counter()
            step(iteration)
            self.inside_s += time.perf_counter() - began_s

        return run


def train_plain(args: argparse.Namespace) -> None:
    device = device_of(args)
    dist.init_process_group(backend_of(args))
    rank = dist.get_rank()
    trainer = Trainer(args.state_mb, rank, device, args.batch_size)
    log = Log(args.log_to, trainer.rank)
    gate = Gate(args.log_to, trainer.rank, trainer.synchronize) if args.gate else None
    step = gate.timed(trainer.step) if gate else trainer.step
    path = args.log_to / "checkpoint.pt"
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True, map_location=device)
        trainer.model.module.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]
    for iteration in range(first, args.iterations):
        if gate is None:
            hold(iteration, args.log_to)
        elif gate.closed():
            break
        step(iteration)
        if gate is None:
            trainer.synchronize()
        log.ended(iteration)
        if gate is None and rank == 0 and (iteration + 1) % CHECKPOINT_EVERY == 0:
            saved = {"model": trainer.model.module.state_dict(), "optimizer": trainer.optimizer.state_dict(),
                     "iteration": iteration + 1}
            torch.save(saved, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
    finish(trainer, args)


def train_swift(args: argparse.Namespace) -> None:
    import swift_agent as swift

    job = swift.init(backend_of(args))
    trainer = Trainer(args.state_mb, job.rank, device_of(args), args.batch_size)
    log = Log(args.log_to, trainer.rank)
    gate = Gate(args.log_to, trainer.rank, trainer.synchronize) if args.gate else None
    job.track(model=trainer.model, optimizer=trainer.optimizer, overlap_update=args.overlap, exact=args.exact)
    step = job.iteration(gate.timed(trainer.step) if gate else trainer.step)
    for iteration in job.iterations(args.iterations):
        if gate is None:
            hold(iteration, args.log_to)
        elif gate.closed():
            break
        step(iteration)
        if gate is None:
            trainer.synchronize()
        log.ended(iteration)
    finish(trainer, args)


def backend_of(args: argparse.Namespace) -> str:
    return "nccl" if args.device == "cuda" else "gloo"


def device_of(args: argparse.Namespace) -> torch.device:
    """Workers take turns in taking the GPUs of their machine."""
    if args.device != "cuda":
        return torch.device(args.device)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish(trainer: Trainer, args: argparse.Namespace) -> None:
    if trainer.rank == 0 and args.out:
        torch.save(trainer.model.module.state_dict(), args.out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="as a script that does not know swift-agent")
    parser.add_argument("--state-mb", type=float, default=5.0, help="parameters and optimizer state, in 10^6 bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: over NCCL")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="samples of an iteration on each rank")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--log-to", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gate", action="store_true", help="run in blocks, as told through FIFOs in that directory")
    parser.add_argument("--overlap", action="store_true", help="updates overlap the backward")
    parser.add_argument("--exact", action="store_true", help="with copies, so that an update is taken back exactly")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (train_plain if args.plain else train_swift)(args)


if __name__ == "__main__":
    main()
