"""Several generations write into one directory of checkpoints: what counts, and what nobody can take away."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from swift_logging_store.stores.local import LocalStore
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.checkpoint.timelines import NOBODY, Claim, Entry, History, LowWater, Superseded, Timeline, read
from swift_recovery.transfer.state_file import Written
from tests.support.stores import check_generations_are_kept_apart


def timeline(number: int, run: str = "e17") -> Timeline:
    return Timeline(run, number)


def made(directory: CheckpointDirectory, iteration: int, by: Timeline = NOBODY, *, fenced: bool = True) -> None:
    """*fenced*: else the process was stopped after it had looked whether it may."""
    path = directory.new_part(iteration, 0, by)
    with directory.store.writing(path) as stream:
        stream.write(b"state")
    found = Checkpoint(iteration, 1, (Part(path.rpartition("/")[2], (0,), Written(5, 77)),), by)
    if fenced:
        directory.commit(found)
        return
    check, directory.check = directory.check, lambda timeline: None  # type: ignore[method-assign]
    try:
        directory.commit(found)
    finally:
        directory.check = check  # type: ignore[method-assign]


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(LocalStore(tmp_path))


def test_in_a_directory(tmp_path: Path) -> None:
    check_generations_are_kept_apart(LocalStore(tmp_path))


def test_names_are_read_as_they_are_written() -> None:
    entries = [Entry(7), Entry(7, timeline(3)), Entry(8, timeline(1, "t173"))]
    claims = [Claim(1, timeline(3), 0), Claim(22, timeline(1, "t173"), 7)]
    marks = [LowWater(timeline(2), 60)]
    names = [*(file.name for file in (*entries, *claims, *marks)), "iteration-7", "timeline-1", "timeline-low", "x"]
    found = read(names)
    assert sorted(found.entries, key=lambda e: e.name) == sorted(entries, key=lambda e: e.name)
    assert list(found.claims) == claims and list(found.marks) == marks


def test_what_an_earlier_generation_goes_on_to_write_does_not_count(directory: CheckpointDirectory) -> None:
    directory.claim(timeline(1), 0)
    made(directory, 20, timeline(1))
    directory.claim(timeline(2), 20)  # it has begun with that one
    with pytest.raises(Superseded, match=r"generation 2 of run e17.*has begun before iteration 20.*generation 1"):
        made(directory, 40, timeline(1))
    for iteration in (40, 60):
        made(directory, iteration, timeline(1), fenced=False)  # it had looked before
    assert directory.newest() == 20 and directory.committed() == [20]
    made(directory, 40, timeline(2))
    assert directory.newest() == 40 and directory.load(40).timeline == timeline(2)


def test_an_earlier_generation_takes_nothing_away(directory: CheckpointDirectory) -> None:
    directory.claim(timeline(1), 0)
    made(directory, 20, timeline(1))
    directory.claim(timeline(2), 20)
    made(directory, 40, timeline(2))
    made(directory, 100, timeline(1), fenced=False)
    with pytest.raises(Superseded):
        directory.remove(1, 100, timeline(1))
    assert directory.committed() == [20, 40]
    made(directory, 60, timeline(2))
    made(directory, 120, timeline(2))
    assert directory.remove(2, 120, timeline(2)) == [20, 40, 100]
    assert directory.committed() == [60, 120] and directory.store.names().count(Entry(100, timeline(1)).name) == 0


def test_a_later_run_is_later_whatever_its_number(directory: CheckpointDirectory) -> None:
    """Its etcd is another one, which counts again."""
    old, new = timeline(5, "e900"), timeline(1, "e4")
    directory.claim(old, 0)
    made(directory, 20, old)
    directory.claim(new, 20)
    with pytest.raises(Superseded):
        directory.claim(timeline(6, "e900"), 40)
    made(directory, 40, old, fenced=False)
    assert directory.newest() == 20
    made(directory, 30, new)
    assert directory.committed() == [20, 30]


def test_what_a_version_without_claims_has_left_counts(directory: CheckpointDirectory) -> None:
    for iteration in (10, 20, 30):
        made(directory, iteration)
    assert directory.newest() == 30
    directory.claim(timeline(1), 30)
    made(directory, 40, timeline(1))
    made(directory, 50)
    assert directory.committed() == [10, 20, 30, 40]
    assert directory.remove(2, 40, timeline(1)) == [10, 20]
    assert directory.committed() == [30, 40]


def test_a_claim_that_is_still_needed_stays(directory: CheckpointDirectory) -> None:
    """Where the second one had begun says what of the first is dead."""
    directory.claim(timeline(1), 0)
    for iteration in (20, 40):
        made(directory, iteration, timeline(1))
    directory.claim(timeline(2), 20)
    made(directory, 30, timeline(2))
    directory.claim(timeline(3), 50)
    assert directory.committed() == [20, 30]
    made(directory, 60, timeline(3))
    directory.remove(9, 35, timeline(3))
    assert directory.committed() == [20, 30, 60]
    made(directory, 70, timeline(3))
    directory.remove(1, 70, timeline(3))
    assert directory.committed() == [70]
    for iteration in (40, 60, 80):
        made(directory, iteration, timeline(1), fenced=False)
        assert directory.committed() == [70] and directory.newest(70) == 0
    made(directory, 80, timeline(3))
    directory.remove(1, 80, timeline(3))
    assert [claim.timeline.generation for claim in read(directory.store.names()).claims] == [3]
    made(directory, 60, timeline(1), fenced=False)
    assert directory.committed() == [80]


def test_one_that_comes_late_is_of_no_history_that_counts(directory: CheckpointDirectory) -> None:
    """Nothing was there that the second one made dead when the third removed what it did not need."""
    directory.claim(timeline(1), 0)
    made(directory, 20, timeline(1))
    directory.claim(timeline(2), 20)
    made(directory, 40, timeline(2))
    directory.claim(timeline(3), 70)
    for iteration in (80, 90):
        made(directory, iteration, timeline(3))
        directory.remove(9, iteration, timeline(3))
    made(directory, 60, timeline(1), fenced=False)
    assert directory.committed() == [20, 40, 80, 90] and directory.newest(80) == 40


def test_few_claims_stay_however_many_there_were(directory: CheckpointDirectory) -> None:
    """Those that begin within what is kept, one before, and the last of each run."""
    for number in range(1, 40):
        directory.claim(timeline(number), 10 * (number - 1))
        made(directory, 10 * number, timeline(number))
        directory.remove(2, 10 * number, timeline(number))
        assert len(directory.store.names()) <= 2 + 5 + 1
    for number in range(1, 40):
        if number < 39:
            made(directory, 10 * number + 1, timeline(number), fenced=False)
        assert directory.committed() == [380, 390]


def test_a_run_that_was_given_up_does_not_come_back_as_the_latest(directory: CheckpointDirectory) -> None:
    """Nothing that it has written is left."""
    old, new = timeline(1, "e4"), timeline(1, "e9")
    directory.claim(old, 0)
    made(directory, 10, old)
    directory.claim(new, 10)
    for iteration in (20, 30, 40):
        made(directory, iteration, new)
        directory.remove(1, iteration, new)
    assert directory.store.names().count(Entry(10, old).name) == 0
    with pytest.raises(Superseded):
        directory.claim(timeline(2, "e4"), 20)
    made(directory, 50, new)
    assert directory.newest() == 50


@pytest.mark.parametrize("when", ["before it reads the claims", "before it writes its own"])
def test_a_process_that_was_stopped_in_its_first_claim_does_not_come_after_its_successor(
    when: str, directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent had said yes, or says no. The names of the runs are of one etcd: e10 is later than e9."""
    old, new, is_ours = timeline(1, "e9"), timeline(1, "e10"), [True]

    def takes_over() -> None:
        is_ours[0] = False
        directory.claim(new, 0)

    def must_be_ours() -> None:
        if not is_ours[0]:
            raise Superseded("not ours")
        if when == "before it writes its own":
            takes_over()

    history = directory._history

    def reading() -> History:
        if when == "before it reads the claims":
            monkeypatch.setattr(directory, "_history", history)
            takes_over()
        return history()

    monkeypatch.setattr(directory, "_history", reading)
    with pytest.raises(Superseded):
        directory.claim(old, 0, must_be_ours)
    made(directory, 10, new)
    assert directory.newest() == 10


@pytest.mark.parametrize("seed", range(30))
def test_the_latest_keeps_what_it_has_committed(seed: int, tmp_path: Path) -> None:
    """All generations go on for ever, stopped and woken between any look and what follows from it."""
    choose = random.Random(seed)
    directory, keep = CheckpointDirectory(LocalStore(tmp_path)), 2
    at: dict[Timeline, int] = {}
    committed: dict[Timeline, list[int]] = {}
    latest, ever = timeline(1), set[str]()
    directory.claim(latest, 0)
    at[latest], committed[latest] = 0, []
    for _ in range(60):
        if choose.random() < 0.08:
            run = latest.run if choose.random() < 0.7 else f"e{choose.randrange(1000)}"
            number = latest.generation + 1 if run == latest.run else 1
            if Timeline(run, number) in at or any(t.run == run for t in at if run != latest.run):
                continue
            latest = Timeline(run, number)
            at[latest], committed[latest] = directory.newest() if choose.random() < 0.7 else at[max(at, key=id)], []
            at[latest] = min(at[latest], directory.newest())
            directory.claim(latest, at[latest])
        who = choose.choice(list(at))
        at[who] += 10
        made(directory, at[who], who, fenced=who == latest)
        if who == latest:
            committed[who].append(at[who])
        if choose.random() < 0.5:
            try:
                directory.remove(keep, at[who], who)
            except Superseded:
                assert who != latest
        ever |= {name for name in directory.store.names() if name.startswith("timeline-")}
        now = read(directory.store.names())
        late = (*now.entries, *(Entry(at[who], who) for who in at))
        of_all = replace(read(ever), entries=late).newest_first()
        assert replace(now, entries=late).newest_first() == of_all
        mine = committed[latest]
        if mine:
            assert directory.newest() == mine[-1]
            assert directory.load(mine[-1]).timeline == latest
            assert set(mine[-keep:]) <= set(directory.committed())
