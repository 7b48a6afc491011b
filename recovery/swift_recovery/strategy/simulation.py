"""How long a training takes with failures that come at random, for each way to recover. Pure: arithmetic on arrays, of
random numbers that the caller draws.

All runs are simulated at once, failure by failure. A failure during a recovery begins the recovery again. It must never
count an iteration twice: what a failure takes back is paid for as time, and the progress stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swift_recovery.strategy.choose import ways
from swift_recovery.strategy.intervals import young_s
from swift_recovery.strategy.profile import Profile

Times = NDArray[np.float64]
Draw = Callable[[int], Times]
"""So many times from one failure to the next, in seconds."""

MAX_FAILURES = 100_000
# This product as benchmarks/ have measured it: a lost node, with a warm spare, until the next iteration (0.23 s), after
# the silence by which a machine without power is found lost (0.52 s); how much less than by half a second process
# shortens a replay of 20 iterations (0.554 of the work); what protection adds to iterations of 0.66 s (0.06 %); and
# what logs add to iterations of 0.23 s with 16 messages, the most that was measured (2.1 %).
REPLACED_S = 0.23 + 0.52
HELPED = 0.554 / 0.5
PROTECTED = 0.0006
LOGGED = 0.021


@dataclass(frozen=True)
class Scheme:
    """A way to survive failures.

    - *cost*: what it adds to each second of training.
    - *recovery_s*: of a failure, whenever it comes.
    - *interval_s*: of training between two checkpoints or snapshots; what was trained since the last one is lost. None:
      nothing is.
    - *repeats*: seconds for each second of training that was lost.
    """

    name: str
    cost: float = 0.0
    recovery_s: float = 0.0
    interval_s: float | None = None
    repeats: float = 1.0

    def lost(self, progress_s: Times) -> Times:
        """What a failure then costs beside the recovery."""
        if self.interval_s is None:
            return np.zeros_like(progress_s)
        return np.fmod(progress_s, self.interval_s) * self.repeats


def schemes(profile: Profile, snapshot_every: int = 30, scale: int = 1) -> tuple[Scheme, ...]:
    """Those of SWIFT's section 7.3 and of Just-In-Time Checkpointing, as far as they are possible for the job.

    Snapshots every *snapshot_every* iterations: CheckFreq has a budget of 3.5 % for them; of Elastic Horovod the
    figures of SWIFT's Table 5 say 7.5 %. *scale*: so many replicas of the job train as one. Failures then come so many
    times as often, which changes how often checkpoints pay, and each machine has a replica.
    """
    step_s = profile.iteration_s
    interval_s, snapshot_s = profile.checkpoint_every * step_s, snapshot_every * step_s
    restart_s = profile.restart_s + profile.load_s
    best_s = max(step_s, young_s(profile.checkpoint_s, profile.mtbf_s / scale))
    found = [
        Scheme("global checkpoints", profile.checkpoint_s / interval_s, restart_s, interval_s),
        Scheme("global checkpoints, as often as pays", profile.checkpoint_s / best_s, restart_s, best_s),
        Scheme("CheckFreq-like snapshots", 0.035, restart_s, snapshot_s),
        Scheme("Elastic-Horovod-like snapshots", 0.075, profile.replace_s, snapshot_s),
    ]
    if scale > 1:
        machines = tuple(replace(machine, has_replica=True) for machine in profile.machines)
        profile = replace(profile, machines=machines)
    if all(machine.has_replica for machine in profile.machines):
        # Half of the interrupted iteration, on average, and a checkpoint that is taken after the failure.
        again_s = step_s / 2
        found += [
            Scheme("just-in-time checkpoints, by the script", 0.0, restart_s + profile.checkpoint_s + again_s),
            Scheme("just-in-time checkpoints, transparent", 0.0, profile.replace_s + again_s),
        ]
    half_s = interval_s / 2
    for way in ways(profile, helpers="groups"):
        if way.impossible or way.name == "checkpoint":
            continue
        if way.name == "replica":
            found.append(Scheme("SWIFT, replicas", 0.0, way.recovery_s))
            continue
        fixed_s = profile.replace_s + profile.load_s
        name = "SWIFT, logs" if way.name == "log" else "SWIFT, logs and parallel recovery"
        found.append(Scheme(name, way.cost, fixed_s, interval_s, (way.recovery_s - fixed_s) / half_s))
    return (*found, *_as_measured(profile))


def _as_measured(profile: Profile) -> list[Scheme]:
    """What this product does for the job, with what it has been measured to take."""
    measured = replace(profile, replace_s=REPLACED_S)
    fixed_s, interval_s = measured.replace_s + measured.load_s, measured.checkpoint_every * measured.iteration_s
    found: list[Scheme] = []
    alone = 1.0
    logged = PROTECTED + LOGGED
    for way in ways(measured):
        repeats = (way.recovery_s - fixed_s) / (interval_s / 2)
        if way.impossible or way.name == "checkpoint":
            continue
        if way.name == "replica":
            found.append(Scheme("swift-agent, replicas", way.cost + PROTECTED, way.recovery_s))
        elif way.name == "log":
            found.append(Scheme("swift-agent, logs", way.cost + logged, fixed_s, interval_s, repeats))
            alone = repeats
        else:
            helped = min(alone, repeats * HELPED)
            found.append(Scheme("swift-agent, logs and helpers", way.cost + logged, fixed_s, interval_s, helped))
    return found


def total_s(scheme: Scheme, training_s: float, num_runs: int, draw: Draw) -> Times:
    """How long *training_s* of training takes, in each run. Raises `ValueError` where it does not end within
    `MAX_FAILURES`."""
    clock_s, progress_s, pending_s = (np.zeros(num_runs) for _ in range(3))
    running = np.arange(num_runs)
    for _ in range(MAX_FAILURES):
        if not running.size:
            return clock_s
        # As many are drawn each time, so that every scheme meets the same failures.
        until_s, pending, progress = draw(num_runs)[running], pending_s[running], progress_s[running]
        needed_s = (training_s - progress) * (1 + scheme.cost)
        ends = until_s >= pending + needed_s
        clock_s[running] += np.where(ends, pending + needed_s, until_s)
        is_up = ~ends & (until_s > pending)
        progress = np.where(is_up, progress + (until_s - pending) / (1 + scheme.cost), progress)
        progress_s[running] = progress
        # Cut in its recovery it begins that again.
        pending_s[running] = np.where(is_up, scheme.recovery_s + scheme.lost(progress), pending)
        running = running[~ends]
    done = float(progress_s[running].min()) / training_s
    raise ValueError(f"{scheme.name}: no end after {MAX_FAILURES} failures, with {done:.1%} of the training done")


def total_as_in_the_paper_s(scheme: Scheme, training_s: float, mtbf_s: float, positions: Times) -> Times:
    """As SWIFT counts for its Table 5: so many failures as fit into the training without any, each at a random place of
    it, and none in a recovery. *positions*: from 0 to 1, one row for each run, at least so many columns."""
    num_failures = int(training_s // mtbf_s)
    if positions.shape[1] < num_failures:
        raise ValueError(f"{num_failures} failures need as many positions")
    lost_s = scheme.lost(positions[:, :num_failures] * training_s) + scheme.recovery_s
    totals: Times = training_s * (1 + scheme.cost) + lost_s.sum(axis=1)
    return totals


def wasted(totals_s: Mapping[str, Times], training_s: float) -> dict[str, float]:
    """By scheme: the part of the time that is no training, on average."""
    return {name: float(np.mean(1 - training_s / values)) for name, values in totals_s.items()}
