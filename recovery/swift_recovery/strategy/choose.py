"""What a lost machine costs with each way to bring its state back, and which way is taken. Pure.

A prediction counts what a recovery does one after the other: the replacement's start, the state or the checkpoint, and
the iterations that are repeated: half of those between two checkpoints, on average (SWIFT, sections 3 and 5.4).
It must never call a way possible that would lose an iteration for good.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swift_recovery.strategy.grouping import Chain, Groups, alone, optimal
from swift_recovery.strategy.profile import NO_CHECKPOINTS, Profile, pipelined_s, stages_of

Name = Literal["replica", "log", "log+parallel", "checkpoint"]
Helpers = Literal["nobody", "one worker", "one machine", "groups"]
"""What is repeated with helpers: nothing; what one worker has lost, as swift-run does it, by as many as pay; what one
machine has lost, if that is one worker; or what a group has lost, too, by all machines, with all-reduces that take no
time, as in the paper (SWIFT, section 5.2)."""


@dataclass(frozen=True)
class Way:
    """One way.

    - *impossible*: why, '' if it is possible. *only*: if it is impossible for some machines, those for which it is not.
      If only a lost machine is meant, *worker_s* is that of a worker, not 0.
    - *recovery_s*: expected, for one lost machine; *worker_s*: for one of its workers; *two_s*: for two machines at
      once, as long as the way is possible then, 0 if there are no more.
    - *cost*: of an iteration without failures, as a part of its time.
    - *storage_bytes*: at most, on the machine that needs most.
    - *groups*: of machines, where messages are logged between them.
    """

    name: Name
    impossible: str
    recovery_s: float = 0.0
    cost: float = 0.0
    storage_bytes: float = 0.0
    groups: Groups = ()
    only: tuple[int, ...] = ()
    worker_s: float = 0.0
    two_s: float = 0.0

    def wasted(self, mtbf_s: float) -> float:
        """The part of the time that is no progress."""
        return self.cost + self.recovery_s / mtbf_s


def helpers_of(profile: Profile) -> Helpers:
    """What is repeated with helpers as swift-run does it: what one worker has lost. The coordinator and `swiftctl` ask
    here, so that both say the same of a job."""
    return "one machine" if profile.gpus_per_machine == 1 else "one worker"


def ways(
    profile: Profile, budget_bytes: float | None = None, groups: Groups = (), helpers: Helpers | None = None,
    most_helpers: int | None = None, helped_groups: Groups = (),
) -> tuple[Way, ...]:  # fmt: skip
    """All of them. *budget_bytes*: for the logs between two checkpoints, of all machines together; None: no limit.
    *groups*: of machines, in place of those that are best for it. *helpers*: of "log+parallel", if not as swift-run
    has them (`helpers_of`), at most so many for each that was lost. *helped_groups*: its groups, if not the others."""
    log = _log(profile, "log", budget_bytes, groups, "nobody", None)
    parallel = _log(
        profile, "log+parallel", budget_bytes, helped_groups or groups, helpers or helpers_of(profile), most_helpers
    )
    found = [_replica(profile), log, parallel, _checkpoint(profile)]
    if len(profile.machines) <= 2:  # nobody is left of two
        found = [replace(way, two_s=0.0) for way in found]
    return tuple(found)


def choose(found: tuple[Way, ...], mtbf_s: float) -> Way:
    """Of the possible ones the one that wastes least; of equal ones the first. Raises `ValueError` if none is."""
    return min((way for way in found if not way.impossible), key=lambda way: way.wasted(mtbf_s))


def _replica(profile: Profile) -> Way:
    machines = profile.machines
    only = tuple(number for number, machine in enumerate(machines) if machine.has_replica)
    without = next((number for number, machine in enumerate(machines) if not machine.has_replica), None)
    if not only:
        inside_s = _from_replica_s(profile) if all(machine.has_replica_inside for machine in machines) else 0.0
        return Way("replica", f"no other machine holds what machine {without} does", worker_s=inside_s)
    mean_bytes = sum(machines[number].state_bytes for number in only) / len(only)
    recovery_s = _from_replica_s(profile, mean_bytes)
    worker_s = _from_replica_s(profile, mean_bytes / profile.gpus_per_machine)
    # Two get it from machines of their own.
    found = Way("replica", "", recovery_s, worker_s=worker_s, two_s=recovery_s)
    if without is None:
        return found
    return replace(found, impossible=f"no other machine holds what machine {without} does", only=only)


def _from_replica_s(profile: Profile, num_bytes: float | None = None) -> float:
    """*num_bytes*: that are lost; by default the state of one GPU."""
    if num_bytes is None:
        num_bytes = statistics.fmean(one.state_bytes for one in profile.machines) / profile.gpus_per_machine
    # The interrupted iteration is made again: half of it was done.
    return profile.replace_s + num_bytes / profile.network_bytes_per_s + profile.iteration_s / 2


def _worker_s(profile: Profile, alone_s: float) -> float:
    """Expected, of a lost worker of any machine; *alone_s*: where nobody else on it holds the same."""
    inside_s = _from_replica_s(profile)
    return statistics.fmean(inside_s if one.has_replica_inside else alone_s for one in profile.machines)


def _log(
    profile: Profile, name: Name, budget_bytes: float | None, groups: Groups, helpers: Helpers, most: int | None
) -> Way:  # fmt: skip
    if not profile.boundary_bytes:
        return _log_inside(profile, name, helpers, most)
    chain = chain_of(profile)
    if not groups:
        groups = (
            alone(chain) if budget_bytes is None else best_groups(profile, budget_bytes, helpers, most_helpers=most)
        )
    if len(groups) == 1:
        return Way(name, "the budget for logs allows no two groups: nothing would be logged")
    if name == "log+parallel" and all(machine.has_replica_inside for machine in profile.machines):
        return Way(name, "helpers repeat what one process held alone, and on each machine another one holds the same")
    recovery_s = log_recovery_s(profile, groups, "nobody" if helpers == "one worker" else helpers, most)
    alone_s = _of_worker_s(profile, groups, helpers, most)
    sent = [sent_bytes(profile, machine, groups) for machine in range(chain.num_machines)]
    cost = _cost_of_logs(profile, sent)
    two_s = _fixed_s(profile) + profile.checkpoint_every / 2 * _two_from_logs_s(profile, groups)
    return Way(
        name, "", recovery_s, cost, max(sent) * profile.checkpoint_every, groups,
        worker_s=_worker_s(profile, alone_s), two_s=two_s,
    )  # fmt: skip


def _log_inside(profile: Profile, name: Name, helpers: Helpers, most: int | None) -> Way:
    """Where no messages pass between machines."""
    if all(machine.stages == 1 for machine in profile.machines):
        return Way(name, "no pipeline: no messages between machines from which a lost one could be repeated")
    found = Way(name, "messages pass inside machines only: their logs are lost with them")
    if all(machine.has_replica_inside for machine in profile.machines):
        return found
    alone_s = _of_worker_s(profile, tuple(range(at, at + 1) for at in range(len(profile.machines))), helpers, most)
    sent = [machine.inside_bytes for machine in profile.machines]
    return replace(
        found, cost=_cost_of_logs(profile, sent), storage_bytes=max(sent) * profile.checkpoint_every,
        worker_s=_worker_s(profile, alone_s),
    )  # fmt: skip


def _cost_of_logs(profile: Profile, sent: Sequence[float]) -> float:
    """*sent*: bytes that each machine logs in an iteration."""
    # Copies are made while the pipeline waits; what does not fit there delays it.
    exposed_s = max(max(0.0, num_bytes / profile.log_bytes_per_s - profile.bubble_s) for num_bytes in sent)
    return exposed_s / profile.iteration_s + _checkpoints(profile)


def _of_worker_s(profile: Profile, groups: Groups, helpers: Helpers, most: int | None) -> float:
    """Expected, for one lost worker that nobody else on its machine can replace. A larger group goes back with it."""

    def repeat(group: range) -> float:
        if len(group) > 1 or helpers == "groups":
            return from_logs_s(profile, group, helpers, most)
        shares = range(1, 2) if helpers == "nobody" else _shares(max(2, len(profile.machines)), most)
        return min(with_helpers_s(profile, group, num_shares, (1,)) for num_shares in shares)

    expected_s = sum(len(group) * repeat(group) for group in groups) / len(profile.machines)
    return _fixed_s(profile) + profile.checkpoint_every / 2 * expected_s


def _shares(num_places: int, most_helpers: int | None) -> range:
    """How many processes there may be in the place of one that was lost."""
    return range(1, 1 + (num_places if most_helpers is None else min(num_places, 1 + most_helpers)))


def best_groups(
    profile: Profile, budget_bytes: float, helpers: Helpers = "nobody", of_each: float = math.inf,
    elsewhere_of: Sequence[float] = (), most_helpers: int | None = None,
) -> Groups:  # fmt: skip
    """Those with the shortest expected recovery whose logs fit into the budget, those of each machine into *of_each*.
    One of all machines, for which nothing is logged, only if no others fit. *elsewhere_of*: what each machine logs in
    an iteration beside, whatever the groups are."""
    machines = range(len(profile.machines))

    def repeat(group: range) -> float:
        if group == machines or logged_bytes(profile, group, elsewhere_of) > of_each:
            return math.inf
        return from_logs_s(profile, group, helpers, most_helpers)

    found = optimal(chain_of(profile), budget_bytes, repeat)
    return found if all(repeat(group) < math.inf for group in found) else (machines,)


def logged_bytes(profile: Profile, group: range, elsewhere_of: Sequence[float] = ()) -> float:
    """Between two checkpoints, by the machine of a group that logs most. *elsewhere_of*: see `best_groups`."""
    if elsewhere_of:
        return profile.checkpoint_every * max(sent_bytes(profile, one, (group,)) + elsewhere_of[one] for one in group)
    ends = {group[0], group[-1]}  # between them nothing is logged
    return profile.checkpoint_every * max(sent_bytes(profile, one, (group,)) for one in ends)


def log_recovery_s(
    profile: Profile, groups: Groups, helpers: Helpers = "nobody", most_helpers: int | None = None
) -> float:  # fmt: skip
    """Seconds, expected, for one lost machine, any of them, whose group repeats its iterations from logs (SWIFT,
    sections 5.2 and 5.3)."""
    repeated_s = sum(len(group) * from_logs_s(profile, group, helpers, most_helpers) for group in groups)
    expected_s = repeated_s / len(profile.machines)
    return _fixed_s(profile) + profile.checkpoint_every / 2 * expected_s


def _fixed_s(profile: Profile) -> float:
    return profile.replace_s + profile.load_s


def _two_from_logs_s(profile: Profile, groups: Groups) -> float:
    """Of one iteration, expected, where two machines are lost at once, any of them: neighbours repeat together, and
    nobody helps."""
    alone_s = [from_logs_s(profile, group) for group in groups]
    together_s = [from_logs_s(profile, range(one.start, other.stop)) for one, other in itertools.pairwise(groups)]
    total_s, num_pairs = 0.0, 0
    for at, group in enumerate(groups):
        within = len(group) * (len(group) - 1) // 2
        total_s, num_pairs = total_s + within * alone_s[at], num_pairs + within
        for to in range(at + 1, len(groups)):
            pairs = len(group) * len(groups[to])
            total_s += pairs * (together_s[at] if to == at + 1 else max(alone_s[at], alone_s[to]))
            num_pairs += pairs
    return total_s / max(1, num_pairs)


def from_logs_s(
    profile: Profile, group: range, helpers: Helpers = "nobody", most_helpers: int | None = None
) -> float:  # fmt: skip
    """Of one iteration by a group that was lost: it is repeated as fast as its messages come from logs, at most."""
    if helpers == "one machine":
        # As many as pay.
        shares = _shares(len(profile.machines) if len(group) == 1 else 1, most_helpers)
        return min(with_helpers_s(profile, group, num_shares) for num_shares in shares)
    fetched_s = crossing_bytes(profile, group) / profile.network_bytes_per_s
    return max(repeat_s(profile, group, helpers), fetched_s)


def with_helpers_s(profile: Profile, group: range, num_shares: int, workers: Sequence[int] = ()) -> float:
    """As `from_logs_s`, with so many processes in the place of each that was lost. *workers*: so many are lost of each
    machine of the group, () if all of them are."""
    fetched_s = crossing_bytes(profile, group) / profile.network_bytes_per_s
    gradient_bytes = max(profile.machines[number].summed_bytes for number in group)
    if workers:
        # Each adds up its own.
        gradient_bytes /= profile.gpus_per_machine
    # Sums go once along the ring, parameter by parameter, and then to all that did not get them from the ring.
    added_s = (num_shares - 1) * gradient_bytes / profile.network_bytes_per_s
    return max(shared_s(profile, group, num_shares, workers), fetched_s) + added_s


def _checkpoint(profile: Profile) -> Way:
    if not profile.takes_checkpoints:
        return Way("checkpoint", NO_CHECKPOINTS)
    recovery_s = profile.restart_s + profile.load_s + profile.checkpoint_every / 2 * profile.iteration_s
    state_bytes = max(machine.state_bytes for machine in profile.machines)
    return Way(
        "checkpoint", "", recovery_s, _checkpoints(profile), state_bytes, worker_s=_worker_s(profile, recovery_s),
        two_s=recovery_s,
    )  # fmt: skip


def _checkpoints(profile: Profile) -> float:
    return profile.checkpoint_s / (profile.checkpoint_every * profile.iteration_s)


def chain_of(profile: Profile) -> Chain:
    """Its machines as `grouping` takes them."""
    return Chain(
        [machine.computation_s for machine in profile.machines], profile.boundary_bytes, profile.network_bytes_per_s,
        profile.checkpoint_every,
    )  # fmt: skip


def repeat_s(profile: Profile, group: range, helpers: Helpers = "nobody") -> float:
    """Of one iteration by a group that was lost, with all its micro-batches one behind the other and no wait for
    others; with helpers of "groups", so many times as the group fits into all machines, each with its share of them."""
    return shared_s(profile, group, len(profile.machines) // len(group) if helpers == "groups" else 1)


def shared_s(profile: Profile, group: range, num_shares: int, workers: Sequence[int] = ()) -> float:
    """Of one iteration by a group that was lost and others of its size, each with its share of the micro-batches.
    *workers*: see `with_helpers_s`."""
    micro_batches = profile.micro_batches
    mine = -(-micro_batches // num_shares)
    machines = [profile.machines[number] for number in group]
    if workers:
        # Those that are more than the stages hold parts of them, or the same.
        machines = [replace(one, stages=min(one.stages, num)) for one, num in zip(machines, workers, strict=True)]
    return pipelined_s([each_s * mine / micro_batches for each_s in stages_of(machines)], mine)


def paying_helpers(profile: Profile, machine: int) -> tuple[int, ...]:
    """How many processes shorten the recovery of one worker of that machine that nobody else can replace: each number
    is better than all smaller ones. More than there are micro-batches are of no use, messages come from logs no
    faster because of them, and each one's gradients have to be added."""
    if profile.machines[machine].has_replica or profile.machines[machine].has_replica_inside:
        return ()
    group = range(machine, machine + 1)
    found: list[int] = []
    best_s = with_helpers_s(profile, group, 1, (1,))
    for count in range(1, profile.micro_batches):
        time_s = with_helpers_s(profile, group, count + 1, (1,))
        if time_s < best_s:
            best_s = time_s
            found.append(count)
    return tuple(found)


def crossing_bytes(profile: Profile, group: range) -> float:
    """What a group gets and sends over its two ends in an iteration; about half of it comes from logs."""
    ends = [group.start - 1, group.stop - 1]
    return sum(profile.boundary_bytes[end] for end in ends if 0 <= end < len(profile.boundary_bytes)) / 2


def sent_bytes(profile: Profile, machine: int, groups: Groups) -> float:
    """What a machine logs in an iteration: about half of what passes each boundary at which a group ends; and what its
    own workers send each other, if it is a group by itself."""
    (group,) = (group for group in groups if machine in group)
    ends = [end for end in (machine - 1, machine) if end in (group.start - 1, group.stop - 1)]
    across = sum(profile.boundary_bytes[end] for end in ends if 0 <= end < len(profile.boundary_bytes)) / 2
    return across + (profile.machines[machine].inside_bytes if len(group) == 1 else 0.0)
