"""Recovery time beside torchrun: the same script, on the same machine, alternating.

For every kill: seconds from the SIGKILL to the *end* of the first new iteration on all ranks, and how many finished
iterations were lost. README.md says how the two are set up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _common import NUM_WORKERS, Failed, Job, SwiftRun, Torchrun, machine, same_weights
from train_ddp import BATCH_SIZE, CHECKPOINT_EVERY, HOLD_AT

from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd

RESTART_TIMEOUT_S = 120.0


@dataclass
class Measured:
    """One list entry per kill."""

    recovery_s: list[float] = field(default_factory=list)
    lost_iterations: list[int] = field(default_factory=list)
    kept_pids: list[int] = field(default_factory=list)
    phases_s: list[dict[str, float]] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)


def kill(job: Job, what: str, measured: Measured, rng: random.Random) -> None:
    """Kill a worker, or the node of one, at a random moment; wait until all train again, and take the times."""
    ranks = range(job.world_size)
    rank = rng.choice([each for each in ranks if what == "worker" or job.may_be_killed(each)])
    logs = [job.log(each) for each in ranks]
    iteration_s = statistics.median(b.time_s - a.time_s for a, b in zip(logs[0][-20:], logs[0][-19:], strict=False))
    if what == "node":
        agent = job.node_of(rank)
        victims = job.family(agent)
    else:
        victims = [psutil.Process(job.last(rank).pid)]
    time.sleep(rng.uniform(0, 2 * iteration_s))
    killed_s = time.monotonic()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if what == "node":
        agent.wait()
    old = {each: log[-1].pid for each, log in enumerate(logs)}

    def first_new() -> int | None:
        """The first iteration of the new processes, once every rank has finished it after the kill."""
        new = [entry for each in ranks for entry in job.log(each)
               if entry.time_s > killed_s and entry.pid != old[each]]
        if not new:
            return None
        first = min(entry.iteration for entry in new)
        for each in ranks:
            if not any(entry.iteration == first and entry.time_s > killed_s for entry in job.log(each)):
                return None
        return first + 1  # zero is an iteration, too

    first = job.wait_for(first_new, "new iteration on all ranks", RESTART_TIMEOUT_S) - 1
    ends, finished = [], -1
    for each in ranks:
        log = job.log(each)
        ends.append(next(entry.time_s for entry in log if entry.iteration == first and entry.time_s > killed_s))
        finished = max([finished, *(entry.iteration for entry in log if entry.time_s <= killed_s)])
    measured.recovery_s.append(max(ends) - killed_s)
    measured.lost_iterations.append(max(0, finished + 1 - first))
    measured.kept_pids.append(sum(job.last(each).pid == old[each] for each in ranks))
    measured.iteration_s.append(iteration_s)


def run_job(job: Job, what: str, num_kills: int, measured: Measured, reference: Path | None, seed: int) -> None:
    rng = random.Random(seed)
    with job:
        job.wait_iteration(HOLD_AT - 1)
        job.wait_ready()
        job.go()
        for number in range(num_kills):
            # Anywhere between two checkpoints, the first of which is there.
            job.wait_iteration(CHECKPOINT_EVERY * (number + 1) + rng.randrange(2, CHECKPOINT_EVERY - 5))
            job.wait_ready()
            kill(job, what, measured, rng)
            if job.name == "swift-run":
                told = number + 1
                job.wait_for(lambda told=told: len(job.phases()) >= told, "record of the recovery", 10.0)  # type: ignore[misc]
        measured.phases_s += job.phases()
        if reference is not None:
            job.wait_end(180.0)
            measured.equal.append(same_weights(job.weights, reference))


def run_case(
    what: str, state_mb: float, num_kills: int, per_job: int, num_workers: int, etcd: EtcdConfig, directory: Path,
    script_args: Sequence[str] = (),
) -> dict[str, Any]:
    """One fault and one size of state under both launchers, alternating."""
    args = ["--state-mb", str(state_mb), "--iterations", str(CHECKPOINT_EVERY * (per_job + 1) + 10), *script_args]
    tell(f"{what} kill, {state_mb:g} MB of state: undisturbed run")
    with SwiftRun(directory, args, etcd, 0, num_workers) as undisturbed:
        undisturbed.go()
        undisturbed.wait_end()
        reference = undisturbed.weights
    ours, peer = Measured(), Measured()
    rounds = max(1, num_kills // per_job)
    num_spares = per_job if what == "node" else 0
    for number in range(rounds):
        for launcher in ("torchrun", "swift-run") if number % 2 == 0 else ("swift-run", "torchrun"):
            if launcher == "torchrun":
                run_job(Torchrun(directory, args, num_spares, num_workers), what, per_job, peer, None, number)
                tell(f"  torchrun   {', '.join(f'{s:.2f} s' for s in peer.recovery_s[-per_job:])}")
            else:
                swift = SwiftRun(directory, args, etcd, num_spares, num_workers)
                run_job(swift, what, per_job, ours, reference, number)
                tell(f"  swift-run  {', '.join(f'{s:.3f} s' for s in ours.recovery_s[-per_job:])}")
    names = list(dict.fromkeys(name for phases in ours.phases_s for name in phases))
    return {
        "name": f"recovery/{what}/{state_mb:g}MB",
        "ours_s": ours.recovery_s,
        "peer_s": peer.recovery_s,
        "ratio": statistics.median(peer.recovery_s) / statistics.median(ours.recovery_s),
        "equal": all(ours.equal),
        "ours_lost_iterations": ours.lost_iterations,
        "peer_lost_iterations": peer.lost_iterations,
        "ours_kept_pids": ours.kept_pids,
        "iteration_s": statistics.median(ours.iteration_s),
        "phases_s": {
            name: statistics.median(phases[name] for phases in ours.phases_s if name in phases)
            for name in names
        },
    }


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(case: dict[str, Any]) -> str:
    ours, peer = statistics.median(case["ours_s"]), statistics.median(case["peer_s"])
    phases = ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in case["phases_s"].items())
    return (
        f"{case['name']}: swift-run {ours:.3f} s, torchrun {peer:.2f} s: {case['ratio']:.1f} times faster; "
        f"iterations lost {statistics.median(case['ours_lost_iterations']):g} against "
        f"{statistics.median(case['peer_lost_iterations']):g}; weights {'equal' if case['equal'] else 'DIFFER'}\n"
        f"    phases, ms: {phases}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--quick", action="store_true", help="one small case, within 60 s")
    parser.add_argument("--state-mb", type=float, nargs="+", default=[5.0, 100.0],
                        help="parameters and optimizer state")
    parser.add_argument("--kills", type=int, help="per case and launcher; default: 6 of a worker, 3 of a node")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="per node, of two nodes")
    parser.add_argument("--what", choices=("worker", "node"), nargs="+", default=["worker", "node"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: over NCCL, of version 2.31 or newer where workers share a GPU")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="samples of an iteration on each rank")
    args = parser.parse_args()
    script_args = ("--device", args.device, "--batch-size", str(args.batch_size))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wanted = [(what, size) for what in args.what for size in args.state_mb]
    if args.quick:
        wanted = wanted[:1]
    try:
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            cases = []
            for what, size in wanted:
                kills = args.kills or (1 if args.quick else 6 if what == "worker" else 3)
                per_job = min(kills, 2) if what == "worker" else 1
                where = (args.workers, etcd.config, Path(name))
                cases.append(run_case(what, size, kills, per_job, *where, script_args))
                if not args.json:
                    print(report(cases[-1]), flush=True)
    except Failed as error:
        tell(str(error))
        return 1
    if args.json:
        # The first case is the headline; all of them follow.
        equal = all(case["equal"] for case in cases)
        print(json.dumps({**cases[0], "equal": equal, "machine": machine(), "cases": cases}))
    return 0 if all(case["equal"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
