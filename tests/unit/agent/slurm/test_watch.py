"""When Slurm is asked, and what follows from an answer that does not come. The programs stand for a slurmctld that is
away or hangs; tests/faults/test_slurm.py has a real one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.slurm import watch
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import CoordinatorRecord, DrainRecord
from swift_rendezvous.roster.view import view_of_entries
from tests.support.memory_store import MemoryStore
from tests.support.records import generation, node

KEYS = Keys("job")


class Lab:
    """A job of three nodes, as the agent of n0 sees it, and a program in the place of sinfo."""

    def __init__(self, directory: Path) -> None:
        self.store, self.asked, self._program = MemoryStore(), directory / "asked", directory / "sinfo"
        self.store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
        self.store.put(KEYS.generation, encode(generation()))
        self.store.put(KEYS.tracked, b"1")
        for name in ("n0", "n1", "n2"):
            self.store.put(KEYS.node(name), encode(node(name)))
        self.incarnation, self.num_looks = "n0.1", 0

    def state(self) -> AgentState:
        self.num_looks += 1
        view = view_of_entries(KEYS, self.store.get_prefix(KEYS.prefix)[0])
        return AgentState("n0", self.incarnation, view=view)

    def answers(self, script: str) -> None:
        new = self._program.with_suffix(".new")
        new.write_text(f'#!/bin/sh\necho "$*" >>{self.asked}\n{script}\n')
        new.chmod(0o755)
        new.replace(self._program)

    @contextmanager
    def watch(self) -> Iterator[None]:
        one = watch.Watch(self.store, KEYS, self.state, str(self._program), "n[0-2]")
        try:
            yield
        finally:
            one.stop()

    def questions(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []

    def order(self) -> DrainRecord | None:
        found = self.store.get(KEYS.drain("n1"))
        return decode(DrainRecord, found.value) if found else None


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Lab:
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    caplog.set_level(logging.INFO)
    return Lab(tmp_path)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_node_is_drained_and_resumed(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.answers("printf 'n0|mixed|none\\nn1|draining|memory\\n'")
    with lab.watch():
        wait_for(lab.order)
        assert lab.questions()[0] == "--noheader --all --local --Node --nodes=n[0-2] --format=%N|%T|%E"
        lab.answers("printf 'n0|mixed|none\\nn1|mixed|none\\n'")
        wait_for(lambda: lab.order() is None)
        wait_for(lambda: len(caplog.messages) > 1)
    assert caplog.messages == [
        "node n1 is drained in Slurm: memory; it leaves the job when a spare has its place",
        "Slurm has node n1 in service again: it stays in the job",
    ]


def test_a_spare_has_no_place_to_hand_over(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.answers("printf 'n0|mixed|none\\nn2|draining|memory\\n'")
    with lab.watch():
        wait_for(lambda: caplog.messages)
    assert caplog.messages == ["node n2 is drained in Slurm: memory; it leaves the job"]
    assert lab.store.get(KEYS.drain("n2"))


def test_what_a_person_takes_back_stays_so_until_it_is_drained_anew(lab: Lab) -> None:
    lab.answers("printf 'n1|draining|memory\\n'")
    with lab.watch():
        wait_for(lab.order)
        lab.store.delete(KEYS.drain("n1"))
        count = len(lab.questions())
        wait_for(lambda: len(lab.questions()) > count + 3)
        assert lab.order() is None
        lab.answers("printf 'n1|mixed|none\\n'")
        count = len(lab.questions())
        wait_for(lambda: len(lab.questions()) > count + 2)
        lab.answers("printf 'n1|draining|again\\n'")
        wait_for(lab.order)


def test_only_the_coordinator_asks(lab: Lab) -> None:
    lab.answers("printf 'n1|draining|memory\\n'")
    lab.incarnation = "n0.2"
    with lab.watch():
        wait_for(lambda: lab.num_looks > 5)
        assert not lab.questions()
        lab.incarnation = "n0.1"
        wait_for(lab.order)


@pytest.mark.parametrize("code", [0, 1])
def test_slurm_is_away(code: int, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Told once, and again after it was there; an exit code alone says nothing."""
    refused = f"echo 'slurm_load_node error: no controller' >&2; exit {code}"
    lab.answers(refused)
    with lab.watch():
        wait_for(lambda: len(lab.questions()) > 4)
        assert len(caplog.messages) == 1 and not lab.order()
        lab.answers(f"printf 'n1|draining|memory\\n'; exit {code}")
        wait_for(lab.order)
        lab.answers(refused)
        wait_for(lambda: len(caplog.messages) == 3)
    told = "Slurm does not say which nodes are drained: slurm_load_node error: no controller; asking on"
    assert caplog.messages[0] == caplog.messages[2] == told


def test_slurm_hangs(lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The program is ended after its time; at once if the agent ends."""
    pids = lab.asked.with_name("pids")
    lab.answers(f"echo $$ >>{pids}; exec sleep 1000")
    monkeypatch.setattr(watch, "ANSWER_S", 0.3)
    with lab.watch():
        wait_for(lambda: len(lab.questions()) > 2)
        told = "Slurm does not say which nodes are drained: sinfo has not ended within 0.3 s; asking on"
        assert caplog.messages == [told]
        monkeypatch.setattr(watch, "ANSWER_S", 1000.0)
        count = len(lab.questions())
        wait_for(lambda: len(pids.read_text().splitlines()) > count)
    assert not [pid for pid in pids.read_text().split() if os.path.exists(f"/proc/{pid}")]


def test_there_is_no_program(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    with lab.watch():
        wait_for(lambda: caplog.messages)
    assert "asking on" in caplog.messages[0] and len(caplog.messages) == 1
