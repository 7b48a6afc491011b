"""Whether all ranks, and a replacement and its predecessor, compute with the same kernels: other ones may round
otherwise.

    all begin together: each a checksum ---> a text for each kind, to the agents (`KernelsRecord`); rank 0 tells of them
    a replacement <--- what its predecessor computed with, in its environment: it tells what differs

Two replicas that round otherwise stay equal to each other, because all get the same sum: nothing else finds it out.
This module must never hold a rank back, nor end training: what it finds is told.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from swift_agent.wire import messages as msg
from swift_agent.wire.environment import ENV_COMPUTED, ENV_LOCAL_RANK
from swift_agent.wire.store_client import StoreClient
from swift_recovery.state import machines


def checksum(mine: str) -> int:
    """Of what a rank computes with (`computes_with`), for all others to see."""
    return zlib.crc32(mine.encode())


def told_by_all(store: StoreClient, rank: int, mine: str, checksums: Sequence[int]) -> msg.Kernels:
    """What all ranks compute with, of which each has said the checksum. The first rank of each kind says the text, and
    the others wait for it. Raises `DistStoreError`."""
    firsts = {of: checksums.index(of) for of in dict.fromkeys(checksums)}
    if len(firsts) == 1:
        return msg.Kernels((mine,), (0,) * len(checksums))
    if firsts[checksums[rank]] == rank:
        store.set(_key(rank), mine)
    texts = [store.get(_key(first)).decode() for first in firsts.values()]
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
    """In words, '' if there is none. *before*: what the first process of this rank computed with, '' if that is not
    known."""
    if before in ("", mine):
        return ""
    now, then = machines.unlike(mine, [before]), machines.unlike(before, [mine])
    return (
        f"this machine computes with {now}, that on which this rank began with {then}: the result may be rounded "
        f"otherwise than without the failure. {machines.REMEDY}"
    )


def tell_difference(store: StoreClient, mine: str, environment: Mapping[str, str]) -> str:
    """What a worker says that computes otherwise than its predecessor: one of those that come to a node together."""
    told = difference_to_predecessor(mine, environment.get(ENV_COMPUTED, ""))
    try:
        is_first = not told or store.add(f"kernels/{environment['GROUP_RANK']}/{checksum(told)}", 1) == 1
    except dist.DistStoreError:
        is_first = True  # the generation is cut: rather twice than not at all
    return told if is_first else ""


def says_for_its_node(environment: Mapping[str, str]) -> bool:
    """Of each node one worker tells its agent what all ranks compute with."""
    return environment[ENV_LOCAL_RANK] == "0"


def _key(rank: int) -> str:
    return f"kernels/{rank}"
