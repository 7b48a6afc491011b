"""Errors of this room. One base, so that a caller can tell ours from the user's own."""

from __future__ import annotations


class RendezvousError(Exception):
    """Base of what this package raises; by itself: the store refused a request, or was closed."""
