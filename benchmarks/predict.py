"""What a recovery takes beside what swift-run had predicted, from what the job measured of itself.

Each case is a job of its own: 4 nodes of one worker, and two kills of a worker, 20 and 50 iterations after the newest
checkpoint. Predicted is what the agents say of each recovery (`predicted_s` in the job's history) or, where all begin
again from a checkpoint, what the job's profile gives. Measured are the seconds from the SIGKILL until all ranks have
finished the next iteration. The rules: within a factor of 1.5 in 9 of 10, and the way that the job takes by itself is
the fastest of its script, or takes at most a fifth longer; exit code 1 if one is broken, or if the weights differ from
those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import ROOT, Failed, SwiftRun, machine, same_weights
from replay import Measured, kill

from swift_recovery.strategy.predict import rollback
from swift_recovery.strategy.profile import Profile, parse
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd

PIPELINE = ROOT / "benchmarks" / "train_pipeline.py"
REPLICAS = ROOT / "benchmarks" / "train_ddp.py"
NUM_NODES = 4
EVERY = 70
DISTANCES = (20, 50)
FACTOR = 1.5
PART_WITHIN = 0.9
# As many times as long as the fastest.
MOST_LONGER = 1.2
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Case:
    name: str
    script: Path
    options: tuple[str, ...] = ()
    num_spares: int = 0
    is_chosen: bool = False
    """It is what the job does by itself."""


CASES = (
    Case("replica", REPLICAS, is_chosen=True),
    Case("log", PIPELINE, is_chosen=True),
    Case("log groups", PIPELINE, ("--log-groups", "0-1,2-3")),
    Case("log+parallel", PIPELINE, ("--strategy", "log+parallel", "--helpers", "1"), num_spares=1),
    Case("checkpoint", PIPELINE, ("--strategy", "checkpoint")),
)


def run(
    case: Case, etcd: EtcdConfig, directory: Path, kills: bool
) -> tuple[SwiftRun, Measured, Profile | None, list[float]]:
    args = ["--iterations", str(EVERY * (len(DISTANCES) + 1))]
    if case.script is PIPELINE:
        args += ["--checkpoint-every", str(EVERY), "--width", "128"]
    else:
        args += ["--state-mb", "40"]
    measured, profile, predictions = Measured(), None, list[float]()
    with SwiftRun(
        directory, args, etcd, case.num_spares, 1, case.script, num_nodes=NUM_NODES, options=case.options
    ) as job:
        job.go()
        for number, distance in enumerate(DISTANCES if kills else ()):
            job.wait_iteration(EVERY * (number + 1) + distance - 1, TIMEOUT_S)
            job.wait_ready()
            if profile is None and (record := job.measured()) is not None:
                profile = parse(json.dumps(record.content))
            measured.replayed.append(kill(job, 1 + number, measured) - EVERY * (number + 1))
            if case.name != "checkpoint":
                job.wait_for(lambda told=number + 1: len(job.predictions()) >= told, "prediction", 10.0)  # type: ignore[misc]
                predictions = job.predictions()
        job.wait_end(TIMEOUT_S)
        return job, measured, profile, predictions


def measure(case: Case, etcd: EtcdConfig, directory: Path, reference: SwiftRun) -> dict[str, Any]:
    job, measured, profile, predictions = run(case, etcd, directory, kills=True)
    if profile is None:
        raise Failed(f"{case.name}: the job has not measured itself\n{job.tail()}")
    if case.name == "checkpoint":
        predictions = [rollback(profile, num).seconds for num in measured.replayed]
    names = [path.name for path in reference.directory.glob("weights*.pt")]
    return {
        "name": case.name,
        "measured_s": measured.recovery_s,
        "predicted_s": predictions,
        "factor": [took_s / said_s for took_s, said_s in zip(measured.recovery_s, predictions, strict=True)],
        "replayed": measured.replayed,
        "equal": all(same_weights(reference.directory / name, job.directory / name) for name in names),
    }


def longer_than_the_fastest(cases: list[Case], found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By the name of what a job does by itself: how many times as long that took as the fastest way of its script."""
    ratios = {}
    for chosen, own in zip(cases, found, strict=True):
        if chosen.is_chosen:
            same = [one["measured_s"] for case, one in zip(cases, found, strict=True) if case.script == chosen.script]
            fastest = map(min, zip(*same, strict=True))
            ratios[chosen.name] = [mine / best for mine, best in zip(own["measured_s"], fastest, strict=True)]
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the case \"log\" only, about two minutes")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    args = parser.parse_args()
    wanted = args.cases or (["log"] if args.quick else [case.name for case in CASES])
    cases = [case for case in CASES if case.name in wanted]
    found = []
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name, PrivateEtcd() as server:
        directory = Path(name)
        references: dict[Path, SwiftRun] = {}
        for case in cases:
            if case.script not in references:
                references[case.script], *_ = run(Case(case.name, case.script), server.config, directory, kills=False)
            found.append(measure(case, server.config, directory, references[case.script]))
            if not args.json:
                for took_s, said_s, num in zip(*(found[-1][key] for key in ("measured_s", "predicted_s", "replayed")),
                                               strict=True):  # fmt: skip
                    print(f"{case.name:12} {num:3} iterations: {took_s:5.2f} s, predicted {said_s:5.2f} s, "
                          f"{took_s / said_s:.2f} times as long; weights "
                          f"{'equal' if found[-1]['equal'] else 'DIFFER'}", flush=True)  # fmt: skip
    factors = [factor for case in found for factor in case["factor"]]
    within = sum(1 / FACTOR <= factor <= FACTOR for factor in factors) / len(factors)
    equal = all(case["equal"] for case in found)
    chosen = longer_than_the_fastest(cases, found)
    if args.json:
        print(json.dumps({"cases": found, "within": within, "chosen": chosen, "equal": equal, "machine": machine()}))
    else:
        print(f"{within:.0%} of {len(factors)} within a factor of {FACTOR}")
        for name, ratios in chosen.items():
            print(f"{name}, taken by itself: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times the fastest way")
    is_best = all(ratio <= MOST_LONGER for ratios in chosen.values() for ratio in ratios)
    return 0 if equal and within >= PART_WITHIN and is_best else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"{error}")
