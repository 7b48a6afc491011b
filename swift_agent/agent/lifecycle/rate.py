"""How fast a job trains, as rank 0's agent sees it. Pure.

The agent asks its worker of rank 0 where it is, every `ASK_S`, and again only when it has answered: it may be stopped.
The worker's listening thread answers, so the training itself does nothing for it. Every `TELL_S` the agent has the
result written. Times are seconds of one monotonic clock. Must never read that clock, nor send anything: times come in,
commands go out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swift_agent.agent.lifecycle.commands import AskIteration, Command, TellRate
from swift_agent.agent.lifecycle.events import Event, RateTick, WorkerAt

ASK_S = 2.5
TELL_S = 5.0
# How far back the mean goes.
WINDOW_S = 30.0
# What is kept of a generation, in etcd, of when its iterations began: some kilobytes, the begin and the end in full.
MOST_MARKS = 160


@dataclass(frozen=True)
class Sighting:
    at_s: float
    iteration: int


@dataclass(frozen=True)
class Meter:
    """*seen*: when the worker was at which iteration, oldest first."""

    seen: tuple[Sighting, ...] = ()
    asked_s: float | None = None
    asked_pid: int = 0
    """The process whose answer is still to come, 0 if there is none."""
    told_s: float | None = None
    told_iteration: int = -1
    untold: Mapping[int, float] = field(default_factory=dict)
    """When iterations began, by number: seen since the last `TellRate`."""

    @property
    def iteration(self) -> int:
        return self.seen[-1].iteration

    @property
    def per_s(self) -> float | None:
        """Iterations per second, None where it was seen only once."""
        first, last = self.seen[0], self.seen[-1]
        return (last.iteration - first.iteration) / (last.at_s - first.at_s) if last.at_s > first.at_s else None


def ask_due(meter: Meter, now_s: float) -> bool:
    return meter.asked_s is None or now_s - meter.asked_s >= ASK_S


def see(meter: Meter, iteration: int, now_s: float) -> Meter:
    """The worker is at *iteration*. A smaller one than before: all workers have been started again."""
    again = bool(meter.seen) and iteration < meter.iteration
    known = () if again else tuple(one for one in meter.seen if now_s - one.at_s <= WINDOW_S)
    return replace(meter, seen=(*known, Sighting(now_s, iteration)))


def tell_due(meter: Meter, now_s: float) -> bool:
    """Whether there is something new to say, and it is time."""
    if not meter.seen or meter.iteration == meter.told_iteration or meter.per_s is None:
        return False
    return meter.told_s is None or now_s - meter.told_s >= TELL_S


def watch(
    meter: Meter, event: Event, pid: int, generation: int, trains: bool, now_s: float
) -> tuple[Meter, tuple[Command, ...]]:
    """What *event* means for the meter, and what has to be done. *pid*: of rank 0; *trains*: it can be asked."""
    match event:
        case WorkerAt(0, sender, iteration, began_s) if sender == pid:
            meter = replace(see(meter, iteration, now_s), asked_pid=0, untold={**meter.untold, **began_s})
        case RateTick() if trains and meter.asked_pid != pid and ask_due(meter, now_s):
            return replace(meter, asked_s=now_s, asked_pid=pid), (AskIteration((0,)),)
        case _:
            return meter, ()
    if not tell_due(meter, now_s):
        return meter, ()
    told = TellRate(generation, meter.iteration, meter.per_s, meter.untold)
    return replace(meter, told_s=now_s, told_iteration=meter.iteration, untold={}), (told,)


def thinned(began_s: Mapping[int, float], most: int = MOST_MARKS) -> dict[int, float]:
    """*began_s*, by iteration, without every second one of the middle third until there are *most* at most: what
    follows a failure, and what comes before the next, is looked at most closely."""
    kept = sorted(began_s)
    while len(kept) > most:
        edge = len(kept) // 3
        kept = kept[:edge] + kept[edge : len(kept) - edge : 2] + kept[len(kept) - edge :]
    return {iteration: began_s[iteration] for iteration in kept}
