"""Breadth-first search through all states of a world, and through all ways on once nothing fails any more."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from tests.model.world import Action, Violation, World, demand

ENDLESS = "it can go round for ever without a failure"
# Whether it does is seen from all steps together: at so many states, and whenever there are twice as many.
FIRST_LOOK = 1000


@dataclass
class Found:
    """*complete*: no state was left out because of the bound. *trace*: how a violation is reached, shortest first."""

    num_states: int = 0
    num_steps: int = 0
    num_settled: int = 0
    num_resumed: int = 0
    longest: int = 0
    generations: int = 0
    seconds: float = 0.0
    complete: bool = True
    violation: str = ""
    trace: list[Action] = field(default_factory=list)

    def __str__(self) -> str:
        what = "all" if self.complete else "the first"
        return (f"{what} {self.num_states} states, {self.num_steps} steps, {self.num_settled} ends, "
                f"{self.num_resumed} states with all resumed, up to generation {self.generations}, "
                f"at most {self.longest} steps to an end, {self.seconds:.1f} s {self.violation}")  # fmt: skip


def explore(start: World, max_states: int = 1 << 30, max_seconds: float = 1e9) -> Found:
    """Ends at the first violation. A bound cuts what is farthest from the start."""
    began_s = time.monotonic()
    found = Found()
    first = start.key()
    came_from: dict[int, tuple[int, Action] | None] = {first: None}
    ways_on: dict[int, list[int]] = {}
    todo: deque[tuple[int, World]] = deque([(first, start)])
    look_for_rounds_at = FIRST_LOOK
    while todo:
        key, world = todo.popleft()
        calm = world.actions()
        action: Action = ("", 0, 0)
        try:
            if not calm:
                found.num_settled += 1
                world.settled()
            found.num_resumed += world.resumed
            found.generations = max(found.generations, world.view.number)
            nexts: list[int] = []
            for action in [*calm, *world.failures()]:
                twin = world.clone()
                twin.do(action)
                found.num_steps += 1
                there = twin.key()
                if action in calm:
                    nexts.append(there)
                if there not in came_from:
                    if len(came_from) >= max_states or time.monotonic() - began_s > max_seconds:
                        found.complete = False
                        continue
                    came_from[there] = (key, action)
                    todo.append((there, twin))
            ways_on[key] = nexts
            if len(ways_on) >= look_for_rounds_at:
                look_for_rounds_at *= 2
                demand(_longest(ways_on) >= 0, ENDLESS)
        except Exception as error:
            found.violation = f"{type(error).__name__}: {error}"
            if not isinstance(error, (Violation, AssertionError, KeyError)):
                raise
            found.trace = _trace(came_from, key) + ([action] if action[0] else [])
            break
    found.num_states = len(came_from)
    if not found.violation:
        found.longest = _longest(ways_on)
        if found.longest < 0:
            found.violation = ENDLESS
    found.seconds = time.monotonic() - began_s
    return found


def _trace(came_from: dict[int, tuple[int, Action] | None], key: int) -> list[Action]:
    actions: list[Action] = []
    while (step := came_from[key]) is not None:
        key, action = step
        actions.append(action)
    return actions[::-1]


def _longest(ways_on: dict[int, list[int]]) -> int:
    """Steps of the longest way on without failures, -1 if one goes round: all of them end, whatever the order."""
    num_ways_in = dict.fromkeys(ways_on, 0)
    for nexts in ways_on.values():
        for there in nexts:
            if there in num_ways_in:
                num_ways_in[there] += 1
    free = [key for key, number in num_ways_in.items() if number == 0]
    depth = dict.fromkeys(free, 0)
    done = 0
    while free:
        key = free.pop()
        done += 1
        for there in ways_on[key]:
            if there not in num_ways_in:
                continue
            depth[there] = max(depth.get(there, 0), depth[key] + 1)
            num_ways_in[there] -= 1
            if num_ways_in[there] == 0:
                free.append(there)
    return max(depth.values(), default=0) if done == len(ways_on) else -1


def replay(world: World, actions: list[Action]) -> World:
    """Carry out the actions; raises what they lead to."""
    for action in actions:
        assert action in [*world.actions(), *world.failures()], f"{action} cannot happen here"
        world.do(action)
    if not world.actions():
        world.settled()
    return world
