"""What a worker reports when its generation ends.

Pure data. The report is made by the worker's watcher thread as soon as it is certain: once the stop flag is up no
optimizer step can begin, so what the report says stays true even while the main thread is still unwinding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Status = Literal["fresh", "setup", "empty", "holding"]


@dataclass(frozen=True)
class RankReport:
    """State held by one rank.

    status: `fresh` has no process groups yet (inside `swift.init`, or not there yet); `setup` has live groups, but the
    script has not reached its first iteration; `empty` was set up alone and waits for state; `holding` holds the
    complete state of *iteration* (that many optimizer updates are in it).
    *sections* counts finished `@job.resilient` calls. *replicas*: global ranks that hold the same parameters, itself
    included.
    """

    rank: int
    status: Status
    iteration: int = 0
    sections: int = 0
    replicas: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
            replicas=tuple(int(rank) for rank in data.get("replicas", ())),
        )
