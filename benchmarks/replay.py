"""Recovery of a lost pipeline stage by replay, beside rolling the whole job back to its checkpoint.

A worker is killed 10, 50 and 100 iterations after the newest checkpoint. Measured: seconds from the SIGKILL until all
ranks have finished the iteration after the last one that anybody had finished before it; so whatever is lost has been
made again. Under swift-run the replacement repeats the iterations of its stage alone, from the messages that its
neighbours have logged: with m micro-batches, p stages and one lost, (m + s - 1) / (m + p - 1) of the time, s = 1, by
SWIFT's model (section 5), which is printed next to what was found. Beside it the whole job is rolled back: by torchrun,
and, as that is slow to start processes, by swift-run, which does so with a script that logs no messages. The final
weights of all stages must be those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _common import NUM_NODES, ROOT, Failed, Job, SwiftRun, Torchrun, machine, same_weights

from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd

SCRIPT = ROOT / "benchmarks" / "train_pipeline.py"
TIMEOUT_S = 180.0
# After the last kill the job still has to go on for some iterations.
NUM_AFTER = 10
# Iterations between checkpoints; processes have to get ready before a kill, and the job must not be over by then.
MIN_BETWEEN = 60


@dataclass
class Measured:
    """One list entry per kill."""

    recovery_s: list[float] = field(default_factory=list)
    replay_s: list[float] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    kept_pids: list[int] = field(default_factory=list)


def kill(job: Job, rank: int, measured: Measured) -> int:
    """Kill the worker that is *rank* and wait until all train beyond the iteration in which it was, which is returned.
    """
    ranks = range(job.world_size)
    logs = [job.log(each) for each in ranks]
    last = logs[0][-9:]  # not those before, among which a checkpoint or a recovery may be
    old = [log[-1].pid for log in logs]
    victim = psutil.Process(old[rank])
    killed_s = time.monotonic()
    victim.kill()
    finished = max(entry.iteration for each in ranks for entry in job.log(each) if entry.time_s <= killed_s)

    def ends() -> list[float] | None:
        found = []
        for each in ranks:
            new = [e.time_s for e in job.log(each) if e.iteration > finished and e.time_s > killed_s]
            if not new:
                return None
            found.append(new[0])
        return found

    measured.recovery_s.append(max(job.wait_for(ends, f"iteration {finished + 1} on all ranks", TIMEOUT_S)) - killed_s)
    measured.iteration_s.append(statistics.median(b.time_s - a.time_s for a, b in itertools.pairwise(last)))
    measured.kept_pids.append(sum(job.last(each).pid == old[each] for each in ranks))
    return max(entry.iteration for entry in job.log(rank) if entry.time_s <= killed_s) + 1


def run_job(
    job: Job, distances: list[int], every: int, measured: dict[int, Measured], turn: int, replays: bool
) -> None:
    """One kill for each distance to the newest checkpoint, of another rank each time. *replays*: lost stages do."""
    with job:
        for number, distance in enumerate(distances):
            job.wait_iteration(every * (number + 1) + distance - 1, TIMEOUT_S)
            job.wait_ready()
            checkpoint = every * (number + 1)
            was_in = kill(job, (number + turn) % job.world_size, measured[distance])
            if replays:
                told = number + 1
                job.wait_for(lambda told=told: len(job.phases()) >= told, "record of the recovery", 10.0)  # type: ignore[misc]
                phases = job.phases()[-1]
                if "replay" not in phases or f"load the checkpoint of iteration {checkpoint}" not in said(job):
                    raise Failed(f"the recovery was none by replay from {checkpoint}: {phases}\n{job.tail()}")
                measured[distance].replay_s.append(phases["logs"] + phases["replay"])
                measured[distance].replayed.append(was_in - checkpoint)
        job.wait_end(TIMEOUT_S)


def said(job: Job) -> str:
    return "".join(path.read_text(errors="replace") for path in job.directory.glob("agent*.log"))


def measure(args: argparse.Namespace, etcd: EtcdConfig, directory: Path) -> dict[str, Any]:
    distances = sorted(args.distances)
    every = max(distances[-1] + NUM_AFTER, MIN_BETWEEN)
    options = ["--iterations", str(every * (len(distances) + 1)), "--checkpoint-every", str(every)]
    for name in ("layers", "width", "length", "micro_batches"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    tell("undisturbed run")
    with SwiftRun(directory, options, etcd, 0, args.workers, SCRIPT) as undisturbed:
        undisturbed.wait_end(TIMEOUT_S)
    ways = ("torchrun", "swift-run, rolled back", "swift-run")
    by_way = {way: {distance: Measured() for distance in distances} for way in ways}
    peer, rolled_back, ours = by_way.values()
    equal = True
    for turn in range(args.rounds):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            if way == "torchrun":
                job: Job = Torchrun(directory, options, 0, args.workers, SCRIPT)
            else:
                keeps = "yes" if way == "swift-run" else "no"
                job = SwiftRun(directory, [*options, "--messages", keeps], etcd, 0, args.workers, SCRIPT)
            run_job(job, distances, every, by_way[way], turn, replays=way == "swift-run")
            tell(f"  {way:24}" + ", ".join(f"{by_way[way][each].recovery_s[-1]:.2f} s" for each in distances))
            if way == "torchrun":
                continue
            pairs = [(undisturbed.directory / file.name, file) for file in job.directory.glob("weights*.pt")]
            equal &= len(pairs) == job.world_size and all(same_weights(*pair) for pair in pairs)
    stages, micro_batches = NUM_NODES * args.workers, args.micro_batches
    cases = []
    for distance in distances:
        mine, other = ours[distance], peer[distance]
        iteration_s = statistics.median(mine.iteration_s)
        shares = [spent_s / (num * iteration_s) for spent_s, num in zip(mine.replay_s, mine.replayed, strict=True)]
        cases.append(
            {
                "name": f"replay/{distance}",
                "ours_s": mine.recovery_s,
                "peer_s": other.recovery_s,
                "rolled_back_s": rolled_back[distance].recovery_s,
                "ratio": statistics.median(other.recovery_s) / statistics.median(mine.recovery_s),
                "replay_s": mine.replay_s,
                "iteration_s": iteration_s,
                "replayed": mine.replayed,
                "replay_share": statistics.median(shares),
                "model_share": micro_batches / (micro_batches + stages - 1),
                "ours_kept_pids": mine.kept_pids,
                "equal": equal,
            }
        )
    return {**cases[-1], "equal": equal, "machine": machine(), "num_stages": stages, "cases": cases}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(case: dict[str, Any]) -> str:
    ours, peer, rolled = (statistics.median(case[key]) for key in ("ours_s", "peer_s", "rolled_back_s"))
    return (
        f"{case['name']} iterations after the checkpoint: swift-run {ours:.2f} s, torchrun {peer:.2f} s: "
        f"{case['ratio']:.1f} times faster; swift-run without logs {rolled:.2f} s: {rolled / ours:.1f} times; "
        f"an iteration of {case['iteration_s'] * 1e3:.0f} ms is repeated in {case['replay_share']:.2f} of its time "
        f"(model: {case['model_share']:.2f}); weights {'equal' if case['equal'] else 'DIFFER'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--quick", action="store_true", help="one distance, once, within 60 s")
    parser.add_argument("--distances", type=int, nargs="+", default=[10, 50, 100], metavar="N",
                        help="iterations between checkpoint and kill")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each launcher")
    parser.add_argument("--workers", type=int, default=1, help="stages per node, of two nodes")
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="of a micro-batch, in words")
    parser.add_argument("--micro-batches", type=int, default=8)
    args = parser.parse_args()
    if args.quick:
        args.distances, args.rounds = args.distances[:1], 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            result = measure(args, etcd.config, Path(name))
    except Failed as error:
        tell(str(error))
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        for case in result["cases"]:
            print(report(case))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
