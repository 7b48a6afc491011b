"""What workers print is shown once, each line behind the words that its process was started with."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swift_agent.agent.processes.output import Output
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import parse_args
from swift_agent.wire.environment import Placement, worker_env
from tests.support.etcd_cluster import wait_for

PLACE = Placement(2, 3, 2, "default", "job", "127.0.0.1", 1, 0, 3, 1, "/nowhere", False)


class Console:
    """A node of two workers, and what it shows of them."""

    def __init__(self, output: Output, shown: io.StringIO) -> None:
        self._output, self._shown = output, shown
        self.living: set[int] = set()

    def start(self, place: Placement, *local_ranks: int) -> None:
        self.living -= set(local_ranks)
        self._output.open(place, {rank: worker_env(place, rank, {}) for rank in range(2)}, self.living)
        self.living |= set(local_ranks)

    def write(self, local_rank: int, text: str) -> None:
        with open(self._output.stdout(local_rank), "a") as stream:
            stream.write(text)

    def shows(self, *lines: str) -> None:
        """These and no others, in whatever order those of different workers are."""
        wait_for(lambda: sorted(self._shown.getvalue().splitlines()) == sorted(lines), 10.0, self._shown.getvalue())


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Console]]:
    made: list[Output] = []

    def make(template: str) -> Console:
        monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", template)
        shown = io.StringIO()
        monkeypatch.setattr(sys, "stdout", shown)
        options = ["--nproc-per-node", "2", "--tee", "1", "--log-dir", str(tmp_path / "logs"), __file__]
        made.append(Output(AgentConfig.from_args(parse_args(["--standalone", *options])), str(tmp_path)))
        return Console(made[-1], shown)

    yield make
    for output in made:
        output.end()


def test_lines_have_the_rank_of_the_place_that_the_node_has_now(console: Callable[[str], Console]) -> None:
    """It got another one by a change of the job's size, or after it had been given up: nothing has restarted."""
    node = console("[rank ${rank}]:")
    node.start(PLACE, 0, 1)
    node.write(0, "I am rank 4\n")
    node.write(1, "I am rank 5\n")
    node.living.clear()
    node.start(replace(PLACE, slot=1, num_slots=2, generation=2), 0, 1)
    node.write(0, "I am rank 2\n")
    node.write(1, "I am rank 3\n")
    node.shows(*(f"[rank {rank}]:I am rank {rank}" for rank in (2, 3, 4, 5)))


def test_who_goes_on_keeps_its_words(console: Callable[[str], Console]) -> None:
    node = console("${rank} since ${attempt}:")
    node.start(PLACE, 0, 1)
    node.write(0, "begins\n")
    node.shows("4 since 1:begins")
    node.write(1, "is cut in a li")
    node.start(replace(PLACE, generation=7), 1)
    node.write(1, "begins\n")
    node.shows("4 since 1:begins", "5 since 1:is cut in a li5 since 7:begins")
    node.write(0, "goes on\n")
    node.shows("4 since 1:begins", "5 since 1:is cut in a li5 since 7:begins", "4 since 1:goes on")


def test_what_there_was_no_thread_for_is_shown_later(
    console: Callable[[str], Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, start, num_left = console("${rank}:"), threading.Thread.start, 1

    def short(self: threading.Thread) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", short)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            node.start(PLACE, 0, 1)
    node.write(0, "early\n")
    node.write(1, "early\n")
    node.shows("4:early")
    node.start(PLACE, 0, 1)
    node.shows("4:early", "5:early")


def test_a_start_that_changes_no_words_disturbs_nobody(console: Callable[[str], Console]) -> None:
    node = console("[rank ${rank}]:")
    node.start(PLACE, 0, 1)
    before = set(threading.enumerate())
    node.start(replace(PLACE, generation=2), 1)
    node.write(1, "here\n")
    node.shows("[rank 5]:here")
    assert set(threading.enumerate()) == before
