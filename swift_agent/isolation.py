"""When the workers of a node have to stand still, and how long a node that was given up stays away. Pure.

Who can reach neither the store nor another node cannot be told that it was given up; the others go on without it.
"""

from __future__ import annotations

# A node that was in the job for less than this before it was given up waits longer and longer before it comes back:
# if only some of the others can reach it, it must not keep them busy.
BRIEF_S = 30.0
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0


def shall_pause(paused: bool, lease_overdue_s: float, silence_s: float, lease_ttl_s: float) -> bool:
    """Whether the workers of a node stand still; *paused*: whether they do now.

    Without etcd and without a sign of life from anybody the others may have given this node's slot away, so its workers
    must not touch what they share. Or else etcd and all others are gone, and these workers hold the only state there
    is: so they are not ended before etcd has said which it is. Only etcd ends the pause: a peer may be cut off as well.

    *lease_overdue_s*: for how long the node's lease may have been over; *silence_s*: since any other node gave a sign
    of life, 0 while there is no other.
    """
    return lease_overdue_s > 0 and (paused or silence_s > lease_ttl_s)


def rejoin_delay_s(previous_s: float, stayed_s: float) -> float:
    """How long to stay away after having been in the job for *stayed_s*; *previous_s*: how long it was last time."""
    if stayed_s >= BRIEF_S:
        return 0.0
    return min(MAX_DELAY_S, max(FIRST_DELAY_S, 2 * previous_s))
