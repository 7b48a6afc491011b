"""Whether the script has taken part in a collective since its iteration began.

A rank that begins the iteration again makes its collectives again, and one that stays in its middle does not: so where
there was one, no rank may stay. A rank that stays after its update can make none there either: others may have passed
over the rest of that iteration.

Collectives come from C++ as well as from Python, and are counted by the compiled library. Must never decide who stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from swift_agent import native
from swift_agent.torch_private.errors import is_of_connection, was_raised_for

# What the compiled library says.
_REFUSED = "a collective in the rest of an iteration that others may have passed over"


class Collectives:
    """Counts those of the script in an iteration; written by its thread, read by any."""

    def __init__(self) -> None:
        self._library = native.load()
        self._base = 0
        self._aside: int | None = None
        self._refuses = False
        self.has_any = False
        """In some iteration there was one."""

    @property
    def _num(self) -> int:
        total: int = self._library.num_collectives() if self._library is not None else 0
        return total

    @property
    def why(self) -> str:
        """Why ranks that took part in them cannot stay in the iteration, '' if there were none."""
        if self._library is None:
            return "have no compiled library, so their collectives are not known (swiftctl native build)"
        aside = self._aside  # first: when it is None again the base is right
        return "have taken part in a collective of it" if (self._num - self._base if aside is None else aside) else ""

    @property
    def is_aside(self) -> bool:
        """Those of now are not the script's."""
        return self._aside is not None

    @property
    def are_known(self) -> bool:
        return self._library is not None

    def begin(self) -> None:
        self._base = self._num

    def end(self) -> None:
        """The iteration is over, or will be run again."""
        if self._refuses:
            self._refuses = False
            self._set(False)
        if self._num != self._base:
            self.has_any = True

    def refuse(self) -> None:
        """The script's, until the iteration is over: `refusal` knows what they raise."""
        self._refuses = True
        self._set(True)

    @staticmethod
    def refusal(error: Exception) -> str:
        """In words, if a collective was refused and raised *error*; else ''."""
        # An error of the script may quote it.
        is_ours = is_of_connection(error) and was_raised_for(error, _REFUSED)
        return str(error).partition("\n")[0] if is_ours else ""

    def _set(self, refuses: bool) -> None:
        if self._library is not None:
            self._library.refuse_collectives(refuses)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, none is counted."""
        if self._aside is not None:
            yield
            return
        self._aside = self._num - self._base
        if self._refuses:
            self._set(False)
        try:
            yield
        finally:
            if self._refuses:
                self._set(True)
            self._base = self._num - self._aside
            self._aside = None
