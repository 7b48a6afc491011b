"""What a job was measured to cost, and the ways to recover it, compared in lines for people. Pure.

It must never say of what was assumed that it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_recovery.planning.reports import ranges_of
from swift_recovery.strategy.budget import UNITS
from swift_recovery.strategy.choose import Name, Way, choose
from swift_recovery.strategy.grouping import Groups
from swift_recovery.strategy.intervals import young_s
from swift_recovery.strategy.measured import JobMeasured

# What helpers must save, as a part: they meet first, and share no first step.
_SURE = 1.1

_SINCE_BEGIN = "as long as the job has run, since iteration 0: the script takes no checkpoints (job.checkpoint)"


def lines(
    job: JobMeasured, found: tuple[Way, ...], taken: str, groups: Groups, allows: str = ""
) -> tuple[str, ...]:  # fmt: skip
    """The first says what was measured; then comes one for each way. *taken*: the name of that which is. *groups*: of
    all nodes, those that begin to hold. *allows*: what is to be typed for helpers, '' if nothing is."""
    profile = job.profile
    sent = sum(profile.boundary_bytes) + job.elsewhere_bytes
    largest = max(machine.state_bytes for machine in profile.machines)
    logs, network = f"logs of {size_of(profile.log_bytes_per_s)}/s", size_of(profile.network_bytes_per_s)
    is_log_assumed = "log_bytes_per_s" in job.assumed
    known = [] if is_log_assumed else [logs]
    if job.state_bytes_per_s:
        known.append(f"checkpoints of {size_of(job.state_bytes_per_s)}/s")
    if "checkpoint_s" not in job.assumed and job.takes_checkpoints:
        known.append(f"{time_of(profile.checkpoint_s)} of standing still for one")
    if profile.store_bytes_per_s:
        known.append(f"copies of logs of {size_of(profile.store_bytes_per_s)}/s")
    said = [
        f"measured: {time_of(profile.iteration_s)} for an iteration, {size_of(largest)} of state on a node"
        + (f", {size_of(sent)} of messages between nodes in an iteration" if sent else "")
        + "".join(f", {text}" for text in known)
        + f"; assumed: a network of {network}/s"
        + (f", {logs}" if is_log_assumed else "")
    ]
    parts = {number for way in found if way.impossible for number in way.only}
    rest = sorted(set(range(len(profile.machines))) - parts) if parts else []
    said += [_line(job, way, way.name == taken, rest, allows) for way in found]
    if job.takes_checkpoints:
        said.append(_checkpoints(job))
    if 1 < len(groups) < len(profile.machines):
        said.append(f"messages are logged between groups of nodes only, from the next iteration on: {text_of(groups)}")
    return tuple(said)


def _checkpoints(job: JobMeasured) -> str:
    """How often one pays, beside how often one is taken."""
    profile = job.profile
    best = max(1, round(young_s(profile.checkpoint_s, profile.mtbf_s) / profile.iteration_s))
    return (
        f"  checkpoints: one every {profile.checkpoint_every} iterations; where all restart one every {best} (c*) "
        f"costs least, if a node is lost every {time_of(profile.mtbf_s)}"
    )


def taken(found: Sequence[Way], wanted: str, may_help: bool) -> str:
    """What a job takes: a replica if there is one, else logs, also if they bring back workers only, else a checkpoint;
    '' if nothing is possible. *may_help*: logs are repeated with helpers where that is sooner by so much that it may be
    believed."""
    possible = {way.name for way in found if not way.impossible or is_for_workers(way)}
    is_helped = wanted == "log+parallel" or (not wanted and may_help and _helpers_pay(found))
    log: Name = "log+parallel" if is_helped else "log"
    order: tuple[Name, ...] = ("replica", log, "checkpoint")
    return next((name for name in order if name in possible), "")


def _helpers_pay(found: Sequence[Way]) -> bool:
    possible = {way.name: way for way in found if not way.impossible or is_for_workers(way)}
    alone, helped = possible.get("log"), possible.get("log+parallel")
    return alone is not None and helped is not None and helped.worker_s * _SURE < alone.worker_s


def is_for_workers(way: Way) -> bool:
    """Logs of messages inside nodes: what is lost with a whole node begins again with a checkpoint."""
    return way.name in ("log", "log+parallel") and bool(way.impossible) and way.worker_s > 0


def by_waste(found: Sequence[Way], taken: str, wanted: str, mtbf_s: float) -> tuple[str, ...]:
    """What is to be said where another way than *taken* would waste less, as rare as failures are taken to be."""
    if any(way.impossible for way in found if way.name == taken):
        return ()  # waste is of whole nodes
    if all(way.impossible for way in found):
        return ()
    best = choose(tuple(found), mtbf_s).name
    # Of a node with several workers helpers make nothing shorter, nor longer.
    if best == taken or (best, taken) == ("log", "log+parallel"):
        return ()
    if (best, taken) == ("log+parallel", "log") and not _helpers_pay(found):
        return ()
    if wanted == taken:
        why = f"--strategy {wanted} says so"
    elif best == "log+parallel":
        why = "helpers run the script once more, which --helpers N allows"
    elif taken == "replica":
        why = "a replica has all that is lost, and nothing is repeated"
    else:
        why = "logs bring a lost stage back in place, and the others keep what they have"
    return (f"by what is wasted: {best}; taken: {taken}, because {why}",)


def _line(job: JobMeasured, way: Way, is_taken: bool, rest: list[int], allows: str) -> str:
    """*rest*: machines that another way than theirs is for, [] if one is for all of them."""
    if way.only:
        here, others = _nodes(way.only), _nodes(rest)
        return (
            f"  {way.name}: {_lost(way)}: taken for {here}; not possible for "
            f"{others}: {_why_not(way)}"
        )
    if is_for_workers(way):
        return f"  {way.name}: {_of_workers(job, way, is_taken, allows)}; not possible for a node: {_why_not(way)}"
    if way.impossible and way.worker_s:
        return f"  {way.name}: {time_of(way.worker_s)} for a lost worker; not possible for a node: {_why_not(way)}"
    if way.impossible:
        return f"  {way.name}: not possible: {_why_not(way)}"
    if not job.takes_checkpoints and way.name in ("log", "log+parallel"):
        said = _SINCE_BEGIN
    else:
        said = _lost(way)
        said += f"; {way.cost:+.2%} without failures; {size_of(way.storage_bytes)} on a node"
    if way.name == "log+parallel" and not is_taken and allows:
        said += f"; {allows}"
    return f"  {way.name}: {said}" + ((f": taken for {_nodes(rest)}" if rest else ": taken") if is_taken else "")


def _of_workers(job: JobMeasured, way: Way, is_taken: bool, allows: str) -> str:
    if job.takes_checkpoints:
        said = f"{time_of(way.worker_s)} for a lost worker; {way.cost:+.2%} without failures; "
        said += f"{size_of(way.storage_bytes)} on a node"
    else:
        said = _SINCE_BEGIN
    if is_taken:
        return f"{said}: taken"
    return f"{said}; {allows}" if way.name == "log+parallel" and allows else said


def _lost(way: Way) -> str:
    # Which nodes hold the same is not asked.
    left = " if they leave a replica" if way.name == "replica" else ""
    two = f", {time_of(way.two_s)} for two{left}" if way.two_s else ""
    return f"{time_of(way.worker_s)} for a lost worker, {time_of(way.recovery_s)} for a node{two}"


def _why_not(way: Way) -> str:
    """A job has nodes where a profile has machines."""
    return way.impossible.replace("machine", "node")


def _nodes(numbers: Sequence[int]) -> str:
    """By their numbers in the job."""
    return f"{'node' if len(numbers) == 1 else 'nodes'} {ranges_of(numbers)}"


def text_of(groups: Groups) -> str:
    return " ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def time_of(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    for unit, length_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def size_of(num_bytes: float) -> str:
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:.3g} {unit}"
    return f"{num_bytes:.0f} B"
