"""swift-agent: a drop-in for torchrun that loses a machine and goes on.

What a training script imports::

    import swift_agent as swift

    job = swift.init()
    job.track(model=model, optimizer=optimizer)

See README.md and those of the rooms. Everything listed in `__all__` is public; everything else may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift_agent.errors import JobStopped, PeerFailure, ReplicaMismatch, SwiftError, UsageError
from swift_agent.version import __version__

if TYPE_CHECKING:
    from swift_agent.worker.job.init import init
    from swift_agent.worker.job.job import Job

__all__ = ["Job", "JobStopped", "PeerFailure", "ReplicaMismatch", "SwiftError", "UsageError", "__version__", "init"]


def __getattr__(name: str) -> Any:
    # Late: the launcher must not pay for what only workers use.
    if name == "init":
        from swift_agent.worker.job.init import init

        return init
    if name == "Job":
        from swift_agent.worker.job.job import Job

        return Job
    raise AttributeError(f"module 'swift_agent' has no attribute {name!r}")
