"""Errors of this room. One base, so that a caller can tell ours from the user's own."""


class RecoveryError(Exception):
    """Base of all errors that ``swift_recovery`` raises."""


class TransferError(RecoveryError):
    """A state has not arrived as it was sent; another try may help."""


class StateError(RecoveryError):
    """A piece of training state cannot be described, copied or installed; the message names it by its path."""
