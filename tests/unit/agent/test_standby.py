"""The standby server as the agent uses it: real processes, and what can go wrong with them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_agent import process as process_module
from swift_agent import workers as workers_module
from swift_agent.channel import ChannelClosed, Message
from swift_agent.config import AgentConfig
from swift_agent.options import parse_args
from swift_agent.process import become_subreaper, reap, reap_strangers
from swift_agent.worker_env import Placement
from swift_agent.workers import MAX_SERVER_DEATHS, WorkerProcess, Workers

TIMEOUT_S = 60.0
SCRIPT = f"""#!{sys.executable}
import os, sys
with open(sys.argv[1], "a") as out:
    print(os.getpid(), os.environ["RANK"], *(name for name in ("csv_ahead", "threads_ahead") if name in sys.modules),
          file=out, flush=True)
sys.exit(7)
"""


class Bench:
    """An agent's loop, reduced to its standby server."""

    def __init__(self, folder: Path, *options: str) -> None:
        become_subreaper()
        script = folder / "train.py"
        script.write_text(SCRIPT)
        script.chmod(0o755)  # --no-python runs it by itself
        self.out = folder / "out"
        args = parse_args(["--standalone", "--nproc-per-node", "2", *options, str(script), str(self.out)])
        self.workers = Workers(AgentConfig.from_args(args), "127.0.0.1")
        self.started: list[WorkerProcess] = []

    def place(self, generation: int = 2) -> Placement:
        return Placement(0, 1, 2, "default", "job", "127.0.0.1", 1, 0, 3, generation, "/nowhere", False)

    def start(self, local_rank: int, generation: int = 2, warm: bool = True) -> None:
        self.started += self.workers.start(self.place(generation), (local_rank,), warm)

    def turn(self, timeout_s: float = 0.05) -> None:
        server = self.workers.server
        if server is None or not select.select([server], [], [], timeout_s)[0]:
            return
        try:
            messages = server.receive()
        except ChannelClosed:
            self.started += self.workers.on_server_death()
            return
        self.started += [p for m in messages if (p := self.workers.on_server_message(server, m)) is not None]

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (found := condition()):
            assert time.monotonic() < deadline_s, f"in vain: {condition}"
            self.turn()
        return found

    def standbys(self, count: int) -> list[psutil.Process]:
        """The waiting processes, once there are *count*. They are children of this process."""
        assert self.workers.server is not None
        server, known = self.workers.server.pid, {process.pid for process in self.workers.processes.values()}

        def waiting() -> list[psutil.Process]:
            found = [p for p in psutil.Process().children() if p.pid != server and p.pid not in known
                     and p.status() != psutil.STATUS_ZOMBIE and "swift_agent.nursery" in " ".join(p.cmdline())]
            return found if len(found) == count else []

        return list(self.wait(waiting))

    def ends(self) -> list[tuple[int, int]]:
        """Local rank and exit code of every process that was started, once all have ended."""
        self.wait(lambda: self.started)
        for process in self.started:
            self.wait(lambda process=process: self.workers.collect(process) or process.exit_code is not None)
        return [(process.local_rank, process.exit_code or 0) for process in self.started]

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """*param*, if any: options of the command line."""
    before = set(psutil.Process().children())  # of fixtures of a wider scope
    made = Bench(tmp_path, *getattr(request, "param", ()))
    yield made
    made.workers.close()
    # The orphans of other tests are none of this process's.
    process_module._prctl(process_module._PR_SET_CHILD_SUBREAPER, 0)
    deadline_s = time.monotonic() + 10.0
    while set(psutil.Process().children()) - before and time.monotonic() < deadline_s:
        reap_strangers({process.pid for process in before})
        time.sleep(0.01)
    assert set(psutil.Process().children()) - before == set()


def test_a_standby_becomes_the_worker(bench: Bench) -> None:
    bench.workers.prepare(1, ())
    (standby,) = bench.standbys(1)
    bench.start(1)
    assert bench.ends() == [(1, 7)]
    assert bench.lines() == [[str(standby.pid), "1"]]


@pytest.mark.parametrize(
    ("bench", "forks"),
    [((), [False, True]), (("--start-method", "forkserver"), [True, True]),
     (("--start-method", "forkserver", "--no-python"), [False, False]), (("--numa-binding", "node"), [False, False])],
    ids=["as torchrun", "forkserver", "no python", "bound"], indirect=["bench"],
)  # fmt: skip
def test_which_workers_are_forks(bench: Bench, forks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A first worker, and one that replaces another."""
    # Only a machine with GPUs can be asked which nodes they are at.
    monkeypatch.setattr(workers_module, "_bind_to_numa_node", lambda command, *_: command)
    for local_rank, warm in enumerate((False, True)):
        bench.start(local_rank, warm=warm)
    bench.wait(lambda: len(bench.started) == 2)
    assert sorted(bench.ends()) == [(0, 7), (1, 7)]
    assert [process.popen is None for process in sorted(bench.started, key=lambda p: p.local_rank)] == forks


def test_modules_in_the_current_directory_are_not_those_of_the_server(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue.py", "typing.py", "sympy.py"):  # torch imports all of them
        (tmp_path / name).write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    bench.workers.prepare(1, ())
    (standby,) = bench.standbys(1)
    bench.start(1)
    assert bench.ends() == [(1, 7)]
    assert bench.lines() == [[str(standby.pid), "1"]]


def test_a_standby_that_died_while_it_waited_is_not_used(bench: Bench) -> None:
    bench.workers.prepare(2, ())
    first = bench.standbys(2)[0]
    first.kill()
    first.wait()  # reaped: its number may be anybody's
    bench.start(0)
    bench.start(1)
    assert bench.ends() == [(0, 7), (1, 7)]
    assert first.pid not in {process.pid for process in bench.started}


def test_what_a_dead_server_owes_is_started_cold_and_nothing_else(bench: Bench) -> None:
    bench.workers.prepare(1, ())
    bench.standbys(1)
    bench.start(0)
    assert bench.ends() == [(0, 7)]  # answered: not owed any more
    bench.started.clear()
    assert bench.workers.server is not None
    stopped = psutil.Process(bench.workers.server.pid)
    stopped.suspend()
    bench.start(1, generation=3)
    stopped.kill()
    assert bench.ends() == [(1, 7)]
    assert bench.started[0].popen is not None  # a new process, not a fork


def test_an_order_to_a_server_that_is_dead_already_is_started_cold(bench: Bench) -> None:
    bench.workers.prepare(0, ())
    assert bench.workers.server is not None
    server = psutil.Process(bench.workers.server.pid)
    bench.wait(lambda: server.num_threads())
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    bench.start(0)
    assert bench.ends() == [(0, 7)]


def test_a_server_that_hangs_is_ended(bench: Bench) -> None:
    bench.workers.prepare(0, ())
    assert bench.workers.server is not None
    psutil.Process(bench.workers.server.pid).suspend()
    bench.start(0)
    bench.workers.check_server(time.monotonic())
    assert bench.workers.server is not None and not bench.started
    bench.workers.check_server(time.monotonic() + 3600.0)
    assert bench.ends() == [(0, 7)]


def test_a_server_that_dies_again_and_again_is_left_alone(bench: Bench) -> None:
    for _ in range(MAX_SERVER_DEATHS):
        bench.workers.prepare(0, ())
        assert bench.workers.server is not None
        bench.workers.server.kill()
        bench.wait(lambda: bench.workers.server is None)
    bench.workers.prepare(0, ())
    assert bench.workers.server is None
    bench.start(0)
    assert bench.ends() == [(0, 7)]


def test_modules_are_imported_ahead_but_for_those_with_threads(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csv_ahead.py").write_text("")
    (tmp_path / "exits_ahead.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "threads_ahead.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    wanted = ("exits_ahead", "threads_ahead", "csv_ahead")
    bench.workers.prepare(1, wanted)
    first = bench.workers.server
    bench.wait(lambda: bench.workers.server is None)  # a fork of it would miss the thread
    bench.workers.prepare(1, wanted)
    assert bench.workers.server is not None and bench.workers.server is not first
    answered: list[Message] = []
    original = bench.workers.on_server_message
    monkeypatch.setattr(bench.workers, "on_server_message", lambda s, m: (answered.append(m), original(s, m))[1])
    bench.wait(lambda: any(message["op"] == "preloaded" for message in answered))
    bench.start(0)
    assert bench.ends() == [(0, 7)]
    assert bench.lines()[0][2:] == ["csv_ahead"]


def test_a_worker_that_ignores_the_end_is_killed_at_once_when_in_a_hurry(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(sys.argv[1], 'w').close()\n"
        "time.sleep(1000)\n"
    )
    bench.started += bench.workers.start(bench.place(), (0, 1), warm=False)
    bench.wait(bench.out.exists)
    began_s = time.monotonic()
    bench.workers.end_all(600.0, in_hurry=lambda: time.monotonic() - began_s > 0.5)
    assert bench.workers.processes == {} and {p.exit_code for p in bench.started} <= {-9, -15}
    bench.workers.end_all(0.0)
    assert all(reap(p.pid) is not None for p in bench.started)  # nobody left to wait for
