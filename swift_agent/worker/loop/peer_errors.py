"""Whether an error that comes out of the script's code may have its cause in the loss of a peer.

By types, and by what torch's own errors begin with (`torch_private.errors`). Whether a peer is lost the agent says; the
script's own errors must never be held back to ask it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from swift_agent.errors import PeerFailure, SwiftError
from swift_agent.torch_private.errors import is_of_connection, was_raised_for
from swift_agent.worker.groups.errors import GroupsAborted, RebuildFailed
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_logging_store.errors import LinkLost
from swift_recovery.checkpoint.writer import CheckpointError
from swift_recovery.errors import CannotReplay

# On an error that no peer's failure explains.
_OWN = "_swift_is_own"
# Of a collective that a replacement, which repeats iterations, makes where no message was logged.
NOT_LOGGED = "no log has what this collective gave"


class NotLogged(CannotReplay):
    """It was refused."""


def own(error: BaseException) -> None:
    """*error* is the script's own: no peer's failure explains it."""
    with contextlib.suppress(AttributeError):
        setattr(error, _OWN, True)


def is_own(error: BaseException) -> bool:
    """Whether it was raised by the script itself, in an iteration that nobody had cut."""
    return bool(getattr(error, _OWN, False))


def cause_of(error: Exception) -> Exception:
    """The error of ours that *error* was caused by, or of a process group; else *error* itself. A pipeline's stage
    raises one of its own for what fails in it."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        if isinstance(found, (CannotReplay, LinkLost, PeerFailure)):
            return found
        found = found.__cause__
    innermost = seen[-1]
    return innermost if isinstance(innermost, Exception) and is_communication_error(innermost) else error


def is_communication_error(error: BaseException) -> bool:
    """Whether *error* is what torch raises when a connection of a process group breaks, or is caused by that: a
    pipeline's stage raises an error of its own for what fails in its backward."""
    if isinstance(error, (LinkLost, PeerFailure, RebuildFailed, GroupsAborted)):
        return True
    if isinstance(error, (SwiftError, CannotReplay, CheckpointError)):
        return False
    if error.__cause__ not in (None, error) and is_communication_error(error.__cause__):
        return True
    return is_of_connection(error)


@contextlib.contextmanager
def only_logged(groups: ProcessGroups, *, among: Collection[int] = ()) -> Iterator[None]:
    """Inside, what no log has is refused, but to groups of ranks *among* those. `NotLogged` is raised then: in place of
    what came out, or as its cause."""
    try:
        with groups.refused(NOT_LOGGED, among=among):
            yield
    except Exception as error:
        cause = cause_of(error)
        if is_communication_error(cause) and was_raised_for(cause, NOT_LOGGED):
            raise NotLogged(str(cause)) from error
        raise
