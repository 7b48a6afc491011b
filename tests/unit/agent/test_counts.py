"""Whatever is cut, and whoever stays, begins anew or is replaced: each message comes once, in order, as it was sent."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from swift_agent.counts import Counts
from swift_logging_store.record import Channel

FORTH, BACK = Channel("world", 0, 1), Channel("world", 1, 0)
# What each rank does in each iteration; a receive is begun before it is waited for, here right away.
SCRIPTS = [
    [[("send", FORTH), ("recv", BACK)], [("recv", FORTH), ("send", BACK)]],
    [[("send", FORTH), ("send", FORTH), ("recv", BACK)], [("recv", FORTH), ("send", BACK), ("recv", FORTH)]],
]
NUM_ITERATIONS = 2


@dataclass
class Rank:
    """A process: where it is in its script, what it has logged, and what it was given."""

    script: list[tuple[str, Channel]]
    counts: Counts = field(default_factory=Counts)
    iteration: int = 0
    at: int = 0
    is_asking: bool = False
    log: dict[tuple[Channel, int], tuple[int, str]] = field(default_factory=dict)
    got: dict[Channel, list[str]] = field(default_factory=dict)  # by the script, in this life
    taken: dict[tuple[Channel, int], str] = field(default_factory=dict)
    replays: bool = False


class World:
    """Two ranks, and what is under way between them. One that is replaced repeats its iterations at once."""

    def __init__(self, scripts: list[list[tuple[str, Channel]]]) -> None:
        self.scripts = scripts
        self.ranks = [Rank(script) for script in scripts]
        self.wires: dict[Channel, deque[str]] = {FORTH: deque(), BACK: deque()}

    def step(self, number: int) -> bool:
        """The next thing that this rank does; False if it has to wait, or is done."""
        rank = self.ranks[number]
        if rank.iteration == NUM_ITERATIONS:
            return False
        if rank.at == len(rank.script):
            return self._end(rank)
        kind, channel = rank.script[rank.at]
        if rank.at == 0 and not rank.is_asking:
            rank.counts.begin()
        if kind == "send":
            index = rank.counts.send(channel)
            message = f"{channel.source}.{index}"
            rank.log[channel, index] = (rank.iteration, message)
            if not rank.replays and not rank.counts.is_had(channel, index):
                self.wires[channel].append(message)
            rank.at += 1
            return True
        if not rank.is_asking:
            index = rank.counts.ask(channel)
            if (channel, index) in rank.taken:
                rank.got.setdefault(channel, []).append(rank.taken[channel, index])
                rank.counts.receive(channel)
                rank.at += 1
                return True
            assert not rank.replays, "a complete iteration is in the logs"
            rank.is_asking = True
            return True
        if not self.wires[channel]:
            return False
        rank.got.setdefault(channel, []).append(self.wires[channel].popleft())
        rank.counts.receive(channel)
        rank.is_asking = False
        rank.at += 1
        return True

    def _end(self, rank: Rank) -> bool:
        # Nobody goes on before all have come to the end: the agreement.
        if not rank.replays and any(
            other.iteration < rank.iteration or (other.iteration == rank.iteration and other.at < len(other.script))
            for other in self.ranks
        ):
            return False
        rank.counts.end()
        rank.iteration, rank.at = rank.iteration + 1, 0
        return True

    def cut(self, what: tuple[str, str]) -> None:
        """What each rank does now: "stays", "again" (its iteration, from its start), or "replaced"."""
        for wire in self.wires.values():
            wire.clear()
        target = max(rank.iteration for rank in self.ranks)
        for number, rank in enumerate(self.ranks):
            while rank.iteration < target:  # it was in the agreement, which another one has passed
                assert rank.at == len(rank.script) and self._end(rank)
            if what[number] == "again" and (rank.at or rank.is_asking) and rank.iteration < NUM_ITERATIONS:
                rank.counts.rewind()
                for channel, got in rank.got.items():
                    del got[rank.counts.here.get(channel, 0) :]
                rank.at, rank.is_asking = 0, False
        replays = [number for number, how in enumerate(what) if how == "replaced"]
        for number in replays:
            new = self.ranks[number] = Rank(self.scripts[number])
            new.taken = {
                (channel, index): message
                for other in self.ranks
                for (channel, index), (_, message) in other.log.items()
                if channel.destination == number and index < other.counts.sent.get(channel, 0)
            }
            new.replays = True
            while new.iteration < min(target, NUM_ITERATIONS):
                assert self.step(number)
            new.replays = False
        told = {number: rank.counts.told(_ends(rank)) for number, rank in enumerate(self.ranks)}
        for number, rank in enumerate(self.ranks):
            others = {other: counts for other, counts in told.items() if other != number and other not in replays}
            for channel, numbers in rank.counts.rejoin(others, replays).items():
                self.wires[channel].extend(rank.log[channel, index][1] for index in numbers)

    def run(self, schedule: Iterator[int]) -> None:
        while any(rank.iteration < NUM_ITERATIONS for rank in self.ranks):
            first = next(schedule)
            assert self.step(first) or self.step(1 - first), "both wait for ever"
        for number, rank in enumerate(self.ranks):
            for channel in (FORTH, BACK):
                if channel.destination == number:
                    num = sum(step == ("recv", channel) for step in rank.script) * NUM_ITERATIONS
                    assert rank.got[channel] == [f"{channel.source}.{index}" for index in range(num)]
        assert not any(self.wires.values())


def _ends(rank: Rank) -> dict[Channel, int]:
    ends: dict[Channel, int] = {}
    for channel, _ in rank.taken:
        end = rank.counts.here.get(channel, 0)
        while (channel, end) in rank.taken:
            end += 1
        ends[channel] = end
    return ends


WAYS = [
    pair for pair in itertools.product(("stays", "again", "replaced"), repeat=2) if pair != ("replaced", "replaced")
]


@pytest.mark.parametrize("scripts", SCRIPTS, ids=["ping pong", "two ahead"])
@pytest.mark.parametrize("first", WAYS, ids="-".join)
def test_each_message_comes_once_and_in_order(scripts: list[list[tuple[str, Channel]]], first: tuple[str, str]) -> None:
    """Every order of the first steps, then a cut; then any few steps, and another cut."""
    for order in itertools.product((0, 1), repeat=7):
        for num_between, second in itertools.product(range(4), WAYS):
            world = World(scripts)
            for number in order:
                world.step(number)
            world.cut(first)
            for number in order[:num_between]:
                world.step(number)
            world.cut(second)
            world.run(itertools.cycle(order))


def test_who_begins_anew_with_all_others_leaves_nothing_out() -> None:
    counts = Counts()
    counts.rejoin({1: {FORTH: 3}}, ())
    assert counts.is_had(FORTH, 2) and not counts.is_had(FORTH, 3)
    counts.forget()
    assert not counts.is_had(FORTH, 0)


def test_a_new_process_goes_on_counting_where_its_checkpoint_was() -> None:
    counts = Counts()
    counts.set({FORTH: 4}, {BACK: 5})
    assert counts.told({BACK: 7}) == {BACK: 7} and counts.send(FORTH) == 4 and counts.ask(BACK) == 5
    assert counts.told({}) == {BACK: 5}
    counts.end()  # what nobody has waited for is here as well
    assert counts.told({}) == {BACK: 6}
    # Who repeats iterations was given all; who does not is sent what it lacks.
    assert counts.rejoin({}, [1]) == {} and counts.rejoin({1: {FORTH: 3}}, ()) == {FORTH: range(3, 5)}
