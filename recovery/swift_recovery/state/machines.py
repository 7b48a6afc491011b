"""In words, in what machines differ that compute the same (see `swift_recovery.replay.kernels`): only those parts that
not all have are named. Pure.

This module must never judge whether a difference matters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

REMEDY = "Give the job, and its spares, machines of one kind (see Reproducibility)"
MAX_NAMED = 8
_BETWEEN = ", "


def unlike(text: str, others: Collection[str]) -> str:
    """The parts of *text* that not all *others* have; what it lacks, if it has no other."""
    mine, theirs = text.split(_BETWEEN), [other.split(_BETWEEN) for other in others]
    parts = [part for part in mine if any(part not in other for other in theirs)]
    lacks = dict.fromkeys(part.partition("=")[0] for other in theirs for part in other if part not in mine)
    return _BETWEEN.join(parts) or f"no {' and '.join(lacks)}"


def kinds_of(computes: Mapping[int, str]) -> str:
    """Of ranks, by what each computes with; '' if that is the same everywhere."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(computes):
        by_text.setdefault(computes[rank], []).append(rank)
    if len(by_text) < 2:
        return ""
    return "; ".join(
        f"{_ranks(ranks)} with {unlike(text, by_text.keys() - {text})}" for text, ranks in by_text.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
