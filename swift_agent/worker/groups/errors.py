"""Why process groups cannot be used: they were stopped, or could not be connected.

This module must never import another one of this room: all others may import it.
"""

from __future__ import annotations


class GroupsAborted(RuntimeError):
    """The groups were stopped (`abort`), or stopped while they were being connected. `rebuild` makes them usable."""


class RebuildFailed(RuntimeError):
    """Connecting the groups failed or took too long; they are stopped. Call `rebuild` with a larger generation."""


class WornOut(RebuildFailed):
    """Nothing can be connected in this process any more: it must be replaced."""
