"""Errors of this room. One base, so that a caller can tell ours from the user's own.

`LostLog` is apart: a `LinkLost`, after which another try may help. This module must never import another one of this
room: all others may import it.
"""

from __future__ import annotations

from swift_logging_store.errors import LinkLost


class RecoveryError(Exception):
    """Base of all errors that ``swift_recovery`` raises."""


class TransferError(RecoveryError):
    """A state has not arrived as it was sent; another try may help."""


class StateError(RecoveryError):
    """A piece of training state cannot be described, copied or installed; the message names it by its path."""


class LostLog(LinkLost):
    """What a peer was handing on of its log did not come to its end."""


class CannotReplay(RecoveryError, RuntimeError):
    """The iterations of a lost rank cannot be repeated from logs; all workers have to begin again."""


class NotInLog(CannotReplay):
    """Something that is to be repeated with is in no log."""


class CutReplay(CannotReplay):
    """Another process may repeat them, this one cannot: it has gone too far to begin again with others, or has no
    threads to take their logs with."""
