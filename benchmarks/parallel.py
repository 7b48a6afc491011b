"""Recovery of a lost pipeline stage that several processes repeat together (SWIFT, section 5.2), beside one alone, and
beside rolling all back.

Four stages on four nodes, and spare nodes for the helpers. A worker is killed exactly 20 and 50 iterations after the
newest checkpoint. Measured: how long these are repeated (phase "replay"), with `--strategy log` and with
`log+parallel` and d = 2 and 3 processes; the seconds from the kill until all have finished the next iteration, also
with `--strategy checkpoint`; and the processor's time that each process takes for the iterations that are repeated,
which does not depend on how many cores there are. It is that of all its threads; in the first iteration, while logs
come, of the thread that trains. As neighbours on a machine slow each other down, one alone has a neighbour, too, a
process that computes the same layers; and all iterations but the first one count as the fastest tenth of them does.
`work` is the largest such time over that of one process alone.

The stage that is lost computes, the others next to nothing: so it is what all wait for, also on two cores. The final
weights of all stages must be those of an undisturbed run, bit for bit, and `work` at most 0.55 with d = 2: exit code 1
if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from _common import ROOT, Failed, SwiftRun, machine, same_weights
from replay import Measured, kill, said, tell

from swift_recovery.strategy.choose import shared_s
from swift_recovery.strategy.profile import Profile, parse
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd

SCRIPT = ROOT / "benchmarks" / "train_pipeline.py"
NUM_NODES = 4
DISTANCES = (20, 50)
SHARES = (2, 3)
VICTIM = 1
MOST_WORK = 0.55
# Iterations after a checkpoint has come to the disk, and after the last kill.
NUM_AFTER = 3
TIMEOUT_S = 900.0  # 107 iterations without a failure are three to five minutes on two cores


class Busy(NamedTuple):
    """What one process has taken for all iterations that are repeated; *quiet_s*: without neighbours."""

    seconds: float
    quiet_s: float


class Neighbour:
    """A process that computes layers, inside `at_work`. A context manager."""

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = ("width", "length")
        options = [text for name in sizes for text in (f"--{name}", str(getattr(args, name)))]
        self._command = [sys.executable, str(SCRIPT), "--neighbour", *options, "--log-to", ".", "--out", "."]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        yield
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)


@dataclass
class Case:
    """Jobs that recover in one way; one list entry per kill."""

    options: tuple[str, ...]
    num_spares: int = 0
    has_neighbour: bool = False
    measured: dict[int, Measured] = field(default_factory=dict)
    busy: dict[int, list[list[Busy]]] = field(default_factory=dict)
    """Of the replacement, and of each helper."""
    predicted_s: dict[int, list[float]] = field(default_factory=dict)

    def at(self, distance: int) -> Measured:
        return self.measured.setdefault(distance, Measured())


def cases(shares: Sequence[int]) -> dict[str, Case]:
    found = {"checkpoint": Case(("--strategy", "checkpoint")), "log": Case(("--strategy", "log"), has_neighbour=True)}
    for num in shares:
        found[f"d={num}"] = Case(("--strategy", "log+parallel", "--helpers", str(num - 1)), num - 1)
    return found


class Runs:
    """Jobs that differ in how they recover only."""

    def __init__(self, args: argparse.Namespace, etcd: EtcdConfig, directory: Path) -> None:
        self._given, self._etcd, self._directory, self._distances = args, etcd, directory, sorted(args.distances)
        # A checkpoint for each kill, and the kill before the next one.
        self._every = self._distances[-1] + NUM_AFTER
        self._args = ["--iterations", str(self._begin(len(self._distances))), "--checkpoint-every", str(self._every)]
        self._args += ["--large", str(VICTIM)]
        for name in ("layers", "large_layers", "width", "length", "micro_batches"):
            self._args += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self.profile: Profile | None = None

    def _begin(self, number: int) -> int:
        """The checkpoint before that kill."""
        return self._every * (number + 1)

    def undisturbed(self) -> Path:
        with SwiftRun(self._directory, self._args, self._etcd, 0, 1, SCRIPT, num_nodes=NUM_NODES) as job:
            job.wait_end(TIMEOUT_S)
        return job.directory

    def run(self, case: Case) -> Path:
        ends = [self._begin(number) + distance for number, distance in enumerate(self._distances)]
        args = [*self._args, "--busy", "--hold", *(f"{VICTIM}:{end}" for end in ends)]
        beside = Neighbour(self._given)
        with contextlib.ExitStack() as stack:
            job = SwiftRun(
                self._directory, args, self._etcd, case.num_spares, 1, SCRIPT, num_nodes=NUM_NODES, options=case.options
            )
            stack.enter_context(job)
            if case.has_neighbour:
                stack.enter_context(beside)
            for number, (end, distance) in enumerate(zip(ends, self._distances, strict=True)):
                job.wait_for((job.directory / f"held{end}").exists, f"rank {VICTIM} in iteration {end}", TIMEOUT_S)
                job.wait_ready()
                # Where all begin again no messages are logged, and none are counted.
                if self.profile is None and case.num_spares and (record := job.measured()) is not None:
                    self.profile = parse(json.dumps(record.content))
                pid = job.last(VICTIM).pid
                with beside.at_work():
                    kill(job, VICTIM, case.at(distance))
                if "checkpoint" not in case.options:
                    self._note(job, case, distance, number + 1, pid)
            job.wait_end(TIMEOUT_S)
        for number, (end, distance) in enumerate(zip(ends, self._distances, strict=True)):
            if "checkpoint" not in case.options:
                found = busy(job.directory, range(self._begin(number), end))
                case.busy.setdefault(distance, []).append(found)
                if len(found) != 1 + case.num_spares:
                    raise Failed(f"{len(found)} processes have repeated iterations\n{job.tail()}")
        return job.directory

    def _note(self, job: SwiftRun, case: Case, distance: int, told: int, lost_pid: int) -> None:
        job.wait_for(lambda: len(job.phases()) >= told, "record of the recovery", 10.0)
        phases = job.phases()[-1]
        if "replay" not in phases or f"load the checkpoint of iteration {self._begin(told - 1)}" not in said(job):
            raise Failed(f"the recovery was none by replay from {self._begin(told - 1)}: {phases}\n{job.tail()}")
        case.at(distance).replay_s.append(phases["replay"])
        case.predicted_s[distance] = [*case.predicted_s.get(distance, []), job.predictions()[-1]]


def busy(directory: Path, iterations: range) -> list[Busy]:
    """Of the processes that have repeated these, in the order of their shares."""
    found = {}
    for path in directory.glob(f"busy{VICTIM}-*"):
        share, pid = map(int, path.name.split("-")[1:])
        rows = [line.split() for line in path.read_text().splitlines()]
        lines = {int(number): (float(process_s), float(thread_s)) for number, process_s, thread_s in rows}
        # The process that was killed has made them all, too, but not only them.
        if all(one in lines for one in iterations) and iterations.start - 1 not in lines:
            all_s = [lines[one][0] for one in iterations]
            quiet_s = lines[iterations.start][1] + len(all_s[1:]) * statistics.quantiles(all_s[1:], n=10)[0]
            found[share, pid] = Busy(sum(all_s), quiet_s)
    return [found[key] for key in sorted(found)]


def measure(args: argparse.Namespace, etcd: EtcdConfig, directory: Path) -> dict[str, Any]:
    runs = Runs(args, etcd, directory)
    tell("undisturbed run")
    reference = runs.undisturbed()
    by_way, equal = cases(args.shares), True
    if args.quick:
        del by_way["checkpoint"]
    for turn in range(args.rounds):
        for name in list(by_way) if turn % 2 == 0 else list(by_way)[::-1]:
            found = runs.run(by_way[name])
            files = list(reference.glob("weights*.pt"))
            same = len(files) == NUM_NODES and all(same_weights(file, found / file.name) for file in files)
            equal &= same
            took = (f"{by_way[name].at(each).recovery_s[-1]:.2f} s" for each in runs._distances)
            tell(f"  {name:12}{', '.join(took)}; weights {'equal' if same else 'DIFFER'}")
    results = []
    for num in args.shares:
        for distance in sorted(args.distances):
            results.append(result(num, distance, by_way, runs.profile) | {"equal": equal})
    works = [one["work"] for one in results if one["shares"] == 2]
    return {
        **results[-1], "name": "parallel", "equal": equal, "within": all(work <= MOST_WORK for work in works),
        "machine": machine(), "cases": results,
    }  # fmt: skip


def result(num_shares: int, distance: int, by_way: dict[str, Case], profile: Profile | None) -> dict[str, Any]:
    ours, alone, rolled_back = by_way[f"d={num_shares}"], by_way["log"], by_way.get("checkpoint")
    one_alone = [each[0] for each in alone.busy[distance]]

    def part(of: Callable[[Busy], float]) -> float:
        busiest = [max(map(of, each)) for each in ours.busy[distance]]
        return statistics.median(busiest) / statistics.median(map(of, one_alone))

    model_s = [shared_s(profile, range(VICTIM, VICTIM + 1), num) for num in (1, num_shares)] if profile else [0.0, 1.0]
    return {
        "name": f"parallel/{num_shares}/{distance}",
        "shares": num_shares,
        "replayed": distance,
        "ours_s": ours.at(distance).replay_s,
        "peer_s": alone.at(distance).replay_s,
        "ratio": statistics.median(alone.at(distance).replay_s) / statistics.median(ours.at(distance).replay_s),
        "model_ratio": model_s[0] / model_s[1],
        "recovery_s": ours.at(distance).recovery_s,
        "alone_s": alone.at(distance).recovery_s,
        "rolled_back_s": rolled_back.at(distance).recovery_s if rolled_back is not None else [],
        "predicted_s": ours.predicted_s[distance],
        "alone_predicted_s": alone.predicted_s[distance],
        "busy": [[one._asdict() for one in each] for each in ours.busy[distance]],
        "alone_busy": [one._asdict() for one in one_alone],
        "work": part(lambda one: one.quiet_s),
        "work_as_it_was": part(lambda one: one.seconds),
    }


def report(case: dict[str, Any]) -> str:
    def mid(name: str) -> float:
        return statistics.median(case[name])

    def seconds(of: list[dict[str, float]]) -> str:
        return ", ".join(f"{one['quiet_s']:.2f}" for one in of)

    rolled = ""
    if case["rolled_back_s"]:
        times = mid("rolled_back_s") / mid("recovery_s")
        rolled = f", rolled back {mid('rolled_back_s'):.2f} s: {times:.1f} times"
    return (
        f"{case['shares']} processes, {case['replayed']} iterations: repeated in {mid('ours_s'):.2f} s, by one alone "
        f"in {mid('peer_s'):.2f} s: {case['ratio']:.2f} times faster (model: {case['model_ratio']:.2f}); all go on "
        f"after {mid('recovery_s'):.2f} s (predicted: {mid('predicted_s'):.2f} s), alone {mid('alone_s'):.2f} s "
        f"(predicted: {mid('alone_predicted_s'):.2f} s){rolled}; computed in each: {seconds(case['busy'][-1])} s, "
        f"alone {seconds(case['alone_busy'][-1:])} s: work {case['work']:.3f} (with what neighbours add: "
        f"{case['work_as_it_was']:.3f}); weights {'equal' if case['equal'] else 'DIFFER'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--quick", action="store_true", help="d = 2, 20 iterations, once, without rolling back")
    parser.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES), metavar="N",
                        help="iterations between checkpoint and kill")
    parser.add_argument("--shares", type=int, nargs="+", default=list(SHARES), metavar="D",
                        help="processes that repeat the stage")
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each kind")
    parser.add_argument("--layers", type=int, default=0, help="of each stage but the one that is lost")
    parser.add_argument("--large-layers", type=int, default=2, help="of that")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512, help="of a micro-batch, in words")
    parser.add_argument("--micro-batches", type=int, default=16, help="(default: 4 for each stage)")
    args = parser.parse_args()
    if args.quick:
        args.distances, args.shares, args.rounds = args.distances[:1], args.shares[:1], 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            found = measure(args, etcd.config, Path(name))
    except Failed as error:
        tell(str(error))
        return 1
    if args.json:
        print(json.dumps(found))
    else:
        for case in found["cases"]:
            print(report(case))
        if not found["within"]:
            print(f"with two processes work is above {MOST_WORK}")
    return 0 if found["equal"] and found["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
