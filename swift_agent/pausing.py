"""Whether the workers of a node have to stand still because it may be the one that the others go on without. Pure."""

from __future__ import annotations


def shall_pause(paused: bool, lease_overdue_s: float, silence_s: float, ttl_s: float) -> bool:
    """Whether the workers shall be paused, from what is known now; *paused*: whether they are.

    Without etcd and without a sign of life from anybody the others may have given this node's slot away, so its workers
    must not touch what they share. Or else etcd and all others are gone, and these workers hold the only state there
    is: so they are not ended before etcd has said which it is. Only etcd ends the pause: a peer may be cut off as well.

    *lease_overdue_s*, *silence_s*: since when the lease may be over, and nobody was heard; seconds.
    """
    if paused:
        return lease_overdue_s > 0
    return lease_overdue_s > 0 and silence_s > ttl_s
