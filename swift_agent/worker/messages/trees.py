"""Counts of messages as plain data, for the codec and for JSON. This module must never know what is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from swift_logging_store.format.record import Channel
from swift_recovery.replay.message_counts import Counts, Inventory


def to_tree(counts: Mapping[Channel, int]) -> list[list[Any]]:
    return [[*astuple(channel), count] for channel, count in counts.items()]


def from_tree(tree: Iterable[Sequence[Any]]) -> dict[Channel, int]:
    return {Channel(*fields): count for *fields, count in tree}


def tree_of_counts(rank: int, counts: Counts) -> dict[str, Any]:
    """For `count_on`. *rank*: whose they are."""
    return {"rank": rank, "sent": to_tree(counts.sent), "received": to_tree(counts.asked)}


def count_on(rank: int, counts: Counts, tree: Mapping[str, Any] | None) -> bool:
    """Count from *tree* on. False, and nothing is changed, if there is none, or it is of another rank than *rank*."""
    if tree is None or tree.get("rank", rank) != rank:
        return False
    counts.set(from_tree(tree["sent"]), from_tree(tree["received"]))
    return True


def tree_of(told: Inventory) -> dict[str, Any]:
    return {"stands": told.stands, "has": to_tree(told.has), "sent": to_tree(told.sent)}


def inventory_of(tree: Mapping[str, Any]) -> Inventory:
    """Raises KeyError or ValueError for what says nothing."""
    stands = tree["stands"]
    if stands not in ("begin", "middle", "end"):
        raise ValueError(f"a rank stands at {stands!r}")
    return Inventory(stands, from_tree(tree["has"]), from_tree(tree["sent"]))
