"""What updates in the backward gain, and what `exact=True` costs: time per iteration and peak memory of a worker.

Two jobs under swift-run at a time, without `overlap_update` and with it, which take turns as in overhead.py. The final
weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import Failed, SwiftRun, machine, same_weights
from overhead import NUM_WARM_UP, Gated, Samples, take_turns

from swift_rendezvous.store.private_etcd import PrivateEtcd

WAYS = {"overlap": ["--overlap"], "overlap, exact": ["--overlap", "--exact"]}


def peak_mb(job: SwiftRun) -> float:
    """Of the worker with the most, in 10^6 bytes."""
    statuses = [Path(f"/proc/{job.last(rank).pid}/status").read_text() for rank in range(job.world_size)]
    return max(int(status.split("VmHWM:")[1].split()[0]) for status in statuses) * 1024 / 1e6


def measure(way: str, state_mb: float, seconds: float, block_s: float, launches: int) -> dict[str, Any]:
    samples = Samples()
    peaks_mb: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(launches):
        with PrivateEtcd() as etcd, tempfile.TemporaryDirectory(prefix="swift-benchmark-") as name:
            args = ["--state-mb", str(state_mb), "--iterations", str(10**9), "--gate"]
            plain = SwiftRun(Path(name), args, etcd.config, num_workers=1)
            overlapped = SwiftRun(Path(name), [*args, *WAYS[way]], etcd.config, num_workers=1)
            peer, ours = Gated(plain), Gated(overlapped)
            try:
                with plain, overlapped:
                    iteration_s = max(each.block(NUM_WARM_UP)[0] for each in (peer, ours))
                    for each in (plain, overlapped):
                        each.wait_ready()
                    block = max(2, round(block_s / iteration_s))
                    take_turns(peer, ours, seconds / launches, block, etcd.pid, samples)
                    peaks_mb["ours"].append(peak_mb(overlapped))
                    peaks_mb["peer"].append(peak_mb(plain))
                    for each in (peer, ours):
                        each.order(0)
                        each.job.wait_end()
                    samples.equal &= same_weights(plain.weights, overlapped.weights)
            finally:
                peer.close()
                ours.close()
    medians_mb = {who: statistics.median(peaks) for who, peaks in peaks_mb.items()}
    result = {"name": f"{way}/{state_mb:g}MB", **samples.result(), "num_launches": launches, "machine": machine()}
    return {**result, "peak_mb": medians_mb}


def report(result: dict[str, Any]) -> str:
    ours, peer = (statistics.median(result[key]) * 1e3 for key in ("ours_s", "peer_s"))
    interval = result["cost_interval"]
    between = f", 95 %: {interval[0]:+.1%} to {interval[1]:+.1%}" if interval else ""
    more_mb = result["peak_mb"]["ours"] - result["peak_mb"]["peer"]
    return (
        f"{result['name']}: {ours:.2f} ms per iteration, {peer:.2f} ms without; {result['cost']:+.1%} (median of "
        f"{result['num_pairs']} pairs in {result['num_launches']} launches{between}); peak memory {more_mb:+.1f} MB; "
        f"weights {'equal' if result['equal'] else 'DIFFER'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--state-mb", type=float, nargs="+", default=[100.0], help="parameters and optimizer state")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to measure each, without the start")
    parser.add_argument("--launches", type=int, default=4, help="of both jobs, in that time")
    parser.add_argument("--block-s", type=float, default=0.4, help="length of a turn, about")
    args = parser.parse_args()
    cases = []
    try:
        for state_mb in args.state_mb:
            for way in WAYS:
                cases.append(measure(way, state_mb, args.seconds, args.block_s, args.launches))
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
