"""What swift-agent raises, in a training script or from `swift-run`. Messages say what happened, what is safe and what
to type next.

This module must never import another one of this project: all others may import it, and `import swift_agent` loads it.
"""

from __future__ import annotations


class SwiftError(RuntimeError):
    """Base of all errors of this package."""


class PeerFailure(SwiftError):
    """A peer was lost while this code was in a collective.

    Inside `@job.iteration` and `@job.resilient` the session catches it. Anywhere else it ends the script, and the job
    falls back to a restart of all workers: decorate the code that communicates.
    """


class UsageError(SwiftError):
    """The training script uses the API in a way that could not be recovered; raised before anything is lost."""


class JobStopped(SwiftError):
    """The job ended without a result: it was told to stop, or no node took the place of a lost one in time.

    *cause*: `infrastructure` (want of a node, or of etcd), `operator`, `preempted` (all nodes were told to go),
    `drained` (this node has left, the job goes on), or `script`.
    """

    def __init__(self, why: str, cause: str = "infrastructure") -> None:
        super().__init__(why)
        self.cause = cause


class ReplicaMismatch(SwiftError):
    """Replicas that must be equal are not. All workers start again rather than train on."""


class CannotConnect(SwiftError):
    """This process cannot be connected with the others, again and again: it has to be replaced."""


