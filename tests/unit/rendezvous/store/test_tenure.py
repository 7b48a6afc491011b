"""Until when a slot is a node's own: what a lease says, what members prove, and what proves nothing.

The last test plays clusters whose lessors do what etcd's do, and asks whether any node ever believes too long.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from swift_rendezvous.store.tenure import (
    MARGIN,
    MAX_PROLONGED_S,
    Ended,
    Event,
    MembersRead,
    Probed,
    Renewed,
    Sight,
    Tenure,
    fold,
    holds,
    is_in_doubt,
    proofs,
    why_not,
)

TTL_S = 8.0
NAMES = {1: "a:1", 2: "b:1", 3: "c:1"}


def after(*events: Event, names: dict[int, str] = NAMES) -> Tenure:
    tenure = fold(Tenure(), MembersRead(names))
    for event in events:
        tenure = fold(tenure, event)
    return tenure


def looks(begin_s: float, end_s: float, sights: dict[int, Sight]) -> Iterable[Event]:
    """All members, four times a second, one after the other."""
    at_s = begin_s
    while at_s <= end_s:
        for number, (member, sight) in enumerate(sights.items()):
            yield Probed(member, sight, at_s + number / 1000, at_s + number / 1000 + 0.01)
        at_s += 0.25


def test_it_counts_from_the_sending_of_what_was_answered_and_ends_before_the_lease() -> None:
    tenure = after(Renewed(10.0, TTL_S))
    assert holds(tenure, now_s=10.0 + (1 - MARGIN) * TTL_S - 0.01)
    assert not holds(tenure, now_s=10.0 + (1 - MARGIN) * TTL_S)
    assert not is_in_doubt(tenure, now_s=10.0 + TTL_S / 3) and is_in_doubt(tenure, now_s=10.0 + TTL_S / 2)
    assert holds(fold(tenure, Renewed(17.9, TTL_S)), now_s=20.0)
    assert not holds(Tenure(), now_s=-1e9)


def test_a_lease_that_is_gone_is_gone_until_there_is_another() -> None:
    tenure = after(Renewed(10.0, TTL_S), Ended(11.0))
    assert not holds(tenure, now_s=11.0) and "is gone" in why_not(tenure, now_s=11.0)
    assert not holds(fold(tenure, Renewed(10.5, TTL_S)), now_s=11.0)  # of the one that is gone, told late
    assert not holds(after(Renewed(10.0, TTL_S), Ended(11.0), *looks(10.9, 12.0, dict.fromkeys(NAMES, "refused"))),
                     now_s=12.0)  # fmt: skip
    assert holds(fold(tenure, Renewed(11.2, TTL_S)), now_s=11.3)


@pytest.mark.parametrize(
    ("sights", "proves"),
    [
        ({1: "refused", 2: "refused", 3: "refused"}, True),
        ({1: "refused", 2: "leaderless", 3: "refused"}, True),
        ({1: "leaderless", 2: "leaderless", 3: "leaderless"}, True),
        ({1: "refused", 2: "silent", 3: "silent"}, False),
        ({1: "refused", 2: "led", 3: "led"}, False),
        ({1: "leaderless", 2: "led", 3: "led"}, False),  # one that is cut off from the others
        ({1: "silent", 2: "silent", 3: "silent"}, False),
    ],
)  # fmt: skip
def test_what_proves_that_nobody_has_a_quorum(sights: dict[int, Sight], proves: bool) -> None:
    tenure = after(Renewed(10.0, TTL_S), *looks(13.0, 200.0, sights))
    assert holds(tenure, now_s=200.0) is proves


def test_one_that_is_silent_may_lead_for_a_while_longer() -> None:
    """Two of three are down; the third may have been the leader, and count on if they are back before it noticed."""
    sights: dict[int, Sight] = {1: "refused", 2: "refused", 3: "silent"}
    assert not holds(after(Renewed(10.0, TTL_S), *looks(13.0, 18.0, sights)), now_s=18.0)
    assert holds(after(Renewed(10.0, TTL_S), *looks(13.0, 13.0 + 2 * TTL_S, sights)), now_s=13.0 + 2 * TTL_S)


@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5, 7])
def test_as_many_as_leave_no_quorum(num_members: int) -> None:
    quorum = num_members // 2 + 1
    for num_proven in range(num_members + 1):
        found = proofs({member: (1.0, 9.0) for member in range(num_proven)}, num_members)
        assert bool(found) is (num_members - num_proven < quorum)


def test_members_have_to_be_away_at_the_same_moment() -> None:
    """One after the other, as in a rolling restart, there was a quorum all the time."""
    assert proofs({1: (1.0, 2.0), 2: (2.5, 3.5)}, 3) == []
    assert proofs({1: (1.0, 3.0), 2: (2.5, 3.5)}, 3) == [(2.5, 3.0, False)]
    assert proofs({1: (1.0, 3.0), 2: (2.5, 3.5), 3: (0.5, 2.9)}, 3) == [(2.5, 3.0, False), (1.0, 2.9, True)]
    assert proofs({1: (1.01, 1.0)}, 1) == []  # one look only


def test_a_proof_that_comes_too_late_is_none() -> None:
    """The lease may have ended, and the slot be another's, before all members went away."""
    sights: dict[int, Sight] = dict.fromkeys(NAMES, "refused")
    assert not holds(after(Renewed(10.0, TTL_S), *looks(18.1, 30.0, sights)), now_s=30.0)
    assert holds(after(Renewed(10.0, TTL_S), *looks(17.5, 30.0, sights)), now_s=30.0)


def test_a_gap_between_two_looks_breaks_the_proof() -> None:
    sights: dict[int, Sight] = dict.fromkeys(NAMES, "refused")
    tenure = after(Renewed(10.0, TTL_S), *looks(13.0, 14.0, sights), *looks(25.0, 26.0, sights))
    assert tenure.until_s == 14.0 + TTL_S and not holds(tenure, now_s=26.0)


def test_leases_that_etcd_makes_checkpoints_of_are_not_prolonged() -> None:
    sights: dict[int, Sight] = dict.fromkeys(NAMES, "refused")
    ttl_s = MAX_PROLONGED_S + 1
    assert after(Renewed(10.0, ttl_s), *looks(13.0, 20.0, sights)).until_s == 10.0 + ttl_s


def test_who_does_not_know_the_members_knows_nothing() -> None:
    tenure = after(Renewed(10.0, TTL_S), *looks(13.0, 30.0, dict.fromkeys(NAMES, "refused")), names={})
    assert not holds(tenure, now_s=17.0) and "not known" in why_not(tenure, now_s=17.0)


def test_people_are_told_who_did_not_answer() -> None:
    tenure = after(Renewed(10.0, TTL_S), *looks(13.0, 15.0, {1: "refused", 2: "silent", 3: "led"}))
    said = why_not(tenure, now_s=16.0)
    assert "has not answered for 6.0 s" in said and "a:1: no server runs there" in said
    assert "b:1: no answer" in said and "c:1: has a leader, but does not renew the lease" in said


class Cluster:
    """Members that come and go; a lessor as etcd has it. *until_s*: when the leader would end the lease."""

    def __init__(self, choose: random.Random, num_members: int, election_s: float) -> None:
        self.choose, self.election_s = choose, election_s
        self.up = dict.fromkeys(range(num_members), True)
        self.quorum = num_members // 2 + 1
        self.leader: int | None = 0
        self.until_s = TTL_S
        self.ended = False
        self.lost_s = 0.0  # since when there was no quorum

    def step(self, now_s: float) -> None:
        living = [member for member, up in self.up.items() if up]
        if len(living) >= self.quorum:
            self.lost_s = now_s
            if self.leader is None and self.choose.random() < 0.3:
                self.leader = self.choose.choice(living)
                self.until_s = now_s + TTL_S  # Promote
            if self.leader is not None and now_s >= self.until_s:
                self.ended = True
        elif self.leader is not None and now_s - self.lost_s >= 2 * self.election_s:
            self.leader = None  # CheckQuorum
        if self.leader is not None and not self.up[self.leader]:
            self.leader = None

    def sight(self, member: int, hidden: bool) -> Sight:
        if hidden:
            return "silent"
        if not self.up[member]:
            return "refused"
        return "leaderless" if self.leader is None else "led"


@pytest.mark.parametrize("num_members", [1, 3, 5])
def test_nobody_believes_in_a_slot_that_was_given_away(num_members: int) -> None:
    """10 minutes of any outages, seen by a node that is cut off from some members, and renews what it can."""
    num_prolonged = num_ended = 0
    for seed in range(25):
        choose = random.Random(seed)
        cluster = Cluster(choose, num_members, election_s=TTL_S / 1.5 * choose.random())
        tenure = fold(Tenure(), MembersRead({member: str(member) for member in cluster.up}))
        hidden = dict.fromkeys(cluster.up, False)
        now_s, renew_s = 0.0, 0.0
        while now_s < 600.0 and not cluster.ended:
            now_s += 0.125
            cluster.step(now_s)
            for member in cluster.up:
                if choose.random() < 0.02:
                    cluster.up[member] = not cluster.up[member]
                if choose.random() < 0.005:
                    hidden[member] = not hidden[member]
            reaches = any(cluster.up[member] and not hidden[member] for member in cluster.up)
            reaches = reaches and cluster.leader is not None and not cluster.ended
            if now_s >= renew_s and reaches and sum(cluster.up.values()) >= cluster.quorum:
                renew_s, cluster.until_s = now_s + TTL_S / 3, now_s + TTL_S
                tenure = fold(tenure, Renewed(now_s, TTL_S))
            before_s = tenure.until_s
            for member in cluster.up:
                if choose.random() < 0.5:
                    tenure = fold(tenure, Probed(member, cluster.sight(member, hidden[member]), now_s, now_s))
            num_prolonged += tenure.until_s > before_s
            assert not (cluster.ended and holds(tenure, now_s=now_s)), f"seed {seed} at {now_s}"
        num_ended += cluster.ended
    assert num_prolonged > 100 and num_ended > 5, (num_prolonged, num_ended)
