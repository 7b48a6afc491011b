"""The base of this room's errors, so that a caller can tell ours from the user's own.

Those that say more are beside what raises them (`store.kv`, `node.registration`, `threads`). This module must never
import another one of this room: all others may import it.
"""

from __future__ import annotations


class RendezvousError(Exception):
    """Base of what this package raises; by itself: the store refused a request, or was closed."""
