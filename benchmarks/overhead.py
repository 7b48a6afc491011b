"""What protection costs while nothing fails: time per iteration and memory beside torchrun, paired.

Both jobs are alive at once. They take turns, a block of iterations each, in the order A B B A; the one whose turn it is
not waits without using the processor. So both are measured within a second of each other, on the same machine in the
same state, with one worker per core: with more of them the order in which they are scheduled is what is measured.
The cost is the median, over the pairs of blocks of several launches, of ours over torchrun's; how far it can be off is
worked out by drawing launches again and again (a bootstrap over launches, whose pairs are not independent).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from _common import NUM_NODES, Failed, Job, SwiftRun, Torchrun, machine, same_weights
from train_ddp import BATCH_SIZE

from swift_rendezvous.store.private_etcd import PrivateEtcd

NUM_WARM_UP = 30
TIMEOUT_S = 60.0
NUM_DRAWS = 1000


class Gated:
    """A job that runs in blocks of iterations. The other side is `train_ddp.Gate`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._orders: list[IO[str]] = []
        self._answers: list[IO[str]] = []
        for rank in range(job.world_size):
            for name, files, mode in (("orders", self._orders, "w"), ("answers", self._answers, "r")):
                path = job.directory / f"{name}{rank}"
                os.mkfifo(path)
                # Opened for both, so that nobody waits for the other side.
                files.append(os.fdopen(os.open(path, os.O_RDWR), mode, buffering=1))

    def order(self, num_iterations: int) -> None:
        for orders in self._orders:
            print(num_iterations, file=orders)

    def block(self, num_iterations: int) -> tuple[float, float]:
        """Run a block; seconds per iteration on rank 0: in all, and outside the script's own function."""
        self.order(num_iterations)
        answers = [self._answer(rank) for rank in range(self.job.world_size)]
        whole_s, inside_s = answers[0]
        return whole_s / num_iterations, (whole_s - inside_s) / num_iterations

    def _answer(self, rank: int) -> tuple[float, float]:
        answers = self._answers[rank]
        if not select.select([answers], [], [], TIMEOUT_S)[0]:
            raise Failed(f"{self.job.name}: no answer from rank {rank}\n{self.job.tail()}")
        whole_s, inside_s = answers.readline().split()
        return float(whole_s), float(inside_s)

    def cpu_s(self, etcd_pid: int | None = None) -> float:
        """Processor time so far of what is not a worker: agents, warm processes, etcd."""
        workers = {self.job.last(rank).pid for rank in range(self.job.world_size)}
        processes = [process for agent in self.job.agents for process in self.job.family(agent)]
        if etcd_pid:
            processes.append(psutil.Process(etcd_pid))
        spent_s = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # a process of the launcher's that ends meanwhile
                if process.pid not in workers:
                    times = process.cpu_times()
                    spent_s += times.user + times.system
        return spent_s

    def peak_bytes(self) -> int:
        """The most memory that a worker has had so far, as the kernel counts it (VmHWM): that of the largest."""
        status = [Path(f"/proc/{self.job.last(rank).pid}/status").read_text() for rank in range(self.job.world_size)]
        return max(int(text.partition("VmHWM:")[2].split()[0]) << 10 for text in status)

    def close(self) -> None:
        for file in (*self._orders, *self._answers):
            file.close()


def measure(
    state_mb: float, seconds: float, block_s: float, num_workers: int, launches: int, script_args: Sequence[str] = ()
) -> dict[str, Any]:
    """Blocks of iterations of about *block_s* in turn for about *seconds*, over that many launches of both jobs."""
    samples = Samples()
    for _ in range(launches):
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            args = ["--state-mb", str(state_mb), "--iterations", str(10**9), "--gate", *script_args]
            torchrun = Torchrun(Path(name), args, num_workers=num_workers)
            swift = SwiftRun(Path(name), args, etcd.config, num_workers=num_workers)
            peer, ours = Gated(torchrun), Gated(swift)
            try:
                with torchrun, swift:
                    iteration_s = max(each.block(NUM_WARM_UP)[0] for each in (peer, ours))
                    swift.wait_ready()
                    block = max(2, round(block_s / iteration_s))
                    take_turns(peer, ours, seconds / launches, block, etcd.pid, samples)
                    samples.peak_bytes["ours"].append(ours.peak_bytes())
                    samples.peak_bytes["peer"].append(peer.peak_bytes())
                    for each in (peer, ours):
                        each.order(0)
                        each.job.wait_end()
                    samples.equal &= same_weights(torchrun.weights, swift.weights)
            finally:
                peer.close()
                ours.close()
    return {
        "name": f"overhead/{state_mb:g}MB", **samples.result(), "peak_bytes": samples.peak_bytes,
        "num_launches": launches, "machine": machine(),
    }  # fmt: skip


@dataclass
class Samples:
    """What was measured so far; seconds per iteration, one value for each block."""

    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    outside_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})
    passed_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: {"ours": 0.0, "peer": 0.0})
    peak_bytes: dict[str, list[int]] = field(default_factory=lambda: {"ours": [], "peer": []})
    equal: bool = True
    ends: list[int] = field(default_factory=list)
    """How many pairs there were when each launch ended."""

    def interval(self, costs: list[float]) -> list[float] | None:
        """Between which values the median cost lies, with 95 %; None where there was one launch only."""
        launches = [costs[begin:end] for begin, end in itertools.pairwise([0, *self.ends])]
        if len(launches) < 2:
            return None
        draw = random.Random(0)
        medians = sorted(
            statistics.median(itertools.chain.from_iterable(draw.choices(launches, k=len(launches))))
            for _ in range(NUM_DRAWS)
        )
        return [medians[NUM_DRAWS // 40] - 1, medians[-1 - NUM_DRAWS // 40] - 1]

    def result(self) -> dict[str, Any]:
        costs = [own / other for own, other in zip(self.ours_s, self.peer_s, strict=True)]
        quarter = statistics.quantiles(costs, n=4)
        return {
            "ours_s": self.ours_s,
            "peer_s": self.peer_s,
            "ratio": statistics.median(other / own for own, other in zip(self.ours_s, self.peer_s, strict=True)),
            "cost": statistics.median(costs) - 1,
            "cost_interval": self.interval(costs),
            "cost_quartiles": [quarter[0] - 1, quarter[2] - 1],
            "num_pairs": len(costs),
            "outside_function_s": {who: statistics.median(times_s) for who, times_s in self.outside_s.items()},
            "background_cores": {who: spent_s / self.passed_s for who, spent_s in self.cpu_s.items()},
            "equal": self.equal,
        }


def take_turns(
    peer: Gated, ours: Gated, seconds: float, block: int, etcd_pid: int | None, samples: Samples
) -> None:
    """Turns of *block* iterations of both for about *seconds*, into *samples*."""
    began_s, peer_cpu_s, ours_cpu_s = time.monotonic(), peer.cpu_s(), ours.cpu_s(etcd_pid)
    num_before = len(samples.ours_s)
    # Whole ABBA rounds, so that neither is first more often.
    while (len(samples.ours_s) - num_before) % 2 or time.monotonic() - began_s < seconds:
        turns = [(peer, samples.peer_s, "peer"), (ours, samples.ours_s, "ours")]
        for gated, times_s, who in turns if len(samples.ours_s) % 2 == 0 else turns[::-1]:
            whole_s, beside_s = gated.block(block)
            times_s.append(whole_s)
            samples.outside_s[who].append(beside_s)
    samples.ends.append(len(samples.ours_s))
    samples.passed_s += time.monotonic() - began_s
    samples.cpu_s["ours"] += ours.cpu_s(etcd_pid) - ours_cpu_s
    samples.cpu_s["peer"] += peer.cpu_s() - peer_cpu_s


def report(result: dict[str, Any]) -> str:
    ours, peer = statistics.median(result["ours_s"]), statistics.median(result["peer_s"])
    low, high = result["cost_quartiles"]
    interval = result["cost_interval"]
    between = f"95 %: {interval[0]:+.2%} to {interval[1]:+.2%}, " if interval else ""
    outside, background = result["outside_function_s"], result["background_cores"]
    memory = [statistics.median(result["peak_bytes"][who]) / 1e6 for who in ("ours", "peer")]
    own_us, plain_us = outside["ours"] * 1e6, outside["peer"] * 1e6
    return (
        f"{result['name']}: swift-run {ours * 1e3:.3f} ms, torchrun {peer * 1e3:.3f} ms per iteration; "
        f"cost {result['cost']:+.2%} (median of {result['num_pairs']} pairs in {result['num_launches']} launches, "
        f"{between}quartiles {low:+.2%} to {high:+.2%}); "
        f"weights {'equal' if result['equal'] else 'DIFFER'}\n"
        f"    outside the script's function: {own_us:.0f} us, in a plain loop {plain_us:.0f} us; "
        f"in the background: {background['ours']:.2%} of a core, torchrun {background['peer']:.2%}; "
        f"memory of a worker at its peak: {memory[0]:.0f} MB, torchrun {memory[1]:.0f} MB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--quick", action="store_true", help="the first size only, within 60 s")
    parser.add_argument("--state-mb", type=float, nargs="+", default=[100.0, 5.0],
                        help="parameters and optimizer state; default: 100 and 5")
    parser.add_argument("--seconds", type=float, help="how long to measure each, without the start; default: 120")
    parser.add_argument("--launches", type=int, default=4,
                        help="of both jobs, in that time: where a process lies in memory alone changes its speed by "
                        "some percent; default: 4")
    parser.add_argument("--block-s", type=float, default=0.1, help="length of a turn, about; default: 0.1")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // NUM_NODES),
                        help="per node, of two nodes; default: one worker per core")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: over NCCL, of version 2.31 or newer where workers share a GPU")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="samples of an iteration on each rank")
    args = parser.parse_args()
    script_args = ("--device", args.device, "--batch-size", str(args.batch_size))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seconds = args.seconds or (20.0 if args.quick else 120.0)
    cases = []
    try:
        for state_mb in args.state_mb[:1] if args.quick else args.state_mb:
            launches = 1 if args.quick else args.launches
            cases.append(measure(state_mb, seconds, args.block_s, args.workers, launches, script_args))
            if not args.json:
                print(report(cases[-1]), flush=True)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    equal = all(case["equal"] for case in cases)
    if args.json:
        # The first case is the headline; all of them follow.
        print(json.dumps({**cases[0], "equal": equal, "cases": cases}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
