"""`--nnodes MIN:MAX` with real agents.

A script that knows nothing of it trains in groups that grow and shrink: the same steps are gone through by swift-run
and (in `make soak`) by a stock torchrun with c10d, and must give the same groups. One that is recovered in place
loses no iteration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import wait_for
from tests.support.group_nodes import SCRIPT, Nodes
from tests.support.job import ROOT
from tests.support.ports import free_ports
from tests.tiers import in_soak

LAST_CALL_S = 2

TRACKED = (ROOT / "tests" / "support" / "elastic_train.py").read_text()


@pytest.fixture
def nodes(
    tmp_path: Path, etcd: str, forks: ForkServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(launcher: str, script: str = SCRIPT, **environment: str) -> Nodes:
        (tmp_path / "train.py").write_text(script)
        conf = f"join_timeout=120,last_call_timeout={LAST_CALL_S}"
        if launcher == "swift-run":
            where = ["-m", "swift_agent.run", "--rdzv-endpoint", etcd, "--start-method", "forkserver"]
        else:
            endpoint = f"127.0.0.1:{free_ports(1)[0]}"
            where = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            conf += ",keep_alive_interval=1,keep_alive_max_attempt=3"
            # Else its agents look for the store of another round where a replacement becomes the first: no group forms.
            environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
        command = [
            *where, "--rdzv-id", request.node.name, "--rdzv-conf", conf, "--nnodes", "2:3", "--nproc-per-node", "1",
            "--local-addr", "127.0.0.1", "--max-restarts", "5", "--monitor-interval", "0.2", str(tmp_path / "train.py"),
        ]  # fmt: skip
        made.append(Nodes(tmp_path, command, environment, forks=forks if launcher == "swift-run" else None))
        return made[-1]

    yield make
    for job in made:
        job.kill_all()


@pytest.mark.parametrize("launcher", ["swift-run", *in_soak("torchrun")])
def test_the_group_grows_and_shrinks_but_never_under_the_least(nodes: Callable[..., Nodes], launcher: str) -> None:
    """Node a stays: with c10d it has the store. What is asserted of one launcher is asserted of the other, in
    `make soak`."""
    job = nodes(launcher)
    job.start("a")
    time.sleep(LAST_CALL_S + 1)
    assert not job.group(), "one node is too few"
    job.start("b")
    job.wait_for_group("a", "b")
    job.start("c")
    job.wait_for_group("a", "b", "c")
    job.kill("c")
    job.wait_for_group("a", "b")
    job.kill("b")
    wait_for(lambda: not job.group(), 60, "nobody trains alone")
    time.sleep(LAST_CALL_S + 1)
    assert not job.group() and job.agents["a"].poll() is None, job.text()
    job.start("d")
    job.wait_for_group("a", "d")
    job.finish()
    assert job.worlds() == {2, 3}, job.text()


def test_it_begins_at_once_when_all_are_here_and_outlives_the_coordinator(nodes: Callable[..., Nodes]) -> None:
    """Node a has rank 0, both stores and is the coordinator; the spare beyond MAX takes its place without a wait."""
    job = nodes("swift-run")
    for node in "abcd":
        job.start(node)
        wait_for(lambda node=node: "joined job" in (job.directory / f"{node}.log").read_text(), 60, node)  # type: ignore[misc]
    job.wait_for_group("a", "b", "c")
    job.kill("a")
    job.wait_for_group("b", "c", "d")
    job.finish()
    assert job.worlds() == {3}, job.text()


class Story:
    """What the ranks of `elastic_train` have left: lines of all iterations, by number."""

    def __init__(self, directory: Path) -> None:
        self.lines: dict[int, list[dict[str, Any]]] = {}
        for path in directory.glob("log.*"):
            for text in path.read_text().splitlines(keepends=True):
                if text.endswith("\n"):  # who is killed may leave half a line
                    line = json.loads(text)
                    self.lines.setdefault(line["iteration"], []).append(line)

    @property
    def newest(self) -> tuple[int, int]:
        """The last iteration, and the size of the world that ran it."""
        number = max(self.lines, default=-1)
        return number, self.lines[number][0]["world"] if number >= 0 else 0

    @property
    def worlds(self) -> list[int]:
        """Sizes in the order in which they were."""
        found: list[int] = []
        for number in sorted(self.lines):
            world = self.lines[number][0]["world"]
            if found[-1:] != [world]:
                found.append(world)
        return found

    def check(self, told: str, lost: set[str]) -> None:
        """Every iteration was run once by every rank of one world, on the state that the one before had left. *lost*:
        nodes whose last line may be missing."""
        after = None
        for number in range(max(self.lines) + 1):
            lines = self.lines.get(number, [])
            worlds = {line["world"] for line in lines}
            assert len(worlds) == 1, f"iteration {number}: {lines}\n{told}"
            (world,) = worlds
            ranks = sorted(line["rank"] for line in lines)
            assert len(set(ranks)) == len(ranks), f"iteration {number} was run twice: {lines}\n{told}"
            assert len(ranks) == world or lost, f"iteration {number} has ranks {ranks} of {world}\n{told}"
            befores, afters = {line["before"] for line in lines}, {line["after"] for line in lines}
            assert len(afters) == 1 and len(befores) == 1, f"iteration {number}: {lines}\n{told}"
            assert after is None or befores == {after}, f"iteration {number} did not begin where the last ended\n{told}"
            (after,) = afters

    def check_samples(self, told: str, num_samples: int, batch: int, num_changes: int) -> None:
        """No sample is seen twice in an epoch, and a change of size leaves out less than a batch of all ranks."""
        epochs: dict[int, list[int]] = {}
        for lines in self.lines.values():
            for line in lines:
                epochs.setdefault(line["epoch"], []).extend(line["samples"])
        left_out = 0
        for epoch, samples in epochs.items():
            assert len(set(samples)) == len(samples), f"epoch {epoch} has samples twice\n{told}"
            left_out += num_samples - len(samples)
        assert 0 <= left_out < num_changes * 3 * batch, f"{left_out} samples were left out\n{told}"


def test_a_job_that_is_recovered_in_place_grows_between_two_iterations(nodes: Callable[..., Nodes]) -> None:
    job = nodes("swift-run", TRACKED, PACE_S="0.4")
    directory = job.directory

    def newest() -> tuple[int, int]:
        assert all(agent.poll() is None for agent in job.agents.values()), job.text()
        return Story(directory).newest

    job.start("a")
    job.start("b")
    wait_for(lambda: newest()[0] >= 3, 90, "training")
    job.environment["DNNL_MAX_CPU_ISA"] = "SSE41"  # it may choose other kernels
    job.start("c")
    wait_for(lambda: newest()[1] == 3, 90, "growth")
    (directory / "free").touch()
    job.finish()
    story = Story(directory)
    assert story.worlds == [2, 3], job.text()
    story.check(job.text(), set())
    story.check_samples(job.text(), 360, 4, 1)
    assert {(directory / f"end.{rank}").read_text() for rank in range(3)} == {story.lines[max(story.lines)][0]["after"]}
    assert "equal checksums" in job.text() and "from a common boundary" in job.text()
    (told,) = (line for line in job.text().splitlines() if "this machine computes" in line or "compute alike" in line)
    assert "not all ranks compute alike: " in told and " with DNNL_MAX_CPU_ISA=SSE41" in told, told


def test_an_update_that_is_cut_as_the_job_shrinks_is_taken_back_on_one_node(nodes: Callable[..., Nodes]) -> None:
    job = nodes("swift-run", TRACKED, PACE_S="0.1", STRUCK="c", CUT="4")
    directory = job.directory
    for node in "abc":
        job.start(node)
    wait_for(lambda: (directory / "struck").exists(), 90, "the end of c")
    job.kill("c")
    wait_for(lambda: Story(directory).newest[1] == 2, 90, f"shrinking\n{job.text()}")
    (directory / "free").touch()
    job.finish()
    story, text = Story(directory), job.text()
    assert story.worlds == [3, 2] and (directory / "struck").exists(), text
    assert "what all have made of the update after it is taken back there" in text
    assert text.count("put back from copies, bit for bit: ") == 1, text
    story.check(text, {"c"})
    assert {(directory / f"end.{rank}").read_text() for rank in range(2)} == {story.lines[max(story.lines)][0]["after"]}


def test_it_goes_on_whoever_is_lost_while_its_size_changes(nodes: Callable[..., Nodes]) -> None:
    """The replacement dies when the old workers have ended: only files have the state. Then another comes, and rank 0's
    node, with the stores and the coordinator, is lost without anybody to take its place."""
    job = nodes("swift-run", TRACKED, PACE_S="0.4", STRUCK="c")
    directory = job.directory
    story = lambda: Story(directory)  # noqa: E731
    job.start("a")
    wait_for(lambda: "joined job" in (directory / "a.log").read_text(), 60, "a")
    job.start("b")
    wait_for(lambda: story().newest[0] >= 3, 90, "training")
    job.start("c")
    wait_for(lambda: (directory / "struck").exists(), 90, "the end of c")
    job.kill("c")
    reached = story().newest[0]
    wait_for(lambda: story().newest[0] > reached + 1, 90, f"training goes on\n{job.text()}")
    job.start("d")
    wait_for(lambda: story().newest[1] == 3, 90, f"growth\n{job.text()}")
    reached = story().newest[0]
    wait_for(lambda: story().newest[0] > reached + 2, 90, f"training goes on\n{job.text()}")
    job.kill("a")  # now its loss cuts an iteration, and the last call is waited for
    wait_for(lambda: story().newest[1] == 2, 90, f"shrinking\n{job.text()}")
    (directory / "free").touch()
    job.finish()
    assert story().worlds == [2, 3, 2], job.text()
    story().check(job.text(), {"a"})
    assert {(directory / f"end.{rank}").read_text() for rank in range(2)} == {
        story().lines[max(story().lines)][0]["after"]
    }
    assert "equal checksums" in job.text(), job.text()
