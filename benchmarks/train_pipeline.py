"""The script that the pipeline benchmarks train: a stack of transformer layers in stages, one per rank, 1F1B.

Under torchrun (`--plain`) all ranks write a checkpoint of their stage to the local disk every `--checkpoint-every`
iterations, and all load the newest one after a restart. Under swift-run messages between stages are logged, and
`job.checkpoint` writes as often. `--messages no` leaves the logging out, and all that comes with it, `counts` the
logging alone; with `--messages saves` the script saves each message itself before it is sent, which is what SWIFT
compares its asynchronous log with; `--save-every N` has it write checkpoints as under torchrun. Every rank appends
"time pid iteration" to its file at the end of each iteration, and saves its stage at the end; with `--busy` each
process writes "iteration seconds" of its own computation to a file. With `--hold` a rank waits at the beginning of an
iteration for who kills it there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from train_ddp import Gate, Log

HEADS = 4
HELPER = os.environ.get("SWIFT_HELPER", "")


def new_layer(args: argparse.Namespace) -> nn.Module:
    return nn.TransformerEncoderLayer(args.width, HEADS, 4 * args.width, dropout=0.0, batch_first=True)


class Trainer:
    """One stage, its optimizer and one iteration; `step(t)` depends on the state and *t* alone."""

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int) -> None:
        self.rank, self.is_last = rank, rank == world_size - 1
        self.size = (args.micro_batches, args.length, args.width)
        torch.manual_seed(rank)
        num_layers = args.large_layers if rank == args.large else args.layers
        layers = [new_layer(args) for _ in range(num_layers)] or [nn.Linear(args.width, args.width)]
        self.stage = PipelineStage(nn.Sequential(*layers), rank, world_size, torch.device("cpu"))
        self.schedule = Schedule1F1B(self.stage, args.micro_batches, loss_fn=F.mse_loss)
        self.optimizer = torch.optim.AdamW(self.stage.submod.parameters(), lr=1e-4)

    def step(self, iteration: int) -> None:
        batch = torch.randn(self.size, generator=torch.Generator().manual_seed(iteration))
        self.schedule.step(*([batch] if self.rank == 0 else []), target=batch if self.is_last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Saved:
    """Each message is on the disk before it is sent, as in the baseline of SWIFT section 5. *count*: of messages."""

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self._path = directory / f"message{dist.get_rank()}.pt"
        original = schedules._batch_p2p

        def batch(operations: list[Any], *args: Any, **kwargs: Any) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    self._save(operation.tensor)
            return original(operations, *args, **kwargs)

        schedules._batch_p2p = batch

    def _save(self, tensor: Tensor) -> None:
        with open(self._path, "wb") as file:
            torch.save(tensor.detach(), file)
            file.flush()
            os.fsync(file.fileno())
        self.count += 1


def keep_no_messages() -> None:
    """The log of this process stays empty, so that what it costs is seen: a lost stage could not be recovered."""
    from swift_logging_store.log.log import SentLog

    def nothing(self: SentLog, *args: Any, **kwargs: Any) -> None: ...

    SentLog.append = nothing  # type: ignore[method-assign]


class Busy:
    """The processor's time that each iteration has taken here, in all threads of this process, and in this one."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = open(directory / f"busy{rank}-{HELPER or 0}-{os.getpid()}", "w", buffering=1)  # noqa: SIM115

    def timed(self, step: Callable[[int], None]) -> Callable[[int], None]:
        def run(iteration: int) -> None:
            process_s, thread_s = time.process_time(), time.thread_time()
            step(iteration)
            print(iteration, time.process_time() - process_s, time.thread_time() - thread_s, file=self._file)

        return run


def hold(where: list[str], directory: Path, rank: int, iteration: int) -> None:
    """To be killed; who takes its place passes."""
    path = directory / f"held{iteration}"
    if f"{rank}:{iteration}" in where and not path.exists():
        path.touch()
        time.sleep(1000.0)


def compute(args: argparse.Namespace) -> None:
    """For ever, one layer."""
    layer, x = new_layer(args), torch.randn(1, args.length, args.width)
    print("computes", flush=True)
    while True:
        layer(x).sum().backward()


def write_checkpoint(trainer: Trainer, directory: Path, iteration: int) -> None:
    """All ranks; the newest counts when all parts of it are there."""
    state = {"model": trainer.stage.submod.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    torch.save(state, directory / f"checkpoint{iteration}-{trainer.rank}.pt")
    dist.barrier()
    if trainer.rank == 0:
        (directory / "newest.new").write_text(str(iteration))
        os.replace(directory / "newest.new", directory / "newest")


def load_checkpoint(trainer: Trainer, directory: Path) -> int:
    newest = directory / "newest"
    if not newest.exists():
        return 0
    iteration = int(newest.read_text())
    state = torch.load(directory / f"checkpoint{iteration}-{trainer.rank}.pt", weights_only=True)
    trainer.stage.submod.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    return iteration


def train_plain(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    trainer, log = Trainer(args, dist.get_rank(), dist.get_world_size()), Log(args.log_to, dist.get_rank())
    for iteration in range(load_checkpoint(trainer, args.log_to), args.iterations):
        trainer.step(iteration)
        log.ended(iteration)
        if args.checkpoint_every and (iteration + 1) % args.checkpoint_every == 0:
            write_checkpoint(trainer, args.log_to, iteration + 1)
    finish(trainer, args)


def train_swift(args: argparse.Namespace) -> None:
    import swift_agent as swift

    job = swift.init("gloo")
    trainer, log = Trainer(args, job.rank, job.world_size), None if HELPER else Log(args.log_to, job.rank)
    gate = Gate(args.log_to, job.rank) if args.gate else None
    saved = Saved(args.log_to) if args.log == "saves" else None
    if args.checkpoint_every:
        job.checkpoint(args.log_to / "checkpoints", every=args.checkpoint_every)
    if args.log == "counts":
        keep_no_messages()
    job.track(model=trainer.stage, optimizer=trainer.optimizer, log_messages=args.log in ("yes", "counts"))
    timed = gate.timed if gate else Busy(args.log_to, job.rank).timed if args.busy else None
    # Inside: a helper ends with its last iteration.
    step: Callable[[int], Any] = job.iteration(timed(trainer.step) if timed else trainer.step)
    for iteration in job.iterations(args.iterations):
        if gate is not None and gate.closed():
            break
        hold(args.hold, args.log_to, job.rank, iteration)
        step(iteration)
        if log is not None:
            log.ended(iteration)
        if args.save_every and (iteration + 1) % args.save_every == 0:
            write_checkpoint(trainer, args.log_to, iteration + 1)
    if saved is not None:
        neighbours = (job.rank > 0) + (job.rank + 1 < job.world_size)
        assert saved.count == job.iteration_number * args.micro_batches * neighbours, "not each message was saved"
    finish(trainer, args)


def finish(trainer: Trainer, args: argparse.Namespace) -> None:
    weights: dict[str, Tensor] = trainer.stage.submod.state_dict()
    torch.save(weights, args.out.with_name(f"weights{trainer.rank}.pt") if trainer.rank else args.out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="as a script that does not know swift-agent")
    parser.add_argument("--layers", type=int, default=2, help="of each stage; 0: one that computes next to nothing")
    parser.add_argument("--large", type=int, metavar="RANK", help="a stage that has another number of layers")
    parser.add_argument("--large-layers", type=int, default=2, metavar="N")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help="of the sequence of a micro-batch, which has one")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N")
    parser.add_argument("--save-every", type=int, default=0, metavar="N",
                        help="under swift-run: write it as under torchrun, while all wait")
    parser.add_argument("--messages", dest="log", choices=("yes", "no", "counts", "saves"), default="yes",
                        help="whether they are logged")
    parser.add_argument("--log-to", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gate", action="store_true", help="run in blocks, as told through FIFOs in that directory")
    parser.add_argument("--busy", action="store_true", help="each process writes what it has computed, in seconds")
    parser.add_argument("--neighbour", action="store_true", help="compute, and nothing else")
    parser.add_argument("--hold", nargs="*", default=[], metavar="RANK:ITERATION", help="where it waits to be killed")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 saves its stage; others beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (compute if args.neighbour else train_plain if args.plain else train_swift)(args)


if __name__ == "__main__":
    main()
