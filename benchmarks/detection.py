"""How long after a machine is cut from the network the others say that it is lost. Needs root and iproute2.

Each run: two nodes and a spare in network namespaces, with an etcd server that they all reach; the link of the node of
rank 0 is taken down, without a FIN, at a random moment of its heartbeats, and the time of the first line `lost node` of
another node is read from its log.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

import click
from _common import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.etcd_cluster import EtcdCluster, wait_for
from tests.support.job import Agents
from tests.support.leftovers import mark_children
from tests.support.network import Network, why_not

NODES = ("a", "b", "c")
LOST = re.compile(r"\[swift-run \w+ (\d\d:\d\d:\d\d\.\d\d\d)\] (?:generation 1: )?lost node\b")


def log(agents: Agents, node: str) -> str:
    path = agents.directory / f"agent.{node}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def one_cut(directory: Path) -> float:
    """Seconds from the cut to the first word of it."""
    script = directory / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    network = Network(len(NODES))
    prefixes = {node: host.prefix for node, host in zip(NODES, network.hosts, strict=True)}
    try:
        with EtcdCluster(directory, host=network.address) as etcd:
            agents = Agents(
                directory, etcd.endpoints[0], num_workers=1, options=("--spares", "1"), script=script,
                prefixes=prefixes,
            )  # fmt: skip
            try:
                for node in NODES:
                    agents.start(node)
                wait_for(lambda: sum("starts ranks" in log(agents, node) for node in NODES) == 2, 60.0, "the job")
                victim = next(node for node in NODES if re.search(r"starts ranks \[0\]", log(agents, node)))
                time.sleep(random.uniform(1.0, 1.2))
                cut = datetime.now()
                network.hosts[NODES.index(victim)].cut()
                others = [node for node in NODES if node != victim]
                wait_for(lambda: any(LOST.search(log(agents, node)) for node in others), 60.0, "the loss")
                said = min(found[1] for node in others if (found := LOST.search(log(agents, node))))
                when = datetime.combine(cut.date(), datetime.strptime(said, "%H:%M:%S.%f").time())
                return (when - cut).total_seconds()
            finally:
                agents.kill_all()
    finally:
        network.close()


@click.command()
@click.option("--runs", default=10, show_default=True, help="cuts, each of a job of its own")
@click.option("--json", "as_json", is_flag=True, help="one object instead of text")
def main(runs: int, as_json: bool) -> None:
    """Time from the cut of a machine's network to the word that it is lost."""
    reason = why_not()
    if reason:
        raise click.ClickException(reason)
    mark_children()
    found = []
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="sw") as directory:
            found.append(one_cut(Path(directory)))
        if not as_json:
            print(f"run {number + 1}: {found[-1]:.3f} s", flush=True)
    if as_json:
        print(json.dumps({"name": "detection", "ours_s": found, "machine": machine()}))
    else:
        print(f"{runs} cuts: {min(found):.3f} to {max(found):.3f} s, median {median(found):.3f} s")


if __name__ == "__main__":
    main()
