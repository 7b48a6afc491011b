"""What a job was measured to cost, and the ways to recover it, compared in lines for people. Pure.

It must never say of what was assumed that it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_recovery.planning.reports import ranges_of
from swift_recovery.strategy.budget import UNITS
from swift_recovery.strategy.choose import Way
from swift_recovery.strategy.grouping import Groups
from swift_recovery.strategy.measured import JobMeasured


def lines(job: JobMeasured, found: tuple[Way, ...], taken: str, groups: Groups) -> tuple[str, ...]:
    """The first says what was measured; then comes one for each way. *taken*: the name of that which is. *groups*: of
    all nodes, those that begin to hold."""
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
    said += [_line(job, way, way.name == taken, rest) for way in found]
    if 1 < len(groups) < len(profile.machines):
        said.append(f"messages are logged between groups of nodes only, from the next iteration on: {text_of(groups)}")
    return tuple(said)


def _line(job: JobMeasured, way: Way, is_taken: bool, rest: list[int]) -> str:
    """*rest*: machines that another way than theirs is for, [] if one is for all of them."""
    if way.only:
        here, others = _nodes(way.only), _nodes(rest)
        return (
            f"  {way.name}: {_lost(way)}: taken for {here}; not possible for "
            f"{others}: {_why_not(way)}"
        )
    if way.impossible and way.worker_s:
        return f"  {way.name}: {time_of(way.worker_s)} for a lost worker; not possible for a node: {_why_not(way)}"
    if way.impossible:
        return f"  {way.name}: not possible: {_why_not(way)}"
    if not job.takes_checkpoints and way.name in ("log", "log+parallel"):
        said = "as long as the job has run, since iteration 0: the script takes no checkpoints (job.checkpoint)"
    else:
        said = _lost(way)
        said += f"; {way.cost:+.2%} without failures; {size_of(way.storage_bytes)} on a node"
    if way.name == "log+parallel" and not is_taken:
        said += "; --strategy log+parallel"
    return f"  {way.name}: {said}" + ((f": taken for {_nodes(rest)}" if rest else ": taken") if is_taken else "")


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
