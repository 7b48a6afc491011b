"""A soak: random failures of agents, workers, etcd members and links in one job; nothing lost, weights equal.

Two slots of `--workers` workers and a spare, three etcd members, a network namespace for each agent where that is
possible. README.md says what is drawn and what is looked at. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from _common import ROOT, machine

sys.path.insert(0, str(ROOT))  # it drives the agents that the fault tests drive

from tests.support.leftovers import mark_children
from tests.support.soak import soaking, summary


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--seed", type=int, help="the same failures in the same order; drawn if it is not given")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with failure N of that seed")
    parser.add_argument("--workers", type=int, default=2, help="per node, of two nodes")
    parser.add_argument("--bound", type=float, default=90.0, help="seconds for the job to go on after a failure")
    parser.add_argument("--strangers", action="store_true", help="neighbours connect, litter and use up descriptors")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for logs and records; it stays")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    mark_children()
    os.environ.setdefault("SWIFT_NATIVE_DIR", str(ROOT / ".cache" / "native"))
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    tell(f"seed {seed}")
    before = machine()
    with tempfile.TemporaryDirectory(prefix="swift-soak-") as name:
        directory = args.keep or Path(name)
        if args.keep:
            directory.mkdir(parents=True)
        directory = directory.resolve()
        with soaking(
            directory, seed, num_workers=args.workers, bound_s=args.bound, strangers=args.strangers, say=tell
        ) as soak:
            if soak.result.links:
                tell(f"links are left out: {soak.result.links}")
            result = soak.run(args.failures, args.first)
    if args.json:
        medians = {kind: {"num": len(v), "median": statistics.median(v), "worst": max(v)}
                   for kind, v in result.standstills(recovered=True).items()}  # fmt: skip
        found = {"name": "soak", "machine": before, "load_1min_after": machine()["load_1min"], "recoveries_s": medians,
                 "kinds": result.kinds(), **dataclasses.asdict(result)}  # fmt: skip
        print(json.dumps(found))
    else:
        print(summary(result))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
