"""Whatever is cut, and whoever stays, starts over or is replaced: each message comes once, in order, as it was sent."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from swift_logging_store.format.record import Channel
from swift_recovery.replay.message_counts import Counts, Inventory, Stand

FORTH, BACK = Channel("world", 0, 1), Channel("world", 1, 0)
UPDATE = ("update", None)
Step = tuple[str, Channel | None]
# What each rank does in each iteration; a receive is begun before it is waited for, here right away. All agree to an
# update: nobody is past it before all have come to it.
SCRIPTS: dict[str, list[list[Step]]] = {
    "ping pong": [[("send", FORTH), ("recv", BACK), UPDATE], [("recv", FORTH), ("send", BACK), UPDATE]],
    "two ahead": [
        [("send", FORTH), ("send", FORTH), ("recv", BACK), UPDATE],
        [("recv", FORTH), ("send", BACK), ("recv", FORTH), UPDATE],
    ],
    "after the update": [
        [("send", FORTH), UPDATE, ("recv", BACK), ("recv", BACK)],
        [("recv", FORTH), ("send", BACK), ("send", BACK), UPDATE],
    ],
}
AHEAD, AROUND, BEHIND = Channel("world", 1, 2), Channel("world", 2, 0, 9), Channel("world", 2, 1)
# A pipeline of three whose last rank reports to the first one, and to the second one, which does not wait at once.
THREE: list[list[Step]] = [
    [("send", FORTH), ("send", FORTH), ("recv", BACK), ("recv", BACK), UPDATE, ("recv", AROUND), ("recv", AROUND)],
    [
        ("recv", FORTH), ("send", AHEAD), ("recv", FORTH), ("send", AHEAD), ("recv", BEHIND), ("send", BACK),
        ("recv", BEHIND), ("send", BACK), UPDATE, ("recv", BEHIND),
    ],
    [
        ("recv", AHEAD), ("send", BEHIND), ("send", AROUND), ("recv", AHEAD), ("send", BEHIND), ("send", AROUND),
        ("send", BEHIND), UPDATE,
    ],
]  # fmt: skip
NUM_ITERATIONS = 2


@dataclass
class Rank:
    """A process: where it is in its script, what it has logged, and what it was given."""

    script: list[Step]
    counts: Counts = field(default_factory=Counts)
    iteration: int = 0
    at: int = 0
    is_asking: bool = False
    log: dict[tuple[Channel, int], tuple[int, str]] = field(default_factory=dict)
    got: dict[Channel, dict[int, str]] = field(default_factory=dict)  # by the script, in this life
    left_out: set[tuple[Channel, int]] = field(default_factory=set)  # after an update, of iterations passed over
    taken: dict[tuple[Channel, int], str] = field(default_factory=dict)
    replays: bool = False

    @property
    def is_updated(self) -> bool:
        return self.at > self.script.index(UPDATE)

    @property
    def is_inside(self) -> bool:
        return bool(self.at) or self.is_asking

    @property
    def holds(self) -> int:
        """It has the state before this iteration."""
        return self.iteration + self.is_updated

    def stands(self, iteration: int) -> Stand:
        if not self.is_inside:
            return "begin"
        return "middle" if self.iteration == iteration else "end"


class World:
    """Ranks, and what is under way between them. One that is replaced repeats its iterations at once."""

    def __init__(self, scripts: list[list[Step]]) -> None:
        self.scripts = scripts
        self.ranks = [Rank(script) for script in scripts]
        channels = [channel for script in scripts for _, channel in script if channel is not None]
        self.wires: dict[Channel, deque[str]] = {channel: deque() for channel in channels}

    def step(self, number: int) -> bool:
        """The next thing that this rank does; False if it has to wait, or is done."""
        rank = self.ranks[number]
        if rank.iteration == NUM_ITERATIONS:
            return False
        if rank.at == len(rank.script):
            rank.counts.end()
            rank.iteration, rank.at = rank.iteration + 1, 0
            return True
        kind, channel = rank.script[rank.at]
        if not rank.is_inside:
            rank.counts.begin()
        if channel is None:
            return self._update(rank)
        if kind == "send":
            index = rank.counts.send(channel)
            message = f"{channel.source}.{index}"
            rank.log[channel, index] = (rank.iteration, message)
            if rank.counts.is_waited_for(channel, index) if rank.replays else not rank.counts.is_had(channel, index):
                self.wires[channel].append(message)
            rank.at += 1
            return True
        if not rank.is_asking:
            index = rank.counts.ask(channel)
            if (channel, index) in rank.taken:
                self._receive(rank, channel, rank.taken[channel, index])
                return True
            assert not rank.replays, "a complete iteration is in the logs"
            rank.is_asking = True
            return True
        if not self.wires[channel]:
            return False
        self._receive(rank, channel, self.wires[channel].popleft())
        return True

    def _receive(self, rank: Rank, channel: Channel, message: str) -> None:
        rank.got.setdefault(channel, {})[rank.counts.here.get(channel, 0)] = message
        rank.counts.receive(channel)
        rank.is_asking = False
        rank.at += 1

    def _update(self, rank: Rank) -> bool:
        if not rank.replays and any(
            other.iteration < rank.iteration
            or (other.iteration == rank.iteration and other.at < other.script.index(UPDATE))
            for other in self.ranks
        ):
            return False
        rank.at += 1
        return True

    def cut(self, what: Sequence[str]) -> None:
        """What each rank does now: "stays", "again" (its iteration, from its start, or what is left of it is passed
        over), or "replaced"."""
        for wire in self.wires.values():
            wire.clear()
        survivors = [rank for rank, how in zip(self.ranks, what, strict=True) if how != "replaced"]
        target = max(rank.holds for rank in survivors)
        for rank in survivors:
            if rank.holds < target:  # it was in the agreement, which another one has passed
                assert rank.script[rank.at] == UPDATE
                rank.at += 1
        for rank, how in zip(self.ranks, what, strict=True):
            if how == "again" and rank.is_inside:
                self._unwind(rank)
        replays = [number for number, how in enumerate(what) if how == "replaced"]
        told: dict[int, Inventory] = {}
        for number, rank in enumerate(self.ranks):
            if number not in replays:
                told[number] = rank.counts.told(rank.stands(target), _ends(rank))
        for number in replays:
            new = self.ranks[number] = Rank(self.scripts[number])
            new.taken = {
                (channel, index): message
                for other in self.ranks
                for (channel, index), (_, message) in other.log.items()
                if channel.destination == number and index < other.counts.sent.get(channel, 0)
            }
        for number, rank in enumerate(self.ranks):
            others = {other: one for other, one in told.items() if other != number}
            stands = rank.stands(target)
            for channel, numbers in rank.counts.rejoin(stands, others, replays).items():
                self.wires[channel].extend(rank.log[channel, index][1] for index in numbers)
            if number not in replays:
                for other in others.values():
                    assert rank.counts.follow(stands, _to(number, other.sent)) is None
        for number in replays:
            new = self.ranks[number]
            new.replays = True
            while new.iteration < target:
                assert self.step(number)
            new.replays = False
            for other_number, other in told.items():
                assert new.counts.follow("middle", {}) is None
                assert all(
                    new.counts.asked.get(channel, 0) == count for channel, count in _to(number, other.sent).items()
                )
                rank = self.ranks[other_number]
                assert rank.counts.follow(rank.stands(target), _to(other_number, new.counts.sent)) is None

    def _unwind(self, rank: Rank) -> None:
        if rank.is_updated:
            rest = rank.script[rank.at :]
            for channel in {channel for _, channel in rest if channel is not None}:
                begin = rank.counts.here.get(channel, 0)
                num = sum(step == ("recv", channel) for step in rest)
                rank.left_out |= {(channel, begin + index) for index in range(num)}
            rank.counts.pass_over()
            rank.iteration += 1
        else:
            rank.counts.rewind()
            for channel, got in rank.got.items():
                for index in range(rank.counts.here.get(channel, 0), max(got, default=0) + 1):
                    got.pop(index, None)
        rank.at, rank.is_asking = 0, False

    def run(self, schedule: Iterator[int]) -> None:
        while any(rank.iteration < NUM_ITERATIONS for rank in self.ranks):
            first, num = next(schedule), len(self.ranks)
            assert any(self.step((first + offset) % num) for offset in range(num)), "all wait for ever"
        for number, rank in enumerate(self.ranks):
            for channel in self.wires:
                if channel.destination == number:
                    num = sum(step == ("recv", channel) for step in rank.script) * NUM_ITERATIONS
                    expected = {index for index in range(num) if (channel, index) not in rank.left_out}
                    assert rank.got.get(channel, {}) == {index: f"{channel.source}.{index}" for index in expected}
        assert not any(self.wires.values())


def _to(rank: int, sent: Mapping[Channel, int]) -> dict[Channel, int]:
    return {channel: count for channel, count in sent.items() if channel.destination == rank}


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


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("first", WAYS, ids="-".join)
def test_each_message_comes_once_and_in_order(script: str, first: tuple[str, str]) -> None:
    """Some steps in any order, then a cut; then any few steps, and another cut."""
    choose = random.Random(script)
    orders = [[*choose.choices((0, 1), k=choose.randrange(12)), 0, 1] for _ in range(50)]
    for order in orders:
        for num_between, second in itertools.product(range(4), WAYS):
            world = World(SCRIPTS[script])
            for number in order:
                world.step(number)
            world.cut(first)
            for number in order[:num_between]:
                world.step(number)
            world.cut(second)
            world.run(itertools.cycle(order))


@pytest.mark.parametrize("seed", range(20))
def test_so_it_is_with_three(seed: int) -> None:
    """Random steps and up to four cuts, a hundred times."""
    choose = random.Random(seed)
    for _ in range(100):
        world = World(THREE)
        for _ in range(choose.randrange(1, 5)):
            for _ in range(choose.randrange(30)):
                world.step(choose.randrange(3))
            ways = [choose.choice(("stays", "again")) for _ in range(3)]
            ways[choose.randrange(3)] = choose.choice(("stays", "again", "replaced"))
            world.cut(ways)
        world.run(iter(lambda: choose.randrange(3), None))


def test_who_starts_over_is_not_sent_what_it_left_out() -> None:
    """It was cut after its update, before it received two messages of that iteration."""
    sender, receiver = Counts(), Counts()
    for _ in range(2):
        sender.send(FORTH)
    sender.end()
    receiver.pass_over()
    told, sent = receiver.told("begin", {}), sender.told("begin", {}).sent
    assert sender.rejoin("begin", {1: told}, ()) == {} and receiver.follow("begin", sent) is None
    assert sender.send(FORTH) == receiver.ask(FORTH) == 2 and not sender.is_had(FORTH, 2)


def test_who_waits_for_it_is() -> None:
    sender, receiver = Counts(), Counts()
    for _ in range(2):
        sender.send(FORTH)
    receiver.ask(FORTH)
    told = receiver.told("end", {})
    assert sender.rejoin("begin", {1: told}, ()) == {FORTH: range(2)}
    # One that takes the sender's place comes to them when it repeats that iteration.
    new = Counts()
    new.rejoin("begin", {1: told}, [0])
    assert new.is_waited_for(FORTH, 0) and new.is_waited_for(FORTH, 1) and not new.is_had(FORTH, 0)
    assert not new.is_waited_for(BACK, 0)


def test_who_has_counted_otherwise_says_so() -> None:
    """A message of the iteration before was sent, and received by nobody."""
    receiver = Counts()
    receiver.begin()
    assert receiver.follow("middle", {FORTH: 1}) == FORTH
    assert receiver.follow("middle", {FORTH: 0}) is None and receiver.follow("end", {FORTH: 1}) is None
    assert receiver.follow("begin", {FORTH: 1}) == FORTH
    receiver.pass_over()
    assert receiver.follow("begin", {FORTH: 1}) is None and receiver.ask(FORTH) == 1


def test_a_new_process_goes_on_counting_where_its_checkpoint_was() -> None:
    counts = Counts()
    counts.set({FORTH: 4}, {BACK: 5})
    assert counts.told("begin", {BACK: 7}) == Inventory("begin", {BACK: 7}, {FORTH: 4})
    assert counts.send(FORTH) == 4 and counts.ask(BACK) == 5
    assert counts.told("middle", {}) == Inventory("middle", {BACK: 5}, {FORTH: 4})
    counts.end()  # what nobody has waited for is here as well
    assert counts.told("begin", {}) == Inventory("begin", {BACK: 6}, {FORTH: 5})
    # Who repeats iterations was given all; who does not is sent what it lacks.
    assert counts.rejoin("begin", {}, [1]) == {}
    assert counts.rejoin("middle", {1: Inventory("middle", {FORTH: 3}, {})}, ()) == {FORTH: range(3, 5)}
