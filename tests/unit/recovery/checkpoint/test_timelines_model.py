"""All interleavings of generations that write checkpoints into one directory, each stopped between any two steps.

Every generation claims, commits and removes in the order of `CheckpointDirectory` and `Checkpoints`, one access to the
store at a time, and asks its agent where they do: the answer is right at that moment, and old at the next step. What
counts is compared with what would if nothing that says who has begun had ever been removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from swift_recovery.checkpoint import timelines as core
from swift_recovery.checkpoint.directory import to_remove
from swift_recovery.checkpoint.timelines import Entry, History, Superseded, Timeline

Step = tuple[str, str]  # what, and the name of a file
read = cache(core.read)


@dataclass(frozen=True)
class Writer:
    """A generation. *todo*: of what it is doing, the steps to come. *has_removed*: since its last commit."""

    timeline: Timeline
    begins: int = -1
    at: int = 0
    has_claimed: bool = False
    has_removed: bool = True
    is_over: bool = False
    todo: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Directory:
    """*names*: of the files there. *ever*: of all claims and marks that were there at any time. *current*: the number
    of the newest generation, as etcd has it."""

    writers: tuple[Writer, ...]
    names: frozenset[str] = frozenset()
    ever: frozenset[str] = frozenset()
    current: int = 0


@dataclass(frozen=True)
class Rules:
    """*num_checkpoints*: of each generation, at most. *asks_first*: before it reads the claims, not after it."""

    num_checkpoints: tuple[int, ...] = (1, 1, 2)
    keep: int = 1
    asks_first: bool = False
    has_marks: bool = True
    needless: Callable[[History, Timeline, set[Entry]], list[str]] = (
        lambda history, timeline, removed: [file.name for file in history.needless()]
    )


def successors(world: Directory, rules: Rules) -> Iterator[Directory]:
    for number, writer in enumerate(world.writers[: world.current + 1]):
        if not writer.is_over:
            yield from steps(world, rules, number, writer)
    if world.current + 1 < len(world.writers) and world.writers[world.current].begins >= 0:
        yield replace(world, current=world.current + 1)


def steps(world: Directory, rules: Rules, number: int, writer: Writer) -> Iterator[Directory]:
    def after(names: frozenset[str] = world.names, new: str = "", **changes: object) -> Directory:
        writers = list(world.writers)
        writers[number] = replace(writer, **changes)  # type: ignore[arg-type]
        ever = world.ever | {new} if new.startswith("timeline-") else world.ever
        return replace(world, writers=tuple(writers), names=names, ever=ever)

    if writer.todo:
        yield go_on(world, rules, number, writer, after)
    elif writer.begins < 0:
        newest = next(iter(read(world.names).newest_first()), Entry(0)).iteration
        yield after(begins=newest, at=newest)  # all start again
        if number and world.writers[number - 1].at > newest:
            at = world.writers[number - 1].at
            yield after(begins=at, at=at)  # in place
    elif not writer.has_claimed:
        yield after(todo=(("ask", ""), ("read claims", "")) if rules.asks_first else (("read claims", ""),))
    else:
        if not writer.has_removed:
            yield after(todo=(("ask", ""), ("look what goes", "")))
        if writer.at < writer.begins + rules.num_checkpoints[number]:
            entry = Entry(writer.at + 1, writer.timeline)
            yield after(todo=(("ask", ""), ("check", ""), ("put", entry.name)))


def go_on(
    world: Directory, rules: Rules, number: int, writer: Writer, after: Callable[..., Directory]
) -> Directory:  # fmt: skip
    (what, name), todo = writer.todo[0], writer.todo[1:]
    try:
        match what:
            case "ask":
                return after(todo=todo) if number == world.current else after(is_over=True, todo=())
            case "check":
                read(world.names).check(writer.timeline)
                return after(todo=todo)
            case "read claims":
                claim = read(world.names).new_claim(writer.timeline, writer.begins)
                return after(todo=(*(() if rules.asks_first else (("ask", ""),)), ("put", claim.name)))
            case "look what goes":
                return after(todo=tuple(removal(read(world.names), rules, writer)), has_removed=True)
            case "remove":
                return after(names=world.names - {name}, todo=todo)
    except Superseded:
        return after(is_over=True, todo=())
    changes = {"has_claimed": True} if name.startswith("timeline-0") else {}
    if name.startswith("iteration-"):
        changes = {"at": writer.at + 1, "has_removed": False}
    return after(names=world.names | {name}, new=name, todo=todo, **changes)


def removal(history: History, rules: Rules, writer: Writer) -> Iterator[Step]:
    """As `CheckpointDirectory.remove`."""
    history.check(writer.timeline)
    counting, newest = history.newest_first(), writer.at
    gone = set(to_remove([e.iteration for e in counting], [e.iteration for e in history.entries], rules.keep, newest))
    old = [e for e in history.entries if e.iteration < newest and not history.is_later(e, writer.timeline)]
    removed = [entry for entry in old if entry.iteration in gone or entry not in counting]
    yield from (("remove", entry.name) for entry in removed)
    kept = [entry for entry in counting if entry not in removed and entry.iteration <= newest]
    if rules.has_marks and (mark := history.low_water(writer.timeline, kept)) is not None:
        yield "put", mark.name
    yield from (("remove", name) for name in rules.needless(history, writer.timeline, set(removed)))


def check(world: Directory) -> None:
    there = read(world.names)
    counting = compared(world.names, world.ever, tuple(writer.timeline for writer in world.writers))
    latest = world.writers[world.current]
    if latest.has_claimed:
        there.check(latest.timeline)
        if latest.at > latest.begins:
            assert counting[0] == Entry(latest.at, latest.timeline), "its newest is not the newest"


@cache
def compared(names: frozenset[str], ever: frozenset[str], writers: tuple[Timeline, ...]) -> list[Entry]:
    """What counts. With what comes late, it is what would if all that there ever was were there."""
    there, all_claims = read(names), read(ever)
    entries = {*there.entries, *(Entry(iteration, writer) for writer in writers for iteration in range(1, 6))}
    with_all = lambda history: replace(history, entries=tuple(entries)).newest_first()  # noqa: E731
    assert with_all(there) == with_all(all_claims), "what counts depends on what was removed"
    return there.newest_first()


def explore(timelines: list[Timeline], rules: Rules, max_states: int = 1 << 30) -> int:
    """Through all states, or up to so many. Returns how many."""
    start = Directory(tuple(map(Writer, timelines)))
    seen, todo = {start}, [start]
    while todo and len(seen) < max_states:
        world = todo.pop()
        for there in successors(world, rules):
            if there not in seen:
                seen.add(there)
                check(there)
                todo.append(there)
    return len(seen)


# Two of one job, and one of a job that begins later in the same etcd: e10 comes after e9.
ONE_JOB = [Timeline("e9", 1), Timeline("e9", 2), Timeline("e9", 3)]
TWO_JOBS = [Timeline("e9", 1), Timeline("e9", 2), Timeline("e10", 1)]


def test_what_counts_does_not_depend_on_what_was_removed() -> None:
    for timelines in (ONE_JOB, TWO_JOBS):
        for keep in (1, 2):
            assert explore(timelines, Rules(keep=keep)) > 10_000


def needless_by_what_is_there(history: History, timeline: Timeline, removed: set[Entry]) -> list[str]:
    """The rule before: of what has not come yet it knows nothing."""
    left = replace(history, entries=tuple(entry for entry in history.entries if entry not in removed))
    runs, mine = {entry.timeline.run for entry in left.entries} | {timeline.run}, left.order(timeline)
    kills = lambda claim: any(  # noqa: E731
        entry.iteration > claim.begins and left.order(entry.timeline) < left.order(claim.timeline)
        for entry in left.entries
    )
    return [
        claim.name for claim in left.claims if left.order(claim.timeline) < mine and not kills(claim)
        and (claim.timeline.run not in runs or claim.timeline.run == timeline.run)
    ]  # fmt: skip


def all_but_the_latest(history: History, timeline: Timeline, removed: set[Entry]) -> list[str]:
    return [claim.name for claim in history.claims if history.order(claim.timeline) < history.order(timeline)]


@pytest.mark.parametrize(
    ("timelines", "rules"),
    [
        (ONE_JOB, Rules(needless=needless_by_what_is_there, has_marks=False)),
        (TWO_JOBS, Rules(needless=needless_by_what_is_there, has_marks=False)),
        (ONE_JOB, Rules(needless=all_but_the_latest, keep=2)),
        (TWO_JOBS, Rules(asks_first=True)),
        ([Timeline("e10", 1), Timeline("e9", 1)], Rules()),  # as names are ordered, not numbers
    ],
)
def test_a_wrong_rule_is_found(timelines: list[Timeline], rules: Rules) -> None:
    with pytest.raises((AssertionError, Superseded)):
        explore(timelines, rules)
