"""Those figures of the SWIFT paper that can be run on one machine, scaled down: real jobs, and real kills by pid.

    throughput   iterations per second around a failure (figure 8): a pipeline by logs, data parallel by replicas, and
                 torchrun, which restarts all from a checkpoint
    timeline     the phases of a recovery one after the other (figure 10)
    replicas     replication beside that global restart: seconds of a recovery, and iterations lost
    logging      the log of messages beside checkpoints that all wait for, and beside neither: cost, and recovery
    undo         the loss of a run whose update was cut and undone, beside an undisturbed one

Each prints a line; `--figures DIR` has its data and its plot, `--json FILE` all data in one. docs/reproduction.md says
what came out. Every job has a limit, and nothing is left of it. Must never draw what was not measured in this run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _experiment_plots as plots
import psutil
from _common import NUM_NODES, ROOT, Failed, Job, SwiftRun, Torchrun, machine, same_weights
from overhead import Gated

from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd

BENCHMARKS = ROOT / "benchmarks"
PIPELINE, REPLICAS, UNDO = (BENCHMARKS / f"train_{name}.py" for name in ("pipeline", "ddp", "undo"))
SHAPE = ("--layers", "1", "--width", "256", "--length", "16")
# Of a script that trains replicas; its interval is train_ddp's.
SIZE = ("--state-mb", "20", "--batch-size", "128")
EVERY = {PIPELINE: 60, REPLICAS: 50}
DISTANCE = 40  # from a checkpoint to the kill, in iterations
NUM_AFTER = 40
LIMIT_S = 90.0
# Of `logging`: iterations between checkpoints, and in a turn of each job, which has one checkpoint in its middle.
TURN = 10
NUM_WARM_UP = 2 * TURN + TURN // 2
NUM_CURVE, CUT_AT = 150, 70


@dataclass
class Failure:
    """One kill, seconds of the job's own time. *made_up_s*: until all ranks have finished the iteration after the last
    one that anybody had finished before it. *lost*: iterations finished by then that all ranks ran again, *repeated*:
    that some did. *phases_s* and *detect_s*: of swift-run's history, {} and None for others."""

    at_s: float
    made_up_s: float
    lost: int
    repeated: int
    phases_s: dict[str, float] = field(default_factory=dict)
    detect_s: float | None = None


@dataclass
class Ran:
    """A job that was disturbed. *ends_s*: of each iteration on rank 0, *numbers*: which one that was; both in the order
    of time, from the job's first one on. *iteration_s*: undisturbed."""

    name: str
    ends_s: list[float]
    numbers: list[int]
    failures: list[Failure]
    iteration_s: float
    equal: bool | None = None


@dataclass(frozen=True)
class Bench:
    """What all experiments run on. *runs*: jobs that several of them look at, each run once."""

    etcd: EtcdConfig
    directory: Path
    quick: bool
    runs: dict[str, Ran] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return 1 if self.quick else 2

    def job(self, launcher: str, script: Path, args: tuple[str, ...]) -> Job:
        if launcher == "torchrun":
            return Torchrun(self.directory, args, 0, self.num_workers, script)
        return SwiftRun(self.directory, args, self.etcd, 0, self.num_workers, script)

    def disturbed(self, name: str) -> Ran:
        """Of `DISTURBED`."""
        if name not in self.runs:
            launcher, script, args = DISTURBED[name]
            self.runs[name] = disturb(self.job(launcher, script, args), name, EVERY[script], 1 if self.quick else 2)
        return self.runs[name]


DISTURBED: dict[str, tuple[str, Path, tuple[str, ...]]] = {
    "pipeline, logs": ("swift-run", PIPELINE, (*SHAPE, "--checkpoint-every", str(EVERY[PIPELINE]))),
    "pipeline, restart from a checkpoint": ("torchrun", PIPELINE, (*SHAPE, "--checkpoint-every", str(EVERY[PIPELINE]))),
    "pipeline, restart from nothing": ("torchrun", PIPELINE, SHAPE),
    "data parallel, replicas": ("swift-run", REPLICAS, SIZE),
    "data parallel, restart from a checkpoint": ("torchrun", REPLICAS, SIZE),
}


def disturb(job: Job, name: str, every: int, num_kills: int) -> Ran:
    """Kill the last worker *num_kills* times, `DISTANCE` iterations after another checkpoint each time."""
    job.script_args += ["--iterations", str(every * num_kills + DISTANCE + NUM_AFTER)]
    ranks = range(job.world_size)
    failures: list[Failure] = []
    with job:
        job.go()
        job.wait_iteration(0, LIMIT_S)
        began_s = max(job.log(rank)[0].time_s for rank in ranks)
        for number in range(num_kills):
            job.wait_iteration(every * (number + 1) + DISTANCE - 1, LIMIT_S)
            job.wait_ready()
            failures.append(kill(job, job.world_size - 1, number, began_s))
        job.wait_end(LIMIT_S)
        found = job.log(0)
    first_s = began_s + failures[0].at_s
    before = [entry.time_s for entry in found if first_s - 2.0 < entry.time_s <= first_s]
    return Ran(
        name, [entry.time_s - began_s for entry in found], [entry.iteration for entry in found], failures,
        (before[-1] - before[0]) / (len(before) - 1),
    )  # fmt: skip


def kill(job: Job, rank: int, number: int, began_s: float) -> Failure:
    """By the id of the process that is *rank* now."""
    ranks = range(job.world_size)
    victim = psutil.Process(job.last(rank).pid)
    killed_s, killed_unix_s = time.monotonic(), time.time()
    victim.kill()
    finished = max(entry.iteration for each in ranks for entry in job.log(each) if entry.time_s <= killed_s)

    def ends() -> list[float] | None:
        new = [[e.time_s for e in job.log(each) if e.time_s > killed_s and e.iteration > finished] for each in ranks]
        return [times_s[0] for times_s in new] if all(new) else None

    made_up_s = max(job.wait_for(ends, f"iteration {finished + 1} on all ranks", LIMIT_S)) - killed_s
    firsts = [next(e.iteration for e in job.log(each) if e.time_s > killed_s) for each in ranks]
    failure = Failure(
        killed_s - began_s, made_up_s, max(0, finished + 1 - max(firsts)), max(0, finished + 1 - min(firsts))
    )
    if isinstance(job, SwiftRun):
        job.wait_for(lambda: len(job.phases()) > number, "record of the recovery", 10.0)
        failure.phases_s = job.phases()[-1]
        noticed_s = [event.time_s for event in job.events() if event.what == "generation (replace)"][-1]
        failure.detect_s = max(0.0, noticed_s - failure.phases_s["agree"] - killed_unix_s)
    return failure


def median(ran: Ran, what: str) -> float:
    return statistics.median(getattr(failure, what) for failure in ran.failures)


def throughput(bench: Bench) -> tuple[str, dict[str, Any]]:
    names = ["pipeline, logs", "pipeline, restart from a checkpoint"]
    names += ["data parallel, replicas", "data parallel, restart from a checkpoint"]
    runs = [bench.disturbed(name) for name in names]
    said = "; ".join(f"{ran.name}: {1 / ran.iteration_s:.1f} iterations/s, made up {median(ran, 'made_up_s'):.2f} s "
                     "after the kill" for ran in runs)  # fmt: skip
    return said, {"runs": [asdict(ran) for ran in runs]}


def timeline(bench: Bench) -> tuple[str, dict[str, Any]]:
    bars: dict[str, dict[str, float]] = {}
    for name in ("pipeline, logs", "data parallel, replicas"):
        failures = bench.disturbed(name).failures
        known = list(dict.fromkeys(phase for failure in failures for phase in failure.phases_s))
        middle = {phase: statistics.median(f.phases_s.get(phase, 0.0) for f in failures) for phase in known}
        detect_s = statistics.median(failure.detect_s or 0.0 for failure in failures)
        bars[name] = {"detect": detect_s, **middle, "from the kill": median(bench.disturbed(name), "made_up_s")}
    said = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {seconds * 1e3:.0f}" for phase, seconds in bar.items()) + " ms"
        for name, bar in bars.items()
    )
    return said, {"bars": bars}


def replicas(bench: Bench) -> tuple[str, dict[str, Any]]:
    ours, peer = (bench.disturbed(f"data parallel, {way}") for way in ("replicas", "restart from a checkpoint"))
    ratio = median(peer, "made_up_s") / median(ours, "made_up_s")
    said = (
        f"replicas {median(ours, 'made_up_s'):.2f} s and {median(ours, 'lost'):g} iterations lost, restart from a "
        f"checkpoint {median(peer, 'made_up_s'):.2f} s and {median(peer, 'lost'):g}: {1 - 1 / ratio:.1%} less, kills: "
        f"{len(ours.failures)} each"
    )
    return said, {"runs": [asdict(ours), asdict(peer)], "less": 1 - 1 / ratio}


EACH_MESSAGE = "each message saved before it is sent"
# Of `logging`; the recovery of each, if it has one.
WAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "neither": (("--messages", "no"), "pipeline, restart from nothing"),
    "log, checkpoints beside": (("--messages", "yes", "--checkpoint-every", str(TURN)), "pipeline, logs"),
    "checkpoints that all wait for": (
        ("--messages", "no", "--save-every", str(TURN)), "pipeline, restart from a checkpoint",
    ),
    EACH_MESSAGE: (("--messages", "saves"), ""),
}  # fmt: skip


def logging_(bench: Bench) -> tuple[str, dict[str, Any]]:
    """Two stages, one for each core. The jobs are all there at once and take turns; the others wait meanwhile."""
    ways = {way: args for way, (args, _) in WAYS.items() if not bench.quick or way != EACH_MESSAGE}
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        gated = {}
        for way, args in ways.items():
            every = [*SHAPE, "--iterations", str(10**9), "--gate", *args]
            job = SwiftRun(bench.directory, every, bench.etcd, num_workers=1, script=PIPELINE)
            gated[way] = Gated(job)
            stack.callback(gated[way].close)
            stack.enter_context(job)
        for one in gated.values():
            one.block(NUM_WARM_UP)
            one.job.wait_ready()
        for turn in range(4 if bench.quick else 20):
            for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                times_s[way].append(gated[way].block(TURN)[0])
        for one in gated.values():
            one.order(0)
            one.job.wait_end(LIMIT_S)
        weights = [[one.job.weights, one.job.weights.with_name("weights1.pt")] for one in gated.values()]
        equal = all(same_weights(*pair) for paths in weights[1:] for pair in zip(weights[0], paths, strict=True))
    if not equal:
        raise Failed("the weights of these jobs differ")
    found: dict[str, Any] = {}
    for way in ways:
        _, recovery = WAYS[way]
        cost = statistics.median(own / base - 1 for own, base in zip(times_s[way], times_s["neither"], strict=True))
        # To start over takes a job of its own, of which nothing else is seen.
        ran = bench.disturbed(recovery) if recovery and not (bench.quick and way == "neither") else None
        found[way] = {"iteration_s": times_s[way], "cost": cost, "recovery_s": ran and median(ran, "made_up_s")}
    said = "; ".join(
        f"{way}: {statistics.median(one['iteration_s']) * 1e3:.1f} ms ({one['cost']:+.1%})"
        + (f", recovery {one['recovery_s']:.2f} s" if one["recovery_s"] else "")
        for way, one in found.items()
    )
    return f"a checkpoint every {TURN} iterations: {said}", {"ways": found, "every": TURN}


def undo(bench: Bench) -> tuple[str, dict[str, Any]]:
    """No times are taken: the three jobs run beside each other."""
    curves: dict[str, list[float]] = {}
    again: dict[str, tuple[float, float]] = {}
    ways = {"undisturbed": (), "undone": ("--stop-at", str(CUT_AT)),
            "put back from copies": ("--stop-at", str(CUT_AT), "--exact")}  # fmt: skip
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for way, args in ways.items():
            every = ["--iterations", str(NUM_CURVE), *args]
            jobs[way] = SwiftRun(bench.directory, every, bench.etcd, num_workers=1, script=UNDO)
            stack.enter_context(jobs[way])
        for way, job in jobs.items():
            if way != "undisturbed":
                path = job.directory / "stopped"
                job.wait_for(path.exists, f"rank in the middle of update {CUT_AT}", LIMIT_S)
                psutil.Process(int(path.read_text())).kill()
        for way, job in jobs.items():
            job.wait_end(LIMIT_S)
            lines = (job.directory / "losses").read_text().splitlines()
            told = [line.split(": ")[1].split() for line in lines if line.startswith("began again: ")]
            again.update({way: (float(told[0][0]), float(told[0][1]))} if told else {})
            numbered = [line.split() for line in lines if not line.startswith("began again")]
            curves[way] = [float(loss) for _, loss in numbered]
            expected = {"undone": "undone, within the rounding", "put back from copies": "put back from copies"}
            if len(curves[way]) != NUM_CURVE or expected.get(way, "") not in said(job):
                raise Failed(f"{way}: {len(curves[way])} losses, and not what was to be seen\n{job.tail()}")
    worst = {way: max(abs(a - b) for a, b in zip(curves[way], curves["undisturbed"], strict=True)) for way in again}
    parts = "; ".join(
        f"{way}: parameters begin again {again[way][0]:.1e} off ({again[way][1]:.2f} of the bound), losses differ by "
        f"{worst[way]:.1e} at most" for way in again
    )  # fmt: skip
    if again["undone"][1] > 1 or worst["put back from copies"] > 0:
        raise Failed(f"beyond what is documented: {parts}")
    return f"update {CUT_AT} of {NUM_CURVE} cut: {parts}", {"curves": curves, "again": again, "cut_at": CUT_AT}


def said(job: Job) -> str:
    return "".join(path.read_text(errors="replace") for path in job.directory.glob("agent*.log"))


EXPERIMENTS: dict[str, Callable[[Bench], tuple[str, dict[str, Any]]]] = {
    "throughput": throughput, "timeline": timeline, "replicas": replicas, "logging": logging_, "undo": undo,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which of them; default: all")
    parser.add_argument("--quick", action="store_true",
                        help="one kill of each job, of 2 workers and not 4; in 3 to 5 minutes")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write NAME.png and NAME.json; needs matplotlib")
    args = parser.parse_args()
    for name in args.names:
        if name not in EXPERIMENTS:
            parser.error(f"{name}: no such experiment; there are {', '.join(EXPERIMENTS)}")
    if args.figures and importlib.util.find_spec("matplotlib") is None:
        parser.error("--figures needs matplotlib; type: pip install 'swift-agent[plot]'")
    try:
        for directory in filter(None, (args.figures, args.json and args.json.parent)):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: dict[str, Any] = {"machine": machine(), "quick": args.quick, "num_nodes": NUM_NODES}
    failed = False
    with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-experiments-") as name:
        bench = Bench(etcd.config, Path(name), args.quick)
        for each in args.names or EXPERIMENTS:
            began_s = time.monotonic()
            try:
                line, data = EXPERIMENTS[each](bench)
            except Failed as error:
                print(f"{each}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            found[each] = data
            print(f"{each}: {line} [{time.monotonic() - began_s:.0f} s]", flush=True)
            if args.figures:
                (args.figures / f"{each}.json").write_text(json.dumps({"machine": found["machine"], **data}, indent=1))
                plots.DRAW[each](data, args.figures / f"{each}.png")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
