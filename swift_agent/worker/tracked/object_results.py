"""Objects that this rank has had from another one in its last iterations and sections (`broadcast_object_list`,
`scatter_object_list`). Where one of these is run for its result only, nobody sends them.

    real run: kept, in the order of the calls --> offered to a replacement --> dry run: given again, in that order

Only what the codec can write, without tensors: nothing that comes from a peer is unpickled here. This module must never
give an object that the script has, or could change: each time it is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from swift_recovery.errors import StateError
from swift_recovery.state.codec import decode, encode

MAX_BYTES = 1 << 20
"""Of all that is kept."""
MAX_ITEMS = 10_000
"""Of one call: more would take longer to keep than to send."""
_NUM_ITERATIONS = 3
"""One may be cut, and its predecessor is run once more for what it has left."""
_ALL = -1

What = Literal["iteration", "section"]
_Key = tuple[str, int]
_Result = dict[int, bytes]
"""By rank what it was sent, `_ALL` for all of them; empty where that cannot be kept."""


class ObjectResults:
    """One per worker, of so many. *begin* and *end* are called around each run of an iteration or section."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._kept: dict[_Key, list[_Result]] = {}
        self._at: _Key | None = None
        self._next = 0

    def begin(self, what: What, number: int, *, dry_run: bool) -> None:
        """What it has had is what the last real run of it had."""
        self._at, self._next = (what, number), 0
        if dry_run:
            return
        self._kept.pop(self._at, None)
        if what == "iteration":
            for key in [key for key in self._kept if key[0] == what and key[1] <= number - _NUM_ITERATIONS]:
                del self._kept[key]

    def end(self) -> None:
        self._at = None

    def keep_for_all(self, objects: Sequence[Any]) -> None:
        """Of a real run; all ranks have these."""
        self.keep({_ALL: objects})

    def keep(self, objects: Mapping[int, Sequence[Any]]) -> None:
        """Of a real run, by rank."""
        if self._at is None:
            return
        texts = {rank: _text(list(each)) for rank, each in objects.items()}
        known = {rank: text for rank, text in texts.items() if text is not None}
        self._kept.setdefault(self._at, []).append(known if len(known) == len(texts) else {})
        while sum(map(_size, self._kept.values())) > MAX_BYTES:
            del self._kept[next(iter(self._kept))]

    def next(self, rank: int) -> list[Any] | None:
        """Of a dry run: what *rank* was sent by the next call; None if that is not known."""
        results = self._kept.get(self._at, []) if self._at is not None else []
        result = results[self._next] if self._next < len(results) else {}
        self._next += 1
        text = result.get(rank, result.get(_ALL))
        objects: list[Any] | None = None if text is None else decode(text, ())
        return objects

    def offer(self) -> list[Any]:
        """For `take`, of a replacement, through the codec."""
        results = [
            [what, number, [[[rank, text] for rank, text in result.items()] for result in results]]
            for (what, number), results in self._kept.items()
        ]
        return [self._world_size, results]

    def take(self, offered: Sequence[Any]) -> None:
        """Nothing, if the job had another size: ranks were others then."""
        world_size, kept = offered or (0, [])
        if world_size == self._world_size:
            self._kept = {(what, number): [dict(result) for result in results] for what, number, results in kept}


def _text(objects: Any) -> bytes | None:
    if not _is_light(objects):
        return None
    try:
        text, tensors = encode(objects)
    except StateError:
        return None
    return None if tensors else text


def _is_light(objects: Any) -> bool:
    """No more than is kept: found out without a look at all of it."""
    left, num_items, num_bytes = [objects], 0, 0
    while left and num_items <= MAX_ITEMS and num_bytes <= MAX_BYTES:
        one = left.pop()
        if isinstance(one, dict):
            num_items += 2 * len(one)
            left += [*one.keys(), *one.values()] if num_items <= MAX_ITEMS else []
        elif isinstance(one, (list, tuple, set)):
            num_items += len(one)
            left += one if num_items <= MAX_ITEMS else []
        elif isinstance(one, (str, bytes)):
            num_bytes += len(one)
    return num_items <= MAX_ITEMS and num_bytes <= MAX_BYTES


def _size(results: list[_Result]) -> int:
    return sum(len(text) for result in results for text in result.values())
