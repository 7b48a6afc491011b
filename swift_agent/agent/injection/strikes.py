"""How a fault is made: the shell command that makes it, and takes back what lasts. Pure.

A command runs in a session of its own and outlives the agent, which it may kill or stop. This module must never run
one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swift_agent.wire.injected import Fault


@dataclass(frozen=True)
class Place:
    """What a strike needs to know of its node. *workers*: process ids by rank, from *first_rank* on; *others*: further
    processes of the agent. *interface*: of the network that leads to the other nodes. *log*: of messages, by rank: its
    segments, the newest last. *directory*: for a file that fills the disk."""

    agent: int
    first_rank: int
    workers: dict[int, int]
    others: tuple[int, ...]
    interface: str
    log: dict[int, tuple[str, ...]]
    directory: str

    def local_rank(self, rank: int) -> int:
        return rank - self.first_rank


class CannotStrike(Exception):
    """Why not, for people."""


def command_of(fault: Fault, place: Place) -> str:
    """For `sh -c`. Raises `CannotStrike`."""
    all_of_node = (place.agent, *place.workers.values(), *place.others)
    match fault.kind:
        case "kill-worker":
            return _kill("KILL", [_worker(fault, place)])
        case "kill-node":
            return _kill("KILL", all_of_node)  # the agent first: it must not see its workers die
        case "freeze":
            return f"{_kill('STOP', all_of_node)}; sleep {fault.for_s:g}; {_kill('CONT', reversed(all_of_node))}"
        case "cut-network":
            link = f"ip link set dev {shlex.quote(_interface(place))}"
            return f"{link} down && sleep {fault.for_s:g}; {link} up"
        case "slow-link":
            name = shlex.quote(_interface(place))
            slow = f"tc qdisc add dev {name} root tbf rate {fault.rate} burst 64kb latency 400ms"
            return f"{slow} && sleep {fault.for_s:g}; tc qdisc del dev {name} root"
        case "fill-disk":
            file = shlex.quote(f"{place.directory}/injected-{fault.id}")
            free = f"$(( $(df --output=avail -B1 {shlex.quote(place.directory)} | tail -n 1) ))"
            size = f"size={fault.num_bytes}; free={free}; [ $size -lt $free ] || size=$free"
            return f"{size}; fallocate -l $size {file}; sleep {fault.for_s:g}; rm -f {file}"
        case "corrupt-log":
            segments = place.log.get(fault.rank, ())
            if not segments:
                raise CannotStrike(f"rank {fault.rank} has logged no messages on this node")
            file = shlex.quote(segments[0])
            # One byte in the middle, to another value.
            middle = f"$(( $(stat -c %s {file}) / 2 ))"
            old = f"$(od -An -tu1 -j $at -N1 {file})"
            new = "$(printf '%03o' $(( (old + 1) % 256 )))"
            write = f"printf \"\\\\$new\" | dd of={file} bs=1 seek=$at conv=notrunc status=none"
            return f"at={middle}; old={old}; new={new}; {write}"


def _worker(fault: Fault, place: Place) -> int:
    pid = place.workers.get(fault.rank, 0)
    if not pid:
        raise CannotStrike(f"rank {fault.rank} has no process on this node")
    return pid


def _interface(place: Place) -> str:
    if not place.interface or place.interface == "lo":
        raise CannotStrike("the nodes of this job are on one machine: there is no network between them")
    return place.interface


def _kill(name: str, pids: Iterable[int] | Sequence[int]) -> str:
    return f"kill -{name} {' '.join(str(pid) for pid in pids if pid)}"
