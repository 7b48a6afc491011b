"""Whether the script has taken part in a collective since its iteration began.

Who begins the iteration anew makes its collectives again, and who stays in its middle does not: so where there was one,
nobody may stay. Collectives come from C++ as well as from Python, and are counted by the compiled library. Must never
decide who stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from swift_agent import native


class Collectives:
    """Counts those of the script in an iteration; written by its thread, read by any."""

    def __init__(self) -> None:
        self._library = native.load()
        self._base = 0
        self._aside: int | None = None

    @property
    def _num(self) -> int:
        total: int = self._library.num_collectives() if self._library is not None else 0
        return total

    @property
    def why(self) -> str:
        """Why those who took part in them cannot stay in the iteration, '' if there were none."""
        if self._library is None:
            return "have no compiled library, so their collectives are not known (swiftctl native build)"
        aside = self._aside  # first: when it is None again the base is right
        return "have taken part in a collective of it" if (self._num - self._base if aside is None else aside) else ""

    def begin(self) -> None:
        self._base = self._num

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, none is counted."""
        if self._aside is not None:
            yield
            return
        self._aside = self._num - self._base
        try:
            yield
        finally:
            self._base = self._num - self._aside
            self._aside = None
