"""Lose a node in the middle of an iteration, and show that nothing else is lost.

Starts a private etcd and three agents as separate processes: two nodes of two workers train `digits.py`, the third one
is a spare. One of the two is killed with SIGKILL, agent and workers, while its workers are inside an iteration. Then
the same training runs undisturbed, and the two results are compared. Exits with 1 if anything is not as it should be.

Everything runs on loopback, in a temporary directory; nothing is left, also after Ctrl-C, but a page that shows what
happened (`--html`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swift_rendezvous.codec import decode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, GenerationRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValue
from swift_rendezvous.store.private_etcd import PrivateEtcd

HERE = Path(__file__).resolve().parent
NUM_WORKERS = 2
COLOURS = {"node-a": "cyan", "node-b": "magenta", "node-c": "yellow"}
# What each phase of a recovery is, in the order in which they happen.
MEANING = {
    "detect": "until another agent has noticed the loss",
    "agree": "who takes the place of the lost node",
    "plan": "what the survivors hold, and who gives it to whom",
    "start": "the replacement's workers come to life",
    "set-up": "the replacement's script builds model and optimizer",
    "regroup": "new connections under the old process groups",
    "transfer": "state from a replica to the replacement",
    "verify": "checksums of all replicas",
    "recover": "the longest that a worker was out of its loop",
    "iteration": "the first new iteration",
}

console = Console(highlight=False, soft_wrap=True)


class Failed(Exception):
    """The demo did not show what it should; the message says what."""


@dataclass(frozen=True)
class Step:
    """A line that a worker has left in its progress file (see `digits.Progress`)."""

    time_s: float
    pid: int
    what: str
    iteration: int


class Run:
    """One training run: its agents, what they print, and the progress of its workers."""

    def __init__(
        self, name: str, endpoint: str, directory: Path, nodes: list[str], num_spares: int, epochs: int
    ) -> None:
        self.job_id = f"demo-{name}"
        self.keys = Keys(self.job_id)
        self.weights = directory / f"{name}.pt"
        self._progress = directory / name
        self._progress.mkdir()
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.journals = directory / f"{name}.journals"
        self.num_epochs = 0
        self.accuracy = ""
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        command = [
            sys.executable, "-m", "swift_agent.run", "--nnodes", "2", "--nproc-per-node", str(NUM_WORKERS),
            "--spares", str(num_spares), "--rdzv-endpoint", endpoint, "--rdzv-id", self.job_id,
            "--journal", str(self.journals),
        ]  # fmt: skip
        script = [str(HERE / "digits.py"), "--epochs", str(epochs), "--progress", str(self._progress),
                  "--out", str(self.weights)]
        roots = [str(HERE.parent / room) for room in ("", "rendezvous", "recovery", "logging_store")]
        paths = [*roots, os.environ.get("PYTHONPATH", "")]
        # What a killed agent leaves in its temporary directory goes with ours. A user gives --job-secret-file FILE.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
               "TMPDIR": str(directory), "SWIFT_JOB_SECRET": secrets.token_hex(16)}
        env.pop("SWIFT_JOB_SECRET_FILE", None)
        self.environment = env
        for node in nodes:
            # A session of its own: Ctrl-C reaches only the demo, which then ends its agents.
            self.agents[node] = subprocess.Popen(
                [*command, "--node-id", node, *script], env=env, text=True, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            reader = threading.Thread(target=self._read, args=(node,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, node: str) -> None:
        stream = self.agents[node].stdout
        assert stream is not None
        for line in stream:
            self._lines.put((node, line.rstrip()))

    def show(self) -> None:
        """Print what the agents and workers have said since the last call."""
        while not self._lines.empty():
            node, line = self._lines.get()
            if "test accuracy" in line:
                self.num_epochs += 1
                self.accuracy = line.rpartition(" ")[2]
            text = line.replace(f"[swift-run {node} ", "[")
            console.print(f"[{COLOURS[node]}]{node}[/] {escape(text)}")

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Show lines until *condition* gives something; raises Failed when time is over or an agent ends badly."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.show()
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline_s:
                raise Failed(f"{what}: not within {timeout_s:g} s")
            for node, agent in self.agents.items():
                if agent.poll() not in (None, 0, -signal.SIGKILL):
                    self.show()
                    raise Failed(f"the agent of {node} ended with exit code {agent.returncode}")
            time.sleep(0.02)

    def steps(self, rank: int) -> list[Step]:
        path = self._progress / f"rank{rank}"
        if not path.exists():
            return []
        found = []
        for line in path.read_text().splitlines(keepends=True):
            fields = line.split()
            if line.endswith("\n") and len(fields) == 4:  # the last line may be half written
                found.append(Step(float(fields[0]), int(fields[1]), fields[2], int(fields[3])))
        return found

    def finish(self) -> None:
        """Wait for the end; raises Failed unless every agent that lives has succeeded."""
        agents = self.agents.values()
        self.wait_for(lambda: all(agent.poll() is not None for agent in agents), "the end of training", 90.0)
        for reader in self._readers:
            reader.join(timeout=10.0)
        self.show()
        if not self.weights.exists():
            raise Failed("the run ended without final weights")

    def stop(self) -> None:
        """End what is left: the agents end their workers; who does not within seconds is killed."""
        living = [agent for agent in self.agents.values() if agent.poll() is None]
        left = [process for agent in living for process in family(agent.pid)]
        for agent in living:
            agent.terminate()
        _, alive = psutil.wait_procs(left, timeout=10.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in living:
            agent.wait()


def family(pid: int) -> list[psutil.Process]:
    """An agent and all processes under it."""
    try:
        agent = psutil.Process(pid)
        return [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_in_the_middle(run: Run, node: str, ranks: list[int]) -> tuple[float, int]:
    """SIGKILL agent and workers of *node* while *ranks* are inside an iteration; returns the time and which iteration.

    The workers are frozen first, at a random moment. If one of them is not inside an iteration, all go on and another
    moment is tried. So what the progress files say is still true when the node dies.
    """
    frozen = [psutil.Process(run.steps(rank)[-1].pid) for rank in ranks]
    for _ in range(200):
        time.sleep(random.uniform(0.001, 0.02))
        for process in frozen:
            process.suspend()
        for process in frozen:
            # A stop takes effect when the process is next scheduled; its last words before that count.
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                os.sched_yield()
        last = [run.steps(rank)[-1] for rank in ranks]
        if all(step.what == "begin" for step in last) and len({step.iteration for step in last}) == 1:
            victims = family(run.agents[node].pid)  # the agent first: it must not see its workers die
            killed_s = time.monotonic()
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.agents[node].wait()
            return killed_s, last[0].iteration
        for process in frozen:
            process.resume()
    raise Failed("no moment was found at which all workers of the node were inside one iteration")


def entries(config: EtcdConfig, prefix: str) -> list[KeyValue]:
    """What etcd holds under *prefix*. A connection for each look: this is not often asked."""
    with EtcdStore(config) as store:
        return store.get_prefix(prefix)[0]


def roster(config: EtcdConfig, keys: Keys) -> GenerationRecord:
    """Which node owns which slot."""
    return decode(GenerationRecord, entries(config, keys.generation)[0].value)


def recovered(config: EtcdConfig, keys: Keys) -> EventRecord | None:
    """The agents' own record of the recovery, once it is there."""
    events = [decode(EventRecord, entry.value) for entry in entries(config, f"{keys.prefix}events/")]
    return next((event for event in events if event.what == "recovered"), None)


def disturbed(run: Run, etcd: EtcdConfig, epochs: int) -> None:
    """Train, lose a node, recover, finish; prints the story and checks it."""
    run.wait_for(lambda: all(run.steps(rank) for rank in range(2 * NUM_WORKERS)), "training to begin")
    before = roster(etcd, run.keys)
    spare = next(node for node in run.agents if node not in {owner.node_id for owner in before.slots})
    victim = before.slots[1].node_id
    ranks, kept = [NUM_WORKERS, NUM_WORKERS + 1], list(range(NUM_WORKERS))

    def well_under_way() -> bool:
        """With the spare warm: its standby server and one waiting process per worker. But before it is too late."""
        warm = len(family(run.agents[spare].pid)) >= 2 + NUM_WORKERS
        return run.num_epochs > epochs * (1 if warm else 2) // 3

    run.wait_for(well_under_way, "a third of the training")
    pids = {rank: run.steps(rank)[-1].pid for rank in kept}

    killed_s, iteration = kill_in_the_middle(run, victim, ranks)
    wall_minus_clock_s = time.time() - time.monotonic()
    run.show()
    heading(f"{victim} (agent and ranks {ranks}) was killed with SIGKILL in the middle of iteration {iteration}")

    run.wait_for(lambda: all(run.steps(rank)[-1].iteration > iteration for rank in [*kept, *ranks]), "the recovery")
    event: EventRecord = run.wait_for(lambda: recovered(etcd, run.keys), "the record of the recovery")
    after = roster(etcd, run.keys)
    run.finish()

    show_timeline(run, event, killed_s, wall_minus_clock_s, len(before.slots) * NUM_WORKERS, ranks[0])
    check(f"{after.slots[1].node_id} took slot 1: ranks {ranks} are where they were",
          after.slots[1].node_id == spare and after.slots[0] == before.slots[0])
    seen = {rank: {step.pid for step in run.steps(rank)} for rank in [*kept, *ranks]}
    check(f"the survivors kept their processes: {', '.join(f'rank {r} pid {p}' for r, p in pids.items())}",
          all(seen[rank] == {pids[rank]} for rank in kept))
    check("each lost rank was started again once", all(len(seen[rank]) == 2 for rank in ranks))


def show_timeline(
    run: Run, event: EventRecord, killed_s: float, wall_minus_clock_s: float, world_size: int, lost: int
) -> None:
    """Print how long each phase took, and the whole from the kill on."""
    phases = dict(event.details["phases_s"])
    # The record is written when the last phase is over, so the first began that much earlier.
    phases = {"detect": event.time_s - phases.pop("total") - (killed_s + wall_minus_clock_s), **phases}
    table = Table(title="Recovery", title_justify="left")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("what it is")
    for name, seconds in phases.items():
        table.add_row(name, f"{seconds * 1000:.0f}", MEANING.get(name, ""))
    first_pid = run.steps(lost)[0].pid
    again = next(step for step in run.steps(lost) if step.pid != first_pid and step.what == "end")
    ends_s = [
        next(step.time_s for step in run.steps(rank)
             if step.what == "end" and step.iteration == again.iteration and step.time_s > killed_s)
        for rank in range(world_size)
    ]  # fmt: skip
    table.add_section()
    table.add_row("in all", f"{(max(ends_s) - killed_s) * 1000:.0f}",
                  f"from the kill until all ranks had finished iteration {again.iteration}, by the workers' clocks")
    console.print(table)
    console.print("Phases are the slowest worker's, and some overlap: start and set-up run beside what survivors do.\n")


def write_page(run: Run, path: Path) -> None:
    """What its agents have written down, as a page to look at."""
    command = [sys.executable, "-m", "swift_agent.ctl", "timeline", "--journal", str(run.journals), "--html", str(path)]
    written = subprocess.run(command, env=run.environment, capture_output=True, text=True)
    if written.returncode != 0:
        raise Failed(f"no page was written: {written.stderr.strip()}")
    console.print(f"A page that shows the failure and the recovery: {path.resolve().as_uri()}")


def compare(first: Path, second: Path) -> bool:
    """Whether two files hold the same tensors, bit for bit."""
    one, two = (torch.load(path, weights_only=True) for path in (first, second))
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


def check(what: str, holds: bool) -> None:
    console.print(f"[green]ok[/]  {what}" if holds else f"[red]NOT TRUE:[/] {what}")
    if not holds:
        raise Failed(what)


def heading(text: str) -> None:
    console.print(f"\n[bold]== {escape(text)}[/]")


@contextlib.contextmanager
def stopping(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        run.stop()


def demo(epochs: int, page: Path) -> None:
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="swift-demo-") as name,
        PrivateEtcd() as etcd,
    ):
        directory = Path(name)
        heading("Three agents start: two nodes of two workers train, one is a spare")
        with stopping(Run("failure", etcd.endpoint, directory, ["node-a", "node-b", "node-c"], 1, epochs)) as first:
            disturbed(first, etcd.config, epochs)
        heading("The same training, undisturbed")
        with stopping(Run("undisturbed", etcd.endpoint, directory, ["node-a", "node-b"], 0, epochs)) as second:
            second.finish()
        heading("Compared")
        console.print(f"test accuracy: {first.accuracy} with a node lost, {second.accuracy} undisturbed")
        check("the final weights are identical bit for bit", compare(first.weights, second.weights))
        check("so is the test accuracy", first.accuracy == second.accuracy != "")
        check("nothing of the jobs is left in etcd", entries(etcd.config, "/swift/") == [])
        write_page(first, page)
    console.print(f"The demo took {time.monotonic() - began_s:.0f} s.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a node of a running job and see it recover.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--html", type=Path, default=Path("demo.html"), help="where the page is written that shows it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        demo(args.epochs, args.html)
    except Failed as error:
        console.print(f"[bold red]demo failed:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything was stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
