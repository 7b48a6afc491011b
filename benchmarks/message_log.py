"""What the log of messages between pipeline stages costs while nothing fails: time per iteration, and bytes.

Two jobs under swift-run at a time, without the log and with it, or with a script that saves each message to the disk
before it sends it (SWIFT's baseline); they take turns as in overhead.py. With the log all ranks agree to each update,
and have checksums of what they receive: "the log alone" is beside a job that does all of that, but keeps no message.
Stages are one per core, the schedule is 1F1B. The final weights must be equal bit for bit. Not called logging.py: a
script's directory comes first in its path, and Python's own `logging` would be that for every benchmark.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import NUM_NODES, ROOT, Failed, SwiftRun, machine, same_weights
from overhead import NUM_WARM_UP, Gated, Samples, take_turns

from swift_rendezvous.store.private_etcd import PrivateEtcd

SCRIPT = ROOT / "benchmarks" / "train_pipeline.py"
# What the other job does, and the one beside it.
WAYS = {"log": ("yes", "no"), "the log alone": ("yes", "counts"), "saved before each send": ("saves", "no")}
BYTES_PER_NUMBER = 4


def analytic_bytes(stages: int, shape: dict[str, int]) -> int:
    """Per iteration: each of the stages but the last sends an activation for every micro-batch, and gets a gradient of
    that size back (SWIFT, table 3)."""
    return 2 * (stages - 1) * shape["micro_batches"] * shape["length"] * shape["width"] * BYTES_PER_NUMBER


def logged(job: SwiftRun) -> tuple[int, int]:
    """Bytes in the logs of all ranks, and iterations that they are of. The job must be waiting."""
    num_bytes = sum(path.stat().st_size for path in job.directory.glob("**/messages-*/sent/*"))
    return num_bytes, job.last(0).iteration + 1


def measure(way: str, shape: dict[str, int], seconds: float, block_s: float, launches: int) -> dict[str, Any]:
    samples = Samples()
    per_iteration: list[float] = []
    for _ in range(launches):
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            args = ["--iterations", str(10**9), "--gate"]
            args += [text for key, value in shape.items() for text in (f"--{key.replace('_', '-')}", str(value))]
            plain, other = (
                SwiftRun(Path(name), [*args, "--messages", log], etcd.config, num_workers=1, script=SCRIPT)
                for log in reversed(WAYS[way])
            )
            peer, ours = Gated(plain), Gated(other)
            try:
                with plain, other:
                    iteration_s = max(each.block(NUM_WARM_UP)[0] for each in (peer, ours))
                    for each in (plain, other):
                        each.wait_ready()
                    block = max(2, round(block_s / iteration_s))
                    take_turns(peer, ours, seconds / launches, block, etcd.pid, samples)
                    if WAYS[way][0] == "yes":
                        if "logged no more" in other.tail():
                            raise Failed(f"the log was given up\n{other.tail()}")
                        num_bytes, iterations = logged(other)
                        per_iteration.append(num_bytes / iterations)
                    for each in (peer, ours):
                        each.order(0)
                        each.job.wait_end()
                    pairs = [(plain.directory / file.name, file) for file in other.directory.glob("weights*.pt")]
                    samples.equal &= len(pairs) == NUM_NODES and all(same_weights(*pair) for pair in pairs)
            finally:
                peer.close()
                ours.close()
    result = {"name": f"messages/{way}", **samples.result(), "num_launches": launches, "machine": machine()}
    if per_iteration:
        result["bytes_per_iteration"] = statistics.median(per_iteration)
        result["analytic_bytes"] = analytic_bytes(NUM_NODES, shape)
    return {**result, **shape}


def report(result: dict[str, Any]) -> str:
    ours, peer = (statistics.median(result[key]) * 1e3 for key in ("ours_s", "peer_s"))
    interval = result["cost_interval"]
    between = f", 95 %: {interval[0]:+.2%} to {interval[1]:+.2%}" if interval else ""
    text = (
        f"{result['name']}: {ours:.1f} ms per iteration, {peer:.1f} ms without; {result['cost']:+.2%} (median of "
        f"{result['num_pairs']} pairs in {result['num_launches']} launches{between}); "
        f"weights {'equal' if result['equal'] else 'DIFFER'}"
    )
    if "bytes_per_iteration" in result:
        found, expected = result["bytes_per_iteration"], result["analytic_bytes"]
        text += (
            f"\n    {found / 1e6:.3f} MB logged per iteration, {found / expected - 1:+.2%} beside the "
            f"{expected / 1e6:.3f} MB of its tensors"
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--quick", action="store_true", help="the first way only, within 60 s")
    parser.add_argument("--layers", type=int, default=2, help="of each of the two stages")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128, help="of a micro-batch, in words")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to measure each, without the start")
    parser.add_argument("--launches", type=int, default=6, help="of both jobs, in that time")
    parser.add_argument("--block-s", type=float, default=0.5, help="length of a turn, about")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.quick:
        args.ways, args.seconds, args.launches = args.ways[:1], 20.0, 1
    shape = {key: getattr(args, key) for key in ("layers", "width", "length", "micro_batches")}
    cases = []
    try:
        for way in args.ways:
            cases.append(measure(way, shape, args.seconds, args.block_s, args.launches))
            if not args.json:
                print(report(cases[-1]), flush=True)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    equal = all(case["equal"] for case in cases)
    if args.json:
        print(json.dumps({**cases[0], "equal": equal, "cases": cases}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
