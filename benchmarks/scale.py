"""How long a job of N nodes takes to form, and to replace a lost node: ours beside torch's dynamic rendezvous.

    python benchmarks/scale.py                  # N = 64, 256, 1024
    python benchmarks/scale.py --quick          # N = 64
    python benchmarks/scale.py --json --nodes 256 --runs 3

Simulated nodes, real clients and cores, one real etcd or one real TCPStore, on this machine; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

from _common import ROOT, Failed, machine

from swift_rendezvous.store.private_etcd import PrivateEtcd

NODES = [64, 256, 1024]
QUICK = [64]
NUM_SPARES = 1
START_TIMEOUT_S = 300.0
EVENTS = ("form", "lose")


class Fleet:
    """The nodes of one side, spread evenly over the processes."""

    def __init__(self, side: str, order: dict[str, Any], num_processes: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        total = order["num_nodes"] + NUM_SPARES
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        # Else who comes in a later round waits for ever for an address that rank 0 writes in its first round only.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / room) for room in ("", "rendezvous", "recovery"))
        self._processes: list[subprocess.Popen[str]] = []
        first = 0
        for index in range(num_processes):
            count = total // num_processes + (index < total % num_processes)
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "_scale_nodes.py")], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            self._processes.append(process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
            spares = NUM_SPARES if index == 0 else 0
            self._tell(process, {"side": side, "first": first, "count": count, "num_spares": spares, **order})
            first += count
        self._wait(START_TIMEOUT_S)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Seconds from the order until the last node was there, and what was sent and received per node."""
        began_s = time.monotonic()
        answers = self.tell(order)
        counts = Counter[str]()
        for answer in answers:
            counts.update(answer["counts"])
        return {
            "seen_s": max(answer["seen_s"] for answer in answers) - began_s,
            "ready_s": max(answer["ready_s"] for answer in answers) - began_s,
            "counts": counts,
        }

    def tell(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all processes."""
        for process in self._processes:
            self._tell(process, order)
        return self._wait(self._limit_s)

    def _tell(self, process: subprocess.Popen[str], order: dict[str, Any]) -> None:
        assert process.stdin is not None
        print(json.dumps(order), file=process.stdin, flush=True)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": f"a process of the nodes ended with code {process.wait()}"})

    def _wait(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + timeout_s
        answers: list[dict[str, Any]] = []
        while len(answers) < len(self._processes):
            try:
                answers.append(self._answers.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                raise TimeoutError(f"not done after {timeout_s:g} s") from None
            if "error" in answers[-1]:
                raise Failed(answers[-1]["error"])
        return answers


def run(side: str, num_nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One job of *num_nodes*: formed, then a node lost. {"form": {...}, "lose": {...}} as `Fleet.do` has it; an event
    that was not over in time is left out, with all after it."""
    order: dict[str, Any] = {
        "num_nodes": num_nodes, "num_workers": options.workers, "job": f"scale-{uuid.uuid4().hex[:8]}",
        "limit_s": options.limit,
    }  # fmt: skip
    found: dict[str, Any] = {}

    def measure() -> None:
        with Fleet(side, order, options.processes, options.limit) as fleet:
            try:
                found["form"] = fleet.do({"do": "form"})
                # Neither the first slot, nor in the same process as the first for every N. Dead everywhere before it
                # is noticed anywhere, or a process that is late finds it alive and thrown out.
                fleet.tell({"do": "die", "slot": num_nodes // 2 + 1})
                found["lose"] = fleet.do({"do": "lose"})
            except TimeoutError:
                return

    if side == "ours":
        with PrivateEtcd() as server:
            order["endpoint"] = server.endpoint
            measure()
    else:
        from torch.distributed import TCPStore

        # Hosted by a process of its own side, as by torchrun's first agent; here that is the benchmark's.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        order["port"] = store.port
        measure()
        del store
    return found


def case(num_nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns, and the medians of each event."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for number in range(options.runs):
        sides = ["ours", "peer"] if number % 2 == 0 else ["peer", "ours"]
        for side in sides:
            if side == "ours" or not options.no_peer:
                print(f"{num_nodes} nodes, run {number + 1}: {side} ...", file=sys.stderr, flush=True)
                runs[side].append(run(side, num_nodes, options))
    found: dict[str, Any] = {"num_nodes": num_nodes}
    for event in EVENTS:
        ours = [one[event] for one in runs["ours"] if event in one]
        peer = [one[event] for one in runs["peer"] if event in one]
        ours_s, peer_s = [one["seen_s"] for one in ours], [one["seen_s"] for one in peer]
        ready_s = [one["ready_s"] for one in ours]
        counts = sorted(ours[-1]["counts"].items()) if ours else []
        per_node = {name: round(count / num_nodes, 1) for name, count in counts}
        found[event] = {
            "ours_s": ours_s, "ready_s": ready_s, "peer_s": peer_s, "per_node": per_node,
            "peer_requests_per_node": round(peer[-1]["counts"]["requests"] / num_nodes, 1) if peer else None,
            "ratio": _ratio(peer_s, ours_s), "ratio_ready": _ratio(peer_s, ready_s),
        }  # fmt: skip
    return found


def _ratio(peer_s: list[float], ours_s: list[float]) -> float | None:
    return statistics.median(peer_s) / statistics.median(ours_s) if peer_s and ours_s else None


def _table(cases: list[dict[str, Any]], limit_s: float, with_peer: bool) -> list[str]:
    lines = [
        "| nodes | event | seen by all | all may go on | torch | ratios | requests per node | watch events per node |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in cases:
        for event, name in zip(EVENTS, ("first generation", "lost node"), strict=True):
            of = one[event]
            cells = [_seconds(of[key], limit_s) for key in ("ours_s", "ready_s", "peer_s")]
            if not with_peer:
                cells[-1] = "not run"
            ratio = "" if of["ratio_ready"] is None else f"{of['ratio']:.1f}, {of['ratio_ready']:.1f}"
            requests = str(of["per_node"].get("requests"))
            if of["peer_requests_per_node"] is not None:
                requests += f" against {of['peer_requests_per_node']}"
            events = of["per_node"].get("events")
            lines.append(f"| {one['num_nodes']} | {name} | {' | '.join(cells)} | {ratio} | {requests} | {events} |")
    return lines


def _seconds(values: list[float], limit_s: float) -> str:
    return f"{statistics.median(values):.2f} s" if values else f"over {limit_s:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"N = {QUICK} only, once")
    parser.add_argument("--nodes", help="numbers of nodes, for example 64,256")
    parser.add_argument("--runs", type=int, default=3, help="of each side for each N (default 3)")
    parser.add_argument("--processes", type=int, default=4, help="that the nodes of a side are spread over (default 4)")
    parser.add_argument("--workers", type=int, default=8, help="per node, in the records only (default 8)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one event (default 300)")
    parser.add_argument("--no-peer", action="store_true", help="ours only")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.runs = options.nodes or ",".join(map(str, QUICK)), 1
    sizes = [int(text) for text in options.nodes.split(",")] if options.nodes else NODES
    cases = [case(num_nodes, options) for num_nodes in sizes]
    at = next((one for one in cases if one["num_nodes"] == 256), cases[-1])["lose"]
    result = {
        "name": "scale", "ours_s": at["ours_s"], "peer_s": at["peer_s"], "ratio": at["ratio"], "cases": cases,
        "num_processes": options.processes, "num_workers": options.workers, "machine": machine(),
    }  # fmt: skip
    print(json.dumps(result) if options.json else "\n".join(_table(cases, options.limit, not options.no_peer)))


if __name__ == "__main__":
    main()
