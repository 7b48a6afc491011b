"""Errors of this room. One base, so that a caller can tell ours from the user's own.

`LinkLost` is apart: it is of a connection, not of a log, and another try may help. This module must never import
another one of this room: all others may import it.
"""


class LogError(Exception):
    """Base of all errors that ``swift_logging_store`` raises."""


class LinkLost(RuntimeError):
    """The connection to another process broke, or brought nothing for too long. Another try may help."""


class Damaged(LogError):
    """Bytes of a segment are not those that were written; the message says where. Nothing of them was handed out."""


class NotLoggable(LogError):
    """A message that a record cannot hold; the message says why."""
