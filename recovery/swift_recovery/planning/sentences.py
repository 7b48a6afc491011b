"""Why a plan is what it is, in words; and what it deviates by, read from JSON. Pure.

It must never decide: what it is given is planned already. It must never import `plan` or `planner`, which import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swift_recovery.planning.half_done_updates import Patch
from swift_recovery.planning.lossy import Deviation
from swift_recovery.planning.reports import ranges_of, ranks_of


def _deviation_of(data: Mapping[str, Any]) -> Deviation:
    return Deviation(
        tuple(int(rank) for rank in data.get("keeps", ())),
        {int(rank): ranks_of(numbers) for rank, numbers in data.get("resumed", {}).items()},
        tuple(int(rank) for rank in data.get("silent", ())),
    )


def _why(
    iteration: int, new: list[int], moved: list[int], sources: Mapping[int, int], handovers: tuple[int, ...],
    replays: list[int], checkpoint: int,
) -> str:  # fmt: skip
    parts = []
    if handovers:
        parts.append(f"ranks {list(handovers)} hand their state of iteration {iteration} over to their successors")
    if new:
        parts.append(f"ranks {new} are new and get the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in new})}")
    if moved:
        parts.append(f"ranks {moved} take over the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in moved})}")
    if replays:
        parts.append(f"ranks {replays} have no replica and {_what_is_repeated(checkpoint, iteration)}")
    return "; ".join(parts) or f"all ranks hold iteration {iteration}"


def _what_is_repeated(checkpoint: int, iteration: int) -> str:
    if checkpoint >= iteration:
        return f"load the checkpoint of iteration {checkpoint}" if checkpoint else "start over"
    said = f"repeat iterations {checkpoint} to {iteration - 1} from the logs of the others"
    return f"load the checkpoint of iteration {checkpoint}, and {said}" if checkpoint else said


def _from(checkpoint: int) -> str:
    return f"; the newest checkpoint known is that of iteration {checkpoint}" if checkpoint else ""


def _why_mended(iteration: int, undone: Mapping[int, tuple[int, ...]], patches: Iterable[Patch]) -> list[str]:
    parts = []
    by_numbers: dict[str, list[int]] = {}  # those of one replica set have the same ones
    for rank, numbers in sorted(undone.items()):
        by_numbers.setdefault(ranges_of(numbers), []).append(rank)
    for parameters, ranks in by_numbers.items():
        parts.append(f"ranks {ranks} undo update {iteration} of parameters {parameters}, which all have made")
    for patch in patches:
        parts.append(f"ranks {list(patch.targets)} get parameters {ranges_of(patch.parameters)} of iteration "
                     f"{iteration} from rank {patch.source}")
    return parts


def _why_inexact(iteration: int, deviation: Deviation) -> list[str]:
    parts = []
    if deviation.keeps:
        parts.append(f"ranks {list(deviation.keeps)} keep half of update {iteration} as it is, and it is made again")
    for numbers in {ranges_of(numbers) for numbers in deviation.resumed.values()}:
        parts.append(f"parameters {numbers} keep update {iteration}")
    if deviation.silent:
        parts.append(f"the gradients of ranks {list(deviation.silent)} do not count in iteration {iteration}")
    return parts
