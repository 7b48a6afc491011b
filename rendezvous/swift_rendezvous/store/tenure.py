"""Until when a node may act as the owner of what it was given, by its own clock and without a word from etcd. Pure.

A lease lives for its TTL from the moment at which the last keep-alive that was answered was *sent*: the server cannot
have counted from earlier. No other node gets this node's slot before. So that much is known without help, and nothing
that peers say or do not say makes it longer.

An etcd that is away for all nodes gives no slots away, and a leader that is elected later gives every lease its full
TTL again. A member is *proven* to be in no quorum at a moment if its port refuses a connection (its machine answers, no
server runs) or if it says itself that it knows no leader. A member that does not answer may be anywhere, with a quorum:
it proves nothing.

    n members, a quorum of n // 2 + 1; n - n // 2 proven ones leave too few for any

    renewed at t --------------------------> t + TTL
            all proven in [s, e], s <= t + TTL ---------> e + TTL            (any later leader was elected after e)
            enough proven in [s, e], long enough for any old leader to have stepped down: the same

What this rests on (etcd 3.4 to 3.6): a lease ends by a proposal that a quorum has to accept (`LeaseRevoke`); a
new leader gives all leases a full TTL (`lessor.Promote`, which adds an election timeout, so that an answer of a
leader that is just being replaced does no harm); a leader without a quorum steps down within two election timeouts
(`CheckQuorum`); no TTL is granted below one and a half of them. Where lease checkpoints are on, a TTL of more than
300 s is not given again in full: such leases are not prolonged here.

Must never read a clock, open a socket, or take silence for a proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Sight = Literal["refused", "leaderless", "led", "silent"]
PROVEN: frozenset[Sight] = frozenset({"refused", "leaderless"})

# Of the TTL, before its end: for the agent, which looks twice a second and then acts, and for a machine that is busy.
MARGIN = 0.25
# A member that was proven twice within this was not in a quorum in between.
MAX_GAP_S = 1.0
# In TTLs, two election timeouts at most.
OLD_LEADER_S = 2 / 1.5
# Larger TTLs are subject to etcd's lease checkpoints.
MAX_PROLONGED_S = 300.0


@dataclass(frozen=True)
class Renewed:
    """etcd has answered a keep-alive, or granted the lease. *sent_s*: when it was asked."""

    sent_s: float
    ttl_s: float


@dataclass(frozen=True)
class Ended:
    """etcd has said at *at_s* that there is no such lease."""

    at_s: float


@dataclass(frozen=True)
class MembersRead:
    """The members that vote, by their ids: what they are called, for people."""

    names: Mapping[int, str]


@dataclass(frozen=True)
class Probed:
    """What a member was found to be, at some moment between *asked_s* and *answered_s*."""

    member: int
    sight: Sight
    asked_s: float
    answered_s: float


Event = Renewed | Ended | MembersRead | Probed


@dataclass(frozen=True)
class Tenure:
    """*until_s*: the slot is this node's own until then. *spans*: a member -> from when to when it was in no quorum."""

    ttl_s: float = 0.0
    until_s: float = -math.inf
    sent_s: float = -math.inf
    ended_s: float = -math.inf
    names: Mapping[int, str] = field(default_factory=dict)
    spans: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    sights: Mapping[int, Sight] = field(default_factory=dict)

    @property
    def acts_until_s(self) -> float:
        """When the workers have to have stopped, if nothing else is heard."""
        return self.until_s - MARGIN * self.ttl_s


def fold(tenure: Tenure, event: Event) -> Tenure:
    match event:
        case Renewed(sent_s, ttl_s):
            if sent_s <= max(tenure.sent_s, tenure.ended_s):
                return tenure  # known, or of the lease before this one
            until_s = max(tenure.until_s, sent_s + ttl_s)
            return replace(tenure, ttl_s=ttl_s, until_s=until_s, sent_s=sent_s, spans={}, sights={})
        case Ended(at_s):
            return replace(tenure, until_s=min(tenure.until_s, at_s), ended_s=at_s, spans={}, sights={})
        case MembersRead(names):
            return tenure if names == tenure.names else replace(tenure, names=dict(names), spans={}, sights={})
        case Probed(member):
            return tenure if member not in tenure.names else _prolonged(_seen(tenure, event))


def holds(tenure: Tenure, *, now_s: float) -> bool:
    """Whether the workers of this node may train, and what they have made may count."""
    return now_s < tenure.acts_until_s


def is_in_doubt(tenure: Tenure, *, now_s: float) -> bool:
    """Whether the members are to be asked: a keep-alive should have been answered by now, and is not."""
    return now_s - tenure.sent_s > 0.4 * tenure.ttl_s


def why_not(tenure: Tenure, *, now_s: float) -> str:
    """For people: what is known of etcd."""
    if tenure.ended_s > tenure.sent_s:
        return "the lease of this node in etcd is gone, and there is no other yet"
    silent_s = now_s - tenure.sent_s
    said = f"etcd has not answered for {silent_s:.1f} s, so the lease of this node ({tenure.ttl_s:g} s) may end"
    if not tenure.names:
        return f"{said}; its members are not known"
    words = {
        "silent": "no answer",
        "refused": "no server runs there",
        "leaderless": "has no leader",
        "led": "has a leader, but does not renew the lease",
    }
    seen = [f"{name}: {words[tenure.sights.get(member, 'silent')]}" for member, name in sorted(tenure.names.items())]
    return f"{said} ({', '.join(seen)})"


def proofs(spans: Mapping[int, tuple[float, float]], num_members: int) -> list[tuple[float, float, bool]]:
    """Moments at which so many members were in no quorum that there was none, the latest first: since when that was so
    without a break, the moment, and whether all were."""
    needed = num_members - num_members // 2
    found = []
    for end_s in sorted({last_s for _, last_s in spans.values()}, reverse=True):
        begun = sorted(first_s for first_s, last_s in spans.values() if first_s <= end_s <= last_s)
        if len(begun) >= needed:
            found.append((begun[needed - 1], end_s, len(begun) == num_members))
    return found


def _seen(tenure: Tenure, event: Probed) -> Tenure:
    spans, sights = dict(tenure.spans), {**tenure.sights, event.member: event.sight}
    known = spans.pop(event.member, None)
    if event.sight in PROVEN:
        # One look was true at an unknown time between question and answer; between two looks it was.
        goes_on = known is not None and event.asked_s - known[1] <= MAX_GAP_S
        first_s = known[0] if known is not None and goes_on else event.answered_s
        spans[event.member] = (first_s, event.asked_s)
    return replace(tenure, spans=spans, sights=sights)


def _prolonged(tenure: Tenure) -> Tenure:
    if tenure.ttl_s > MAX_PROLONGED_S or tenure.ended_s > tenure.sent_s:
        return tenure
    for since_s, at_s, are_all in proofs(tenure.spans, len(tenure.names)):
        # Else the lease may have ended, and the slot been given away, before that.
        in_time = since_s <= tenure.until_s
        # Else the leader of before may be among the others, and count on when it has its quorum again.
        if in_time and (are_all or at_s - since_s >= OLD_LEADER_S * tenure.ttl_s):
            return replace(tenure, until_s=max(tenure.until_s, at_s + tenure.ttl_s))
    return tenure
