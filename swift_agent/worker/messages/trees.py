"""Counts of messages as plain data, for the codec and for JSON. This module must never know what is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from swift_logging_store.format.record import Channel
from swift_recovery.replay.message_counts import Told


def to_tree(counts: Mapping[Channel, int]) -> list[list[Any]]:
    return [[*astuple(channel), count] for channel, count in counts.items()]


def from_tree(tree: Iterable[Sequence[Any]]) -> dict[Channel, int]:
    return {Channel(*fields): count for *fields, count in tree}


def told_of(tree: Mapping[str, Any]) -> Told:
    """Raises KeyError or ValueError for what says nothing."""
    stands = tree["stands"]
    if stands not in ("begin", "middle", "end"):
        raise ValueError(f"a rank stands at {stands!r}")
    return Told(stands, from_tree(tree["has"]), from_tree(tree["sent"]))
