"""One process full of simulated nodes, for scale.py: ours, or handlers of torch's dynamic rendezvous. No workers.

Reads orders from stdin and answers on stdout, one JSON object per line; ends with its parent. Times are
CLOCK_MONOTONIC of this machine.

    {"side", "first", "count", ...}    make the nodes                          -> {"ready": true}
    {"do": "form"}                     all enter the job at once               -> {"seen_s", "ready_s", "counts"}
    {"do": "die", "slot"}              the owner of that slot dies             -> {}
    {"do": "lose"}                     which is noticed                        -> {"seen_s", "ready_s", "counts"}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from grpc import _common as _grpc_common

from swift_agent.agent import transactions
from swift_agent.agent.lifecycle import commands, state
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.agent.record_writer import Write, Writer
from swift_recovery.planning.reports import RankReport
from swift_rendezvous.node.coordinator import Coordinator
from swift_rendezvous.node.registration import enter_job
from swift_rendezvous.node.suspicion import ring_targets
from swift_rendezvous.node.watcher import JobWatcher
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import JobRecord, NodeRecord, StoreRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store import _etcd_lease, _etcd_transport, _etcd_watch
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Watch, WatchResponse

# Nobody dies but who is told to, and no server is taken for dead: where hundreds of nodes share a few cores, answers
# and refreshes come late. With the client's own limits 1024 starved nodes drop their connections and make new ones
# without end. Nor is a server asked once a second whether it lives: that depends on time only, and on the cores of all
# nodes together it would be most of the work.
LEASE_TTL_S = 600
_etcd_watch.QUIET_S = 30.0
for _module in (_etcd_transport, _etcd_watch, _etcd_lease):
    _module.TRY_S = 60.0  # type: ignore[attr-defined]
_PATIENT = {
    "grpc.keepalive_time_ms": 600_000,
    "grpc.keepalive_timeout_ms": 600_000,
    "grpc.http2.ping_timeout_ms": 600_000,
    "grpc.min_reconnect_backoff_ms": 60_000,
}
_etcd_transport._OPTIONS[:] = (dict(_etcd_transport._OPTIONS) | _PATIENT).items()
# Two more things that a node on a machine of its own does not notice. gRPC wakes every waiting thread five times a
# second, for signals that there are none of here; and who waits for the interpreter asks for it 200 times a second.
_grpc_common.MAXIMUM_WAIT_TIMEOUT = 60.0
SWITCH_INTERVAL_S = 0.1


class CountedWatch:
    """Counts what is delivered."""

    def __init__(self, watch: Watch, counts: Counter[str]) -> None:
        self._watch, self._counts = watch, counts

    def __iter__(self) -> Iterator[WatchResponse]:
        for response in self._watch:
            self._counts["events"] += len(response.events)
            self._counts["responses"] += 1
            yield response

    def cancel(self) -> None:
        self._watch.cancel()


class CountedStore(EtcdStore):
    """The real client; every request but the refreshes of leases, which depend on time only, is counted."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self.counts: Counter[str] = Counter()

    def get(self, *args: Any, **options: Any) -> Any:
        self.counts["requests"] += 1
        return super().get(*args, **options)

    def get_prefix(self, *args: Any, **options: Any) -> Any:
        self.counts["requests"] += 1
        entries, revision = super().get_prefix(*args, **options)
        self.counts["records_listed"] += len(entries)
        return entries, revision

    def transaction(self, *args: Any, **options: Any) -> Any:
        self.counts["requests"] += 1
        return super().transaction(*args, **options)

    def grant_lease(self, ttl_s: int) -> Any:
        self.counts["requests"] += 1
        return super().grant_lease(ttl_s)

    def watch_prefix(self, *args: Any, **options: Any) -> Any:
        self.counts["requests"] += 1
        return CountedWatch(super().watch_prefix(*args, **options), self.counts)


class Node:
    """One of our agents without workers: registration, lease, watch, coordinator, lifecycle and writer are the real
    ones; workers say at once what they are asked, and who dies is told to its two watchers of the ring."""

    def __init__(self, nodes: OurNodes, index: int) -> None:
        self.nodes, self.index = nodes, index
        self.store = CountedStore(EtcdConfig((nodes.order["endpoint"],), timeout_s=nodes.order["limit_s"]))
        self.store.get("/")  # connects, as torch's store does when it is made: not a part of what is measured
        self.store.counts.clear()
        name = f"node-{index:05d}"
        self.me = NodeRecord(name, secrets.token_hex(8), "127.0.0.1", 1, nodes.num_workers, "f")
        self.state = state.AgentState(name, self.me.incarnation, 3)
        self.seen_s: dict[int, float] = {}
        self.go_s: dict[int, float] = {}
        self.dead = False
        self.writer = Writer(self.store, nodes.fail)

    def enter(self) -> None:
        job = JobRecord(self.nodes.order["num_nodes"], self.nodes.num_workers, "f", 3)
        keys = self.nodes.keys
        lease = enter_job(self.store, keys, job, self.me, LEASE_TTL_S).lease
        self.keep_alive = lease.keep_alive(self.nodes.fail)
        self.coordinator = Coordinator(
            self.store, keys, self.me, lease.id, plan_generation, Rules(), lambda line: None
        )  # fmt: skip
        self.watcher = JobWatcher(self.store, keys, self.post_view, self.me.incarnation)
        first = self.watcher.start()
        self.coordinator.start()
        self.post_view(first)

    def post_view(self, view: View) -> None:
        self.nodes.post(lambda: self.on_view(view))

    def on_view(self, view: View) -> None:
        if self.dead or view.revision < self.state.view.revision:
            return
        if view.number not in self.seen_s:
            self.seen_s[view.number] = time.monotonic()
        self.coordinator.update(view)
        self.event(msg.ViewChanged(view))

    def event(self, event: msg.Event) -> None:
        step = lc.on_event(self.state, event, now_s=time.monotonic())
        self.state = step.state
        for command in step.commands:
            self.execute(command)

    def execute(self, command: commands.Command) -> None:
        view, keys = self.state.view, self.nodes.keys
        match command:
            case commands.StartWorkers(local_ranks, generation, _):
                for rank in local_ranks:
                    pid = 1 + rank
                    self.event(msg.WorkerStarted(rank, generation, pid))
                    self.event(msg.HelloReceived(rank, pid))
            case commands.SendGo(local_ranks, generation):
                self.go_s.setdefault(generation, time.monotonic())
                for rank in local_ranks:
                    self.event(msg.WorkerResumed(rank, 1 + rank, generation, 1, {"total": 0.1}))
            case commands.SendStop(local_ranks, generation, _):
                everybody = tuple(range(self.nodes.order["num_nodes"] * self.nodes.num_workers))
                for rank in local_ranks:
                    report = RankReport(0, "holding", 1, 0, everybody).to_json()
                    self.event(msg.ReportReceived(rank, 1 + rank, generation, report))
            case commands.HostStore(generation):
                store = StoreRecord("127.0.0.1", 1, 2, "nonce")
                self.write(transactions.hosted_store(keys, view, self.me, generation, store))
            case commands.KillWorkers() | commands.Rejoin() | commands.LeaveJob() | commands.EndJob():
                self.nodes.fail(f"{self.me.node_id}: {command}")
        transaction = transactions.transaction_of(command, keys, view, self.me)
        if transaction is not None:
            self.write(transaction)

    def write(self, transaction: transactions.Transaction) -> None:
        number = self.state.view.number
        wanted = lambda: self.state.view.number == number  # noqa: E731
        self.writer.submit(Write(transaction.what, transaction.guards, transaction.ops, wanted))

    def die(self) -> None:
        """As if its process had been killed: its lease stays."""
        self.dead = True
        self.keep_alive.stop()
        threading.Thread(target=lambda: (self.coordinator.stop(), self.watcher.stop()), daemon=True).start()


class OurNodes:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.num_workers = order, order["num_workers"]
        self.keys = Keys(order["job"])
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.nodes = [Node(self, order["first"] + n) for n in range(order["count"])]
        threading.Thread(target=self._loop, daemon=True).start()

    def post(self, action: Callable[[], None]) -> None:
        self._queue.put(action)

    def fail(self, why: str) -> None:
        fail(why)

    def _loop(self) -> None:
        with failing():
            while True:
                self._queue.get()()

    def form(self) -> dict[str, Any]:
        for node in self.nodes:
            threading.Thread(target=guarded, args=(node.enter,), daemon=True).start()
        return self._wait(1)

    def die(self, slot: int) -> dict[str, Any]:
        generation = self.nodes[0].state.view.generation
        assert generation is not None
        lost = self.lost = generation.slots[slot].incarnation
        ring = sorted(node.incarnation for node in self.nodes[0].state.view.nodes.values())
        at = ring.index(lost)
        self.suspects = {ring[at - 1], ring[at - 2]}  # who watches it
        assert all(lost in ring_targets(watcher, ring) for watcher in self.suspects)
        for node in self.nodes:
            if node.me.incarnation == lost:
                node.die()
        return {}

    def lose(self) -> dict[str, Any]:
        lost = self.lost
        for node in self.nodes:
            node.store.counts.clear()
            if node.me.incarnation in self.suspects:
                self.post(lambda node=node: node.event(msg.PeerLost(lost, "its process ended")))  # type: ignore[misc]
        return self._wait(2)

    def _wait(self, number: int) -> dict[str, Any]:
        """When the last living node has seen the generation, and when the last with a slot in it sent its workers on.
        """

        def waiting() -> bool:
            for node in self.nodes:
                if node.dead:
                    continue
                generation = node.state.view.generation
                if number not in node.seen_s or generation is None:
                    return True
                if generation.slot_of(node.me.incarnation) is not None and number not in node.go_s:
                    return True
            return False

        while waiting():
            time.sleep(0.02)
        living = [node for node in self.nodes if not node.dead]
        counts = Counter[str]()
        for node in living:
            counts.update(node.store.counts)
        return {
            "seen_s": max(node.seen_s[number] for node in living),
            "ready_s": max((node.go_s[number] for node in living if number in node.go_s), default=0.0),
            "counts": counts,
        }


class TorchNodes:
    """Handlers of torch's dynamic rendezvous over the c10d backend, each with a connection of its own."""

    def __init__(self, order: dict[str, Any]) -> None:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

        counts = self.counts = Counter[str]()

        class Counted(C10dRendezvousBackend):
            def _call_store(self, *args: Any, **options: Any) -> Any:
                counts["requests"] += 1
                return super()._call_store(*args, **options)

        self.order = order
        self.handlers = []
        self.ranks: dict[int, int] = {}
        timeout = RendezvousTimeout(join=timedelta(seconds=order["limit_s"]))
        for _ in range(order["count"]):
            store = TCPStore("127.0.0.1", order["port"], is_master=False, timeout=timedelta(seconds=order["limit_s"]))
            self.handlers.append(
                DynamicRendezvousHandler.from_backend(
                    order["job"], store, Counted(store, order["job"]), order["num_nodes"], order["num_nodes"],
                    local_addr="127.0.0.1", timeout=timeout,
                )
            )

    def form(self) -> dict[str, Any]:
        return self._join(range(self.order["count"] - self.order["num_spares"]))

    def die(self, slot: int) -> dict[str, Any]:
        self.lost = next((n for n, rank in self.ranks.items() if rank == slot), None)
        return {}

    def lose(self) -> dict[str, Any]:
        """The lost one leaves by itself, as if its loss were known at once (torch waits 15 s for its heartbeats). The
        others ask for the next round, as their agents do when workers fail, and the spare joins them."""
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

        self.counts.clear()
        lost = self.lost
        if lost is not None:
            handler = self.handlers[lost]
            handler._stop_heartbeats()
            guarded(lambda: handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + self.order["limit_s"]))
        return self._join([n for n in range(self.order["count"]) if n != lost])

    def _join(self, who: Iterable[int]) -> dict[str, Any]:
        ranks: dict[int, int] = {}
        joined_s: list[float] = []

        def join(n: int) -> None:
            ranks[n] = self.handlers[n].next_rendezvous().rank
            joined_s.append(time.monotonic())

        threads = [threading.Thread(target=guarded, args=(lambda n=n: join(n),), daemon=True) for n in who]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ranks = ranks
        last_s = max(joined_s, default=0.0)
        return {"seen_s": last_s, "ready_s": last_s, "counts": self.counts}


_out = threading.Lock()


def say(answer: dict[str, Any]) -> None:
    with _out:
        print(json.dumps(answer), flush=True)


def fail(why: str) -> None:
    say({"error": why})
    os._exit(1)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        fail("".join(traceback.format_exception(error))[-2000:])


def guarded(action: Callable[[], Any]) -> None:
    with failing():
        action()


def main() -> None:
    logging.disable(logging.INFO)
    threading.stack_size(512 * 1024)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with failing():
        order = json.loads(sys.stdin.readline())
        nodes: OurNodes | TorchNodes = OurNodes(order) if order["side"] == "ours" else TorchNodes(order)
        say({"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            match asked["do"]:
                case "form":
                    say(nodes.form())
                case "die":
                    say(nodes.die(asked["slot"]))
                case "lose":
                    say(nodes.lose())
    os._exit(0)


if __name__ == "__main__":
    main()
