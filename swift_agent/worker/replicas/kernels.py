"""Whether all ranks, and a replacement and its predecessor, compute with the same kernels: other ones may round
otherwise.

    all enter a generation: each a checksum ---> a text for each kind, to the agents (`KernelsRecord`)
    the first time of a job, or of a size of it: rank 0 tells which ranks differ, and in what
    a replacement <--- what its predecessor computed with, in its environment: it tells what differs

Two replicas that round otherwise stay equal to each other, because all get the same sum: nothing else finds it out.
This module must never end training, nor hold up a rank that could go on: what it finds is told.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from swift_agent.wire import messages as msg
from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.line.agent_line import Supervisor
from swift_recovery.state import machines

# All have just been in an operation together, and none could train without one that says nothing.
PATIENCE = timedelta(seconds=60)


def checksum(mine: str) -> int:
    """Of what a rank computes with (`computes_with`)."""
    return zlib.crc32(mine.encode())


class Kernels:
    """One per worker, which computes with *mine*."""

    def __init__(self, told: WorkerEnvironment, mine: str, supervisor: Supervisor) -> None:
        self._told, self._mine, self._supervisor = told, mine, supervisor
        self._has_compared = False
        self.checksum = checksum(mine)
        """For all others to see."""

    def compare(self, store: StoreClient, checksums: Sequence[int]) -> None:
        """All ranks have entered the generation of *store*, and know each other's checksum."""
        said, before = told_by_all(store, self._told.rank, self._mine, checksums), self._told.computed
        if said is None and not before:
            return  # the generation has ended already: it is compared in the next one
        if said is not None and self._told.speaks_for_node:  # not one for all: agents may be gone
            self._supervisor.send(said)
        is_new, self._has_compared = not self._has_compared, True
        if not is_new:
            return
        told = self._differs_from(store, before) if before or said is None else self._differ(said)
        if told:
            self._supervisor.note(told)

    @property
    def may_be_why(self) -> str:
        """To be said with what this process finds to be otherwise than in its predecessor; '' if it computes alike."""
        if self._told.computed in ("", self._mine):
            return ""
        return ". This machine computes otherwise than that of its predecessor, which may be why"

    def _differ(self, said: msg.Kernels) -> str:
        """What is told the first time, by one rank for all."""
        return difference_of_ranks(said) if self._told.rank == 0 else ""

    def _differs_from(self, store: StoreClient, before: str) -> str:
        """What is told of a process that computes otherwise than its predecessor, by one of those that come to a node
        together."""
        told = difference_to_predecessor(self._mine, before)
        try:
            is_first = not told or store.add(f"kernels/{self._told.node}/{checksum(told)}", 1) == 1
        except dist.DistStoreError:
            is_first = True  # the generation is cut: rather twice than not at all
        return told if is_first else ""


def told_by_all(store: StoreClient, rank: int, mine: str, checksums: Sequence[int]) -> msg.Kernels | None:
    """What all ranks compute with, of which each has told the checksum. The first rank of each kind says the text.
    None: it was not heard."""
    firsts = {of: checksums.index(of) for of in dict.fromkeys(checksums)}
    if len(firsts) == 1:
        return msg.Kernels((mine,), (0,) * len(checksums))
    keys = [f"kernels/{first}" for first in firsts.values()]
    try:
        if firsts[checksums[rank]] == rank:
            store.set(f"kernels/{rank}", mine)
        store.wait(keys, PATIENCE)
        texts = [text.decode() for text in store.multi_get(keys)]
    except dist.DistStoreError:
        return None
    numbers = {of: number for number, of in enumerate(firsts)}
    return msg.Kernels(tuple(texts), tuple(numbers[of] for of in checksums))


def difference_of_ranks(said: msg.Kernels) -> str:
    """In words, '' if there is none."""
    kinds = machines.kinds_of({rank: said.texts[of] for rank, of in enumerate(said.of)})
    return kinds and (
        f"not all ranks compute alike: {kinds}. A rank that is lost and replaced on another kind of machine may round "
        f"otherwise than without the failure; a line says so then. {machines.REMEDY}"
    )


def difference_to_predecessor(mine: str, before: str) -> str:
    """In words, '' if there is none. *before*: what the first process of this rank computed with."""
    if before == mine:
        return ""
    now, then = machines.unlike(mine, [before]), machines.unlike(before, [mine])
    return (
        f"this machine computes with {now}, that on which this rank began with {then}: the result may be rounded "
        f"otherwise than without the failure. {machines.REMEDY}"
    )
