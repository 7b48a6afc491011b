"""What a worker reports when its generation ends.

Pure data. The report is made by the worker's watcher thread as soon as it is certain: once the stop flag is up no
optimizer step can begin, so what the report says stays true even while the main thread is still unwinding.

This module must never look at a live state or a group: it says what a report is, and how it is written as text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["fresh", "setup", "empty", "holding"]


@dataclass(frozen=True)
class RankReport:
    """State held by one rank."""

    rank: int
    status: Status
    """`fresh`: it has no process groups yet (inside `swift.init`, or not there yet). `setup`: it has live groups,
    but the script has not reached its first iteration. `empty`: it was set up alone and waits for state. `holding`: it
    holds the complete state of *iteration*."""
    iteration: int = 0
    """So many updates of the optimizer are in the state."""
    sections: int = 0
    """So many `@job.resilient` calls are finished."""
    replicas: tuple[int, ...] = ()
    """Global ranks that hold the same parameters, itself included."""
    updated: tuple[int, ...] = ()
    """The parameters, by number, that update number *iteration* has reached already, where updates overlap the
    backward; the state is that of *iteration* but for these."""
    num_parameters: int = 0
    """So many there are."""
    reduced: bool = False
    """The gradients of update number *iteration* are complete here, so this rank can still make it."""
    logs: bool = False
    """Every message that this rank has sent in an iteration is in its log, but for those before *checkpoint*."""
    checkpoint: int = 0
    """The iteration of the newest one that this rank knows to count; 0: it knows of none."""
    unwinds: str = ""
    """Why this rank cannot stay in the middle of iteration number *iteration*, in words that follow its name; '' if it
    can, or is not in it."""
    lacks: str = ""
    """Why a rank that has begun does not hold a complete state, in words that follow its name."""
    unlogged: tuple[int, ...] = ()
    """Ranks to which what this one has sent is not in its log: they can repeat iterations only together with it."""

    def to_json(self) -> dict[str, Any]:
        """*replicas* become text: every rank reports them, and in a large job they are nearly all ranks."""
        # Not `asdict`, which copies every rank.
        data = {**vars(self), **{name: ranges_of(getattr(self, name)) for name in ("replicas", "updated", "unlogged")}}
        if not self.updated:
            del data["updated"], data["num_parameters"]
        for name in ("reduced", "logs", "checkpoint", "unwinds", "lacks", "unlogged"):
            if not data[name]:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankReport:
        """What is absent has its default. Raises KeyError, TypeError or ValueError on what `to_json` did not write."""
        if data["status"] not in get_args(Status):
            raise ValueError(f"status {data['status']!r} is none of {get_args(Status)}")
        return cls(
            rank=int(data["rank"]),
            status=data["status"],
            iteration=int(data.get("iteration", 0)),
            sections=int(data.get("sections", 0)),
            replicas=ranks_of(data.get("replicas", "")),
            updated=ranks_of(data.get("updated", "")),
            num_parameters=int(data.get("num_parameters", 0)),
            reduced=bool(data.get("reduced", False)),
            logs=bool(data.get("logs", False)),
            checkpoint=int(data.get("checkpoint", 0)),
            unwinds=str(data.get("unwinds", "")),
            lacks=str(data.get("lacks", "")),
            unlogged=ranks_of(data.get("unlogged", "")),
        )


# Of a text: it comes from the store, and ten characters could otherwise name more than there is memory for.
MAX_RANKS = 1 << 20


def ranges_of(ranks: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8: of the length of the gaps, not of the ranks. In ascending order, each once."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


@functools.lru_cache(maxsize=256)
def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks of a text of `ranges_of`. Raises ValueError or TypeError for another one."""
    if not isinstance(text, str):
        raise TypeError(f"ranks as text are wanted, not {text!r}")
    ranks: list[int] = []
    for part in text.split(",") if text else []:
        head, _, tail = part.partition("-")
        first, last = int(head), int(tail or head)
        if len(ranks) + last - first >= MAX_RANKS:
            raise ValueError(f"more than {MAX_RANKS} ranks: {text[:80]!r}")
        ranks.extend(range(first, last + 1))
    return tuple(ranks)
