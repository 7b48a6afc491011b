"""What follows when a server of our own has ended: it is started again, a few times. Pure.

Must never read a clock: times come in as arguments.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

# Before the first start again, the second, and so on. What ended it once may be a person, or a short want of memory;
# where it ends again and again nothing is won by more.
PAUSES_S = (0.0, 1.0, 4.0)
WINDOW_S = 600.0
# What a shell adds to the number of a signal.
_OF_SHELL = 128


def pause_s(ends_s: Sequence[float]) -> float | None:
    """How long to wait before it is started again, None: it is given up. *ends_s*: when it has ended, oldest first; the
    last time is now."""
    recent = num_recent(ends_s)
    return PAUSES_S[recent - 1] if recent <= len(PAUSES_S) else None


def num_recent(ends_s: Sequence[float]) -> int:
    """How many of these count."""
    return sum(ends_s[-1] - at_s < WINDOW_S for at_s in ends_s)


def how_it_ended(code: int | None, in_shell: bool) -> str:
    """For people. *code*: of its process, negative: a signal, None: nobody knows; *in_shell*: of a shell around it."""
    if code is None:
        return "has ended"
    if in_shell and code > _OF_SHELL:
        code = _OF_SHELL - code
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else signal.strsignal(-code)
    return f"was killed by signal {-code} ({name})"
