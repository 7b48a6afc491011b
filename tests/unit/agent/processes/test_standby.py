"""The standby server as the agent uses it: real processes, and what can go wrong with them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.numa import binding

from swift_agent.agent.lifecycle.state import Worker, describe_exit
from swift_agent.agent.processes import linux as process_module
from swift_agent.agent.processes import output
from swift_agent.agent.processes import standby as standby_module
from swift_agent.agent.processes.late_starts import TRY_S, LateStarts, NotStarted
from swift_agent.agent.processes.linux import become_subreaper, reap
from swift_agent.agent.processes.orders import Preloaded, Started
from swift_agent.agent.processes.workers import MAX_SERVER_DEATHS, NOT_STARTED, WorkerProcess, Workers
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import parse_args
from swift_agent.wire.channel import ChannelClosed
from swift_agent.wire.environment import Placement, helper_number
from swift_agent.wire.log_counters import LogCounters
from swift_agent.wire.standing import Standing, Standings
from swift_rendezvous.roster.records import WorkerExit
from tests.support.limits import without_descriptors
from tests.support.standby_forks import StandbyForks

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
        self.others = set(psutil.Process().children())  # of fixtures of a wider scope
        become_subreaper()
        script = folder / "train.py"
        script.write_text(SCRIPT)
        script.chmod(0o755)  # --no-python runs it by itself
        self.out = folder / "out"
        args = parse_args(["--standalone", "--nproc-per-node", "2", *options, str(script), str(self.out)])
        standings, counters = Standings(str(folder), 2), LogCounters(str(folder), 2)
        self.workers = Workers(AgentConfig.from_args(args), "127.0.0.1", standings, counters)
        self.started: list[WorkerProcess] = []

    def place(self, generation: int = 2) -> Placement:
        return Placement(0, 1, 2, "default", "job", "127.0.0.1", 1, 0, 3, generation, "/nowhere", False)

    def start(self, local_rank: int, generation: int = 2, warm: bool = True, restarts: int = 0) -> None:
        place = replace(self.place(generation), restart_count=restarts)
        self.started += self.workers.start(place, (local_rank,), warm)

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
        server = psutil.Process(self.workers.server.pid)
        known = {process.pid for process in self.workers.processes.values()}

        def waiting() -> list[psutil.Process]:
            found = [
                p
                for p in psutil.Process().children()
                if p not in self.others
                and p != server
                and p.pid not in known
                and p.status() != psutil.STATUS_ZOMBIE
                and p.cmdline() == server.cmdline()
            ]
            return found if len(found) == count else []

        return list(self.wait(waiting))

    def ends(self) -> list[tuple[int, int]]:
        """Local rank and exit code of every process, once all have ended and none is still to come."""
        self.wait(lambda: self.started and not (self.workers.server is not None and self.workers.server.open_orders()))
        for process in self.started:
            self.wait(lambda process=process: self.workers.collect(process) or process.exit_code is not None)
        return [(process.local_rank, process.exit_code or 0) for process in self.started]

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.read_text().splitlines()]


@pytest.fixture(scope="module")
def standby_forks() -> Iterator[StandbyForks]:
    made = StandbyForks()
    yield made
    made.close()


@contextlib.contextmanager
def bench_in(folder: Path, options: Sequence[str] = ()) -> Iterator[Bench]:
    (folder / "logs").mkdir()
    made = Bench(folder, *(str(folder / "logs") if one == "logs" else one for one in options))
    yield made
    made.workers.close()
    # The orphans of other tests are none of this process's.
    process_module._prctl(process_module._PR_SET_CHILD_SUBREAPER, 0)
    assert set(psutil.Process().children()) - made.others == set()


@pytest.fixture
def bench(
    standby_forks: StandbyForks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    """Its standby servers have imported torch before. *param*, if any: options of the command line."""
    monkeypatch.setattr(standby_module, "start_process", standby_forks.start)
    with bench_in(tmp_path, getattr(request, "param", ())) as made:
        yield made


@pytest.fixture
def cold_bench(tmp_path: Path) -> Iterator[Bench]:
    """Its standby servers are new interpreters."""
    with bench_in(tmp_path) as made:
        yield made


def test_a_standby_becomes_the_worker(bench: Bench) -> None:
    bench.workers.prepare(1, ())
    (standby,) = bench.standbys(1)
    bench.start(1)
    assert bench.ends() == [(1, 7)]
    assert bench.lines() == [[str(standby.pid), "1"]]


def test_what_the_server_has_imported_stays_frozen_in_its_forks(cold_bench: Bench, tmp_path: Path) -> None:
    """Else each walk over all objects, and each full collection, copies the memory that they share."""
    (tmp_path / "train.py").write_text(
        "import gc, sys\nwith open(sys.argv[1], 'a') as out:\n"
        "    print(gc.get_freeze_count(), len(gc.get_objects()), file=out)\n"
    )
    cold_bench.workers.prepare(1, ())
    cold_bench.standbys(1)
    cold_bench.start(1)
    assert cold_bench.ends() == [(1, 0)]
    ((frozen, others),) = cold_bench.lines()
    assert int(frozen) > 10 * int(others)


@pytest.mark.parametrize(
    ("bench", "forks"),
    [((), [False, True]), (("--start-method", "forkserver"), [True, True]),
     (("--start-method", "forkserver", "--no-python"), [False, False])],
    ids=["as torchrun", "forkserver", "no python"], indirect=["bench"],
)  # fmt: skip
def test_which_workers_are_forks(bench: Bench, forks: list[bool]) -> None:
    """A first worker, and one that replaces another."""
    for local_rank, warm in enumerate((False, True)):
        bench.start(local_rank, warm=warm)
    bench.wait(lambda: len(bench.started) == 2)
    assert sorted(bench.ends()) == [(0, 7), (1, 7)]
    assert [process.popen is None for process in sorted(bench.started, key=lambda p: p.local_rank)] == forks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("bench", [("--numa-binding", "node")], ids=["bound"], indirect=True)
def test_a_fork_is_bound_as_a_first_worker_is(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first one by numactl, as torch's launcher does it; a replacement by itself, and it is warm."""
    cpu = max(os.sched_getaffinity(0))
    # Only a machine with GPUs can be asked which nodes they are at.
    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", lambda **_: {cpu})
    numactl = tmp_path / "bin" / "numactl"
    numactl.parent.mkdir()
    numactl.write_text('#!/bin/sh\ncpus=${1#--physcpubind=}\nshift\nexec taskset -c "$cpus" "$@"\n')
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{numactl.parent}:{os.environ['PATH']}")
    Path(bench.out.parent, "train.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], sorted(os.sched_getaffinity(0)), file=open(sys.argv[1], 'a'))\n"
    )
    for local_rank, warm in enumerate((False, True)):
        bench.start(local_rank, warm=warm)
    bench.wait(lambda: len(bench.started) == 2)
    assert sorted(bench.ends()) == [(0, 0), (1, 0)]
    assert [process.popen is None for process in sorted(bench.started, key=lambda p: p.local_rank)] == [False, True]
    assert sorted(bench.out.read_text().splitlines()) == [f"{bench.place().rank(rank)} [{cpu}]" for rank in (0, 1)]


def test_modules_in_the_current_directory_are_not_those_of_the_server(
    cold_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue.py", "typing.py", "sympy.py"):  # torch imports all of them
        (tmp_path / name).write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    cold_bench.workers.prepare(1, ())
    (standby,) = cold_bench.standbys(1)
    cold_bench.start(1)
    assert cold_bench.ends() == [(1, 7)]
    assert cold_bench.lines() == [[str(standby.pid), "1"]]


def test_a_standby_that_died_while_it_waited_is_not_used(bench: Bench) -> None:
    bench.workers.prepare(2, ())
    first = bench.standbys(2)[0]
    first.kill()
    first.wait()  # reaped: its number may be anybody's
    bench.start(0)
    bench.start(1)
    assert bench.ends() == [(0, 7), (1, 7)]
    assert first.pid not in {process.pid for process in bench.started}


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_standby_that_dies_before_its_order_comes_is_followed_by_the_next(
    bench: Bench, standby_forks: StandbyForks, monkeypatch: pytest.MonkeyPatch, is_reaped: bool
) -> None:
    """The server has looked for dead ones already, and is about to give the order: it waits there, as long as nobody
    takes what it says. One read gives it more to answer than its socket holds, and then the order."""

    def start(control: socket.socket) -> Any:
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as small as there is
        return standby_forks.start(control)

    monkeypatch.setattr(standby_module, "start_process", start)
    bench.workers.prepare(2, ())
    first, second = sorted(bench.standbys(2), key=lambda process: (process.create_time(), process.pid))
    server = bench.workers.server
    assert server is not None
    heard: list[Any] = []
    on_server_message = bench.workers.on_server_message
    monkeypatch.setattr(
        bench.workers, "on_server_message", lambda *args: (heard.append(args[1]), on_server_message(*args))[1]
    )
    psutil.Process(server.pid).suspend()
    for _ in range(20):
        server.preload(())
    bench.start(0)
    psutil.Process(server.pid).resume()
    deadline_s = time.monotonic() + TIMEOUT_S
    while int.from_bytes(fcntl.ioctl(server.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder):
        assert time.monotonic() < deadline_s, "the server does not read"
        time.sleep(0.01)
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        first.wait()
    # As long as nobody has reaped it, its end is that of the worker that it was to be.
    assert bench.ends() == [(0, 7 if is_reaped else -signal.SIGKILL)]
    bench.wait(lambda: sum(isinstance(one, Started) for one in heard) == 2)
    assert [one.pid for one in heard if isinstance(one, Started)] == [first.pid, second.pid]
    if is_reaped:
        assert bench.lines() == [[str(second.pid), "0"]]
    else:
        bench.wait(lambda: reap(second.pid))  # not wanted any more: killed


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("bench", [("--log-dir", "logs", "--redirects", "3")], indirect=True)
def test_a_replacement_starts_although_the_log_directory_has_gone(
    bench: Bench, tmp_path: Path, warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench.start(0, warm=False)
    assert bench.ends() == [(0, 7)]
    shutil.rmtree(tmp_path / "logs")
    bench.started.clear()
    if warm:
        bench.workers.prepare(1, ())
        bench.standbys(1)
    bench.start(0, generation=3, warm=warm)
    assert bench.ends() == [(0, 7)] and len(bench.lines()) == 2
    assert "no logs of local rank 0 can be written any more" in caplog.text


def helped(bench: Bench, generation: int = 2) -> Placement:
    """Slot 3 of a job, another node's."""
    return replace(bench.place(generation), slot=3, num_slots=4)


@pytest.mark.parametrize("warm", [True, False])
def test_a_helper_has_the_rank_that_it_helps_and_no_place_among_the_workers(
    bench: Bench, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = helper_number(2, 1)
    if not warm:
        monkeypatch.setattr(Workers, "can_fork", False)
    bench.start(1, warm=False)
    bench.started += bench.workers.start_helper(helped(bench), number)
    assert sorted(bench.ends()) == [(1, 7), (number, 7)]
    assert sorted(rank for _, rank in bench.lines()) == ["1", "7"]
    assert (bench.started[-1].popen is None) == warm and bench.started[-1].rank == 7
    assert bench.workers._standings.of(number) == Standing() and not bench.workers._standings.stands(number)


def test_a_helper_is_ended_with_the_workers(bench: Bench) -> None:
    number = helper_number(1, 0)
    bench.workers.prepare(1, ())
    (standby,) = bench.standbys(1)
    bench.workers.start_helper(helped(bench), number)
    bench.wait(lambda: number in bench.workers.processes or bench.started)
    bench.workers.end_all(0.0)
    assert bench.workers.processes == {} and not standby.is_running()


@pytest.mark.parametrize("bench", [("--log-dir", "logs"), ("--log-dir", "logs", "--tee", "3"), ()], indirect=True)
def test_where_the_output_of_a_helper_is(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    number, place = helper_number(1, 0), helped(bench)
    env: dict[str, str] = {}
    output = bench.workers.output
    output.open_helper(place, number, env)
    logs = tmp_path / "logs"
    if not bench.workers._config.keep_logs:
        assert (output.stdout(number), output.stderr(number)) == (os.devnull, "")
        return
    path = str(logs / "helpers" / f"{place.run_id}-generation-2-rank-6-share-1")
    assert output.stdout(number) == output.stderr(number) == f"{path}.log"
    assert env["TORCHELASTIC_ERROR_FILE"] == f"{path}.json"
    shutil.rmtree(logs)
    logs.touch()  # nothing can be made below it any more
    output.open_helper(place, number, env)
    assert (output.stdout(number), output.stderr(number)) == (os.devnull, "")
    assert env["TORCHELASTIC_ERROR_FILE"] == "" and "no log of helper" in caplog.text
    logs.unlink()
    logs.mkdir()


@pytest.mark.parametrize(
    "bench", [("--log-dir", "logs", "--redirects", "2"), ("--log-dir", "logs", "--tee", "2")],
    ids=["redirects", "tee"], indirect=True,
)  # fmt: skip
def test_a_worker_is_not_explained_by_what_its_predecessor_wrote(bench: Bench) -> None:
    """Both append to the same file."""
    place, output = bench.place(), bench.workers.output
    output.open(place, {rank: {} for rank in range(2)}, set())
    end = WorkerExit(6, 0, 77, 9, "h")
    before, after = "Traceback (most recent call last):\nValueError: long ago\n", "no space left\n"
    with open(output.stderr(0), "a") as stream:
        stream.write(before)
    assert output.explained(end, "", "").message == before.strip()
    with open(output.stderr(0), "a") as stream:
        assert output.explained(end, "", "").message == "exited with code 9, and wrote nothing to its standard error"
        stream.write(after)
    assert output.explained(end, "", "").message == f"the last lines of its standard error:\n{after.strip()}"
    output.close()


@pytest.mark.parametrize("bench", [("--log-dir", "logs", "--redirects", "3")], indirect=True)
def test_a_standby_starts_although_its_log_went_after_the_order(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = bench.workers._order_warm

    def order_late(*args: Any) -> bool:
        shutil.rmtree(tmp_path / "logs")
        return order(*args)

    monkeypatch.setattr(bench.workers, "_order_warm", order_late)
    bench.workers.prepare(1, ())
    bench.standbys(1)
    bench.start(0)
    assert bench.ends() == [(0, 7)] and len(bench.lines()) == 1


@pytest.mark.parametrize("bench", [("--log-dir", "logs", "--redirects", "3", "--tee", "1")], indirect=True)
def test_workers_are_started_where_their_logs_cannot_be_written(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory of the logs can be written at the start, and no more at a restart."""
    bench.start(0, warm=False)
    (run,) = (tmp_path / "logs").iterdir()
    assert (run / "attempt_0" / "0" / "stdout.log").exists() and not caplog.text
    assert bench.ends() == [(0, 7)]
    run.rename(tmp_path / "moved")
    run.touch()  # nothing can be made below it any more
    bench.start(1, generation=3, warm=False, restarts=1)
    assert "no logs of workers can be written" in caplog.text and str(run) in caplog.text
    assert bench.ends() == [(0, 7), (1, 7)]
    assert [rank for _, rank in bench.lines()] == ["0", "1"]


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


def test_modules_are_imported_ahead_but_for_those_that_a_fork_cannot_have(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server that orders are given to never has the others, and is never restarted for one."""
    for name, content in {
        "csv_ahead": "print('is not to be seen')",
        "fails_ahead": "import no_such_module",
        "exits_ahead": "import sys; sys.exit(3)",
        "crashes_ahead": "import os; os.abort()",
        "threads_ahead/__init__": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
        "threads_ahead/below": "",
        "also_ahead": "import threads_ahead",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    wanted = ("exits_ahead", "fails_ahead", "threads_ahead", "threads_ahead.below", "crashes_ahead", "also_ahead",
              "csv_ahead")  # fmt: skip
    bench.workers.prepare(1, wanted)
    server = bench.workers.server
    bench.wait(lambda: "also_ahead" in caplog.text and server and server.preloaded == wanted_of(wanted))
    said = {record.getMessage() for record in caplog.records}
    assert said == {
        "exits_ahead is not imported ahead: SystemExit: 3",
        "fails_ahead is not imported ahead: ModuleNotFoundError: No module named 'no_such_module'",
        "threads_ahead is not imported ahead: it starts threads, which a fork does not have",
        "crashes_ahead is not imported ahead: its import ends the process",
        "also_ahead is not imported ahead: it starts threads, which a fork does not have",
    }
    bench.workers.prepare(1, wanted)  # nothing new
    bench.start(0)
    assert bench.ends() == [(0, 7)]
    assert bench.lines()[0][2:] == ["csv_ahead"] and bench.workers.server is server
    bench.workers.server = None  # a new one does not try them again
    assert server is not None
    server.close()
    bench.workers.prepare(1, wanted)
    server = bench.workers.server
    assert server is not None and server.preloaded == wanted_of(wanted)


def wanted_of(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Without those that a server must not try again."""
    return tuple(name for name in modules if name in ("exits_ahead", "fails_ahead", "csv_ahead"))


def test_nothing_is_left_of_an_import_that_is_tried_at_the_end(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a process group of its own, which the agent does not know: the server ends it."""
    begun = tmp_path / "begun"
    (tmp_path / "hangs_ahead.py").write_text(
        f"import os, time; os.symlink(str(os.getpid()), {str(begun)!r}); time.sleep(1000)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    for _ in range(5):
        bench.workers.prepare(1, ("hangs_ahead",))
        bench.wait(begun.is_symlink)
        trial = int(os.readlink(begun))
        begun.unlink()
        bench.workers.close()
        assert not psutil.pid_exists(trial)


def test_orders_are_served_while_an_import_hangs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "hangs_ahead.py").write_text(
        f"import os, time; os.symlink(str(os.getpid()), {str(begun)!r}); time.sleep(1000)"
    )
    (tmp_path / "csv_ahead.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    bench.workers.prepare(1, ("hangs_ahead",))
    bench.wait(begun.is_symlink)
    trial = psutil.Process(int(os.readlink(begun)))
    bench.start(0)
    assert bench.ends() == [(0, 7)]
    answered: list[Any] = []
    original = bench.workers.on_server_message
    monkeypatch.setattr(bench.workers, "on_server_message", lambda s, m: (answered.append(m), original(s, m))[1])
    bench.workers.prepare(1, ("csv_ahead",))  # another list, and nobody waits for the first
    bench.wait(lambda: not trial.is_running())
    bench.wait(lambda: any(isinstance(message, Preloaded) for message in answered))
    bench.start(1)
    bench.wait(lambda: len(bench.started) == 2)
    assert bench.ends() == [(0, 7), (1, 7)]
    assert bench.lines()[1][2:] == ["csv_ahead"] and not caplog.records


def test_a_server_that_gets_threads_after_all_makes_no_more_forks(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that does something else the second time."""
    flag = tmp_path / "flag"
    (tmp_path / "changes_ahead.py").write_text(
        f"import os, threading, time\nif os.path.exists({str(flag)!r}):\n"
        "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        f"open({str(flag)!r}, 'w').close()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    bench.workers.prepare(1, ("changes_ahead",))
    bench.wait(lambda: bench.workers.server is None)
    assert "changes_ahead is not imported ahead: it starts threads" in caplog.text
    bench.workers.prepare(1, ("changes_ahead",))
    bench.start(0)
    assert bench.ends() == [(0, 7)]
    assert bench.workers.server is not None and bench.workers.server.preloaded == ()


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


def test_a_worker_that_cannot_be_started_is_a_failure_of_that_worker(bench: Bench) -> None:
    """Not the end of the agent, whose other workers are well."""
    started = bench.workers.start(bench.place(), (0,), warm=False)
    assert isinstance(started[0], WorkerProcess)
    bench.started += started  # type: ignore[arg-type]
    with without_descriptors():
        for warm in (False, True):
            (one,) = bench.workers.start(bench.place(), (1,), warm=warm)
            assert isinstance(one, NotStarted) and one.may_pass and one.warm == warm
            end = one.end
            assert (end.rank, end.pid, end.exit_code) == (1, 0, NOT_STARTED)
            assert end.generation == bench.place().generation
            assert "it cannot be started: [Errno 24] Too many open files" in end.message
            assert describe_exit(end).startswith("rank 1 on 127.0.0.1: it cannot be started")
    assert 0 in bench.workers.processes and 1 not in bench.workers.processes
    bench.start(1, warm=False)
    assert len([p for p in bench.started if isinstance(p, WorkerProcess)]) == 2


def test_who_cannot_be_started_for_want_of_something_is_tried_again_for_a_while(bench: Bench) -> None:
    late, worker = LateStarts(), Worker(1, 2)
    with without_descriptors():
        (one,) = bench.workers.start(bench.place(), (1,), warm=False)
    assert isinstance(one, NotStarted) and not late.is_tried_again(one)
    assert late.failed(one, 100.0) is None and late.is_tried_again(one)
    assert late.take_due({1: worker}) == ([one], []) and late.take_due({1: worker}) == ([], [])
    assert late.failed(one, 100.0 + TRY_S - 0.5) is None
    assert late.take_due({1: replace(worker, killed=True)}) == ([], [one.end])  # others wait for its end
    assert late.failed(one, 100.0 + TRY_S) == one.end  # it is no shortage of a moment
    other = replace(one, place=bench.place(3))
    assert late.failed(other, 150.0) is None and late.take_due({1: replace(worker, pid=7)}) == ([], [])
    assert late.failed(replace(other, may_pass=False), 151.0) == one.end


def test_what_no_time_mends_is_said_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module.Guard, "wrap", lambda self, command: ["/nowhere/at/all"])
    (one,) = bench.workers.start(bench.place(), (1,), warm=False)
    assert isinstance(one, NotStarted) and not one.may_pass and "No such file" in one.end.message


def test_who_started_a_process_is_known_without_a_descriptor() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        leader = os.getsid(child.pid)
        with without_descriptors():
            found = leader == os.getpid() or process_module.descends_from(child.pid, leader)
        child.kill()
    assert found


def test_orphans_of_another_user_and_ids_that_are_somebody_elses_by_now(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only setuid programs are left of the group: the kernel does not let us end them."""

    def forbidden(group: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    bench.start(0, warm=False)
    assert bench.ends() == [(0, 7)]
    seen: list[set[int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.workers._orphans, "reap", lambda known: seen.append(set(known)))
        bench.workers.reap_orphans()
    assert seen == [set()]  # the kernel may have given that number to an orphan
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", forbidden)
        bench.workers._orphans.end(0.0)


def test_logs_for_which_there_is_no_thread_are_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []

    def refused(self: object, prefixes: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(output.Tail, "show", refused)
        (one,) = bench.workers.start(bench.place(), (0,), warm=False)
    assert isinstance(one, NotStarted) and one.may_pass and "can't start new thread" in one.end.message
    monkeypatch.setattr(output.Tail, "show", lambda self, prefixes: shown.append(self))
    bench.start(0, warm=False)
    assert bench.ends() == [(0, 7)] and shown == bench.workers.output._tails != []


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("bench", [("--log-dir", "logs", "--redirects", "3", "--log-names", "r$rank-g$attempt")],
                         indirect=True)  # fmt: skip
def test_files_have_names_of_the_users_own(bench: Bench, tmp_path: Path, warm: bool) -> None:
    bench.start(0, warm=False)
    assert bench.ends() == [(0, 7)]
    bench.started.clear()
    if warm:
        bench.workers.prepare(1, ())
        bench.standbys(1)
    bench.start(0, generation=3, warm=warm)
    assert bench.ends() == [(0, 7)]
    links = {path.name for path in (tmp_path / "logs").iterdir() if path.is_symlink()}
    first = {name for name in links if "-g3" not in name}
    assert {name.partition(".")[2] for name in first} == {"error.json", "stderr.log", "stdout.log"}
    assert {name.replace("-g2", "-g3") for name in first} == links - first and len(links) == 6
    # Of a directory that may be moved as a whole.
    (tmp_path / "logs").rename(tmp_path / "moved")
    (stdout,) = (tmp_path / "moved" / name for name in links if name.endswith("-g3.stdout.log"))
    assert stdout.resolve().name == "stdout.log" and stdout.resolve().parent.name == "0"
    assert stdout.resolve().is_relative_to(tmp_path / "moved")
    assert stdout.is_file()
