"""What a launcher does for who calls it, under torchrun and under swift-run: its caller's processes, its reply file,
its events, its timers, the place where workers meet.

Where no test is about the start of a process, the launcher is a fork of one that has its imports (`forks`). Workers are
new processes all the same, but where `--start-method` says otherwise.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.run import main
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.agent_forks import ForkServer
from tests.support.launchers import SWIFT_RUN, TORCHRUN, environment, launch

BOTH = (TORCHRUN, SWIFT_RUN)

# Runs main() of the module named first; prints what it finds of itself before and after.
CALLER = """
import ctypes, importlib, json, multiprocessing, os, signal, subprocess, sys, time

def look():
    flag = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0)
    handlers = {one.name: str(signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    return {"subreaper": flag.value, **handlers}

def end():
    time.sleep(0.2)
    os._exit(3)

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if "ignored" in sys.argv else signal.SIG_DFL)
    main = importlib.import_module(sys.argv[1]).main
    before = look()
    first = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.exit(3)"])
    second = multiprocessing.get_context("fork").Process(target=end)
    second.start()
    script = "sleep 0.1 & (sleep 0.1 &) & exec sleep 2"
    main(["--standalone", "--max-restarts", "1", "--no-python", "sh", "-c", script])
    print(json.dumps({"before": before, "after": look(), "codes": [first.wait(), (second.join(), second.exitcode)[1]],
                      "left": os.path.exists(f"/proc/self/task/{os.getpid()}/children")
                      and open(f"/proc/self/task/{os.getpid()}/children").read()}))
"""

BOOM = """
import os, sys
if os.environ["RANK"] == "1":
    raise KeyError("lost my keys")
"""

FAILS = "raise SystemExit(3)"

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise KeyError("lost my keys")

main()
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / "work" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def call(launcher: tuple[str, ...], folder: Path, *args: str, forks: ForkServer | None = None) -> dict[str, Any]:
    """What CALLER prints."""
    caller = write(folder, CALLER, "caller.py")
    done, _ = launch((sys.executable, str(caller), launcher[-1]), list(args), caller, forks=forks)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_caller_of_main_keeps_its_children(tmp_path: Path, forks: ForkServer) -> None:
    found = [call(launcher, tmp_path / launcher[-1], forks=forks) for launcher in BOTH]
    assert [one["codes"] for one in found] == [[3, 3], [3, 3]]


def test_main_leaves_its_caller_as_it_was(tmp_path: Path) -> None:
    found = call(SWIFT_RUN, tmp_path, "ignored")
    assert found["after"] == found["before"]
    assert found["left"] in ("", False)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process has that of a launcher; returns the directory for temporary files."""
    for name, value in environment(tmp_path / "out").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "out" / "tmp"


def without_times(reply: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reply)
    del found["message"]["extraInfo"]
    return found


def test_the_reply_file_of_the_launcher(tmp_path: Path, forks: ForkServer) -> None:
    replies, printed = [], []
    for launcher in BOTH:
        script = write(tmp_path / launcher[-1], RECORDED)
        more = {"TORCHELASTIC_ERROR_FILE": "../reply.json"}
        done, _ = launch(launcher, ["--standalone", script.name], script, more, forks)
        assert done.returncode == 1
        replies.append((script.parent.parent / "reply.json").read_text())
        printed.append(done.stderr)
    assert without_times(replies[1]) == without_times(replies[0])
    assert "lost my keys" in json.loads(replies[1])["message"]["extraInfo"]["py_callstack"]
    for one in printed:
        found = re.search(r"error_file: (\S+)", one)
        assert found and os.path.isfile(found[1]), one


@pytest.mark.parametrize("option", [(), ("--log-dir", "logs")])
def test_a_failure_names_its_error_file(option: tuple[str, ...], own_environment: Path, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "logs", exist_ok=True)
    options = [str(tmp_path / one) if one == "logs" else one for one in option]
    script = write(tmp_path, RECORDED)
    with pytest.raises(ChildFailedError) as failed:
        main(["--standalone", "--redirects", "3", *options, str(script)])
    _, failure = failed.value.get_first_failure()
    assert failure.error_file_data["message"]["message"] == "KeyError: 'lost my keys'"
    assert failure.message == failure.error_file_data["message"]
    assert json.loads(Path(failure.error_file).read_text()) == failure.error_file_data
    if not option:
        # All else is gone.
        left = [path for path in own_environment.rglob("*") if path.is_file()]
        assert left == [Path(failure.error_file)]


def test_run_path_records_how_a_script_fails(tmp_path: Path, forks: ForkServer) -> None:
    printed = []
    for launcher in BOTH:
        script = write(tmp_path / launcher[-1], BOOM)
        args = ["--standalone", "--nproc-per-node", "2", "--run-path", script.name]
        done, _ = launch(launcher, args, script, forks=forks)
        assert done.returncode == 1
        printed.append(done.stderr.partition("Root Cause")[2])
    for one in printed:
        assert "KeyError: 'lost my keys'" in one and "error.json" in one, one


PROTECTED = """
import swift_agent
job = swift_agent.init("gloo")
raise KeyError("lost my keys")
"""


def test_a_script_without_record_tells_how_it_failed(tmp_path: Path, forks: ForkServer) -> None:
    """Of a process that the agent has not forked, too: no exception is being handled when Python calls its hook."""
    script = write(tmp_path, PROTECTED)
    args = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "0", script.name]
    done, _ = launch(SWIFT_RUN, args, script, forks=forks)
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert "KeyError: 'lost my keys'" in cause and "NoneType" not in cause, done.stderr
    assert f'{script.name}", line 4' in cause and "raise error" not in cause, cause


GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == int(os.environ["WORLD_SIZE"])
"""


def test_run_path_ends_with_a_live_group(tmp_path: Path, forks: ForkServer) -> None:
    script = write(tmp_path, GROUP)
    done, _ = launch(SWIFT_RUN, ["--nproc-per-node", "6", "--run-path", script.name], script, forks=forks)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", [PrivateEtcd, EtcdStore])
def test_what_fails_at_the_end_hides_no_failure_of_a_worker(
    closed: type, own_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = closed.__exit__

    def fail(self: Any, *exc_info: object) -> None:
        end(self, *exc_info)
        raise OSError("it did not want to be closed")

    monkeypatch.setattr(closed, "__exit__", fail)
    with pytest.raises(ChildFailedError):
        main(["--standalone", str(write(tmp_path, FAILS))])
    assert main(["--standalone", str(write(tmp_path, "pass"))]) is None  # type: ignore[func-returns-value]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


MEETING = """
import datetime, os, sys, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = datetime.timedelta(seconds=20)
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size, timeout=timeout)
total = torch.ones(1)
dist.all_reduce(total)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and rank == 1:
    sys.exit(5)
if rank == 0 and not first:
    print("met", int(total), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_workers_meet_where_they_are_told_to(tmp_path: Path, forks: ForkServer) -> None:
    """Also after a restart, at the same port; torchrun's static rendezvous stands still there."""
    port = free_port()
    script = write(tmp_path, MEETING)
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--start-method", "forkserver"]
    options += ["--master-addr", "localhost", "--master-port", str(port)]
    done, _ = launch(SWIFT_RUN, [*options, script.name, f"tcp://localhost:{port}"], script, forks=forks)
    assert (done.returncode, done.stdout) == (0, f"met 2 localhost {port}\n"), done.stderr


def test_a_port_that_is_taken_ends_the_job_at_once(tmp_path: Path, forks: ForkServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = write(tmp_path, MEETING)
        done, _ = launch(SWIFT_RUN, ["--master-port", str(port), script.name, "env://"], script, forks=forks)
    assert done.returncode == 69
    assert f"--master-port {port}: nothing can listen at 127.0.0.1:{port}" in done.stderr


def events(printed: str) -> list[dict[str, Any]]:
    """What was recorded, without what differs from run to run; workers that did the same may come in any order."""
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"name"')]
    for event in found:
        metadata = event["metadata"]
        for name in ("run_id", "rdzv_backend", "total_run_time"):
            del metadata[name]
        details = metadata["metadata"] = json.loads(metadata["metadata"])
        error = json.loads(metadata["raw_error"]) if metadata["raw_error"] else None
        metadata["raw_error"] = error and error["message"]["message"]
        metadata["worker_id"] = metadata["worker_id"] is not None
        metadata["duration_ms"] = metadata["duration_ms"] is not None
        if "worker_pid" in details:
            details["worker_pid"] = details["worker_pid"] != [None]
    return sorted(found, key=lambda one: json.dumps(one["metadata"], sort_keys=True))


@pytest.mark.parametrize("text", ["pass", RECORDED], ids=["well", "badly"])
def test_events_are_those_of_torchs_agent(text: str, tmp_path: Path, forks: ForkServer) -> None:
    """Both commands are started as a user does where all goes well."""
    found = []
    for launcher in BOTH:
        script = write(tmp_path / launcher[-1], text)
        options = ["--standalone", "--max-restarts", "1", "--role", "r", "--event-log-handler", "console"]
        options += [] if text == "pass" else ["--start-method", "forkserver"]
        done, _ = launch(launcher, [*options, script.name], script, forks=None if text == "pass" else forks)
        found.append(events(done.stderr))
    assert len(found[0]) >= 4
    assert found[1] == found[0]


TIMER = """
import os, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=1, scope="step"):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(50)
print("done", os.environ["TORCHELASTIC_TIMER_FILE"], flush=True)
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_timer_that_runs_out_ends_its_worker(named: bool, tmp_path: Path, forks: ForkServer) -> None:
    """Under torchrun its launcher as well; here the worker is started again as after any other death."""
    script = write(tmp_path, TIMER)
    more = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", **({"TORCHELASTIC_TIMER_FILE": f"{tmp_path}/pipe"} if named else {})}
    options = ["--standalone", "--max-restarts", "1", "--event-log-handler", "console", "--start-method", "forkserver"]
    done, _ = launch(SWIFT_RUN, [*options, script.name], script, more, forks)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[1])
    assert done.stdout.startswith("done") and (not named or path == tmp_path / "pipe")
    assert not path.exists()
    names = [json.loads(line)["name"] for line in done.stderr.splitlines() if line.startswith('{"name"')]
    assert {"watchdog started", "timer expired", "kill worker process", "watchdog stopped"} <= set(names)


ROLES = """
import os, sys
names = ("GROUP_RANK", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(*(os.environ[name] for name in names), *sys.argv[1:], flush=True)
"""


def test_nodes_of_different_roles_sizes_and_arguments(tmp_path: Path, forks: ForkServer) -> None:
    nodes = [("a", 1, "train.py", "x"), ("b", 2, "other.py", "y")]
    with PrivateEtcd() as server:
        running = []
        for number, (role, size, name, arg) in enumerate(nodes):
            script = write(tmp_path / role, ROLES, name)
            options = ["--nnodes", "2", "--nproc-per-node", str(size), "--role", role, "--node-rank", str(number)]
            options += ["--rdzv-endpoint", server.endpoint, "--rdzv-id", "roles", "--rdzv-conf", "join_timeout=30"]
            with open(tmp_path / f"{role}.out", "wb") as output, open(tmp_path / f"{role}.err", "wb") as errors:
                running.append(forks.start(
                    [*SWIFT_RUN[1:], *options, name, arg], environment(tmp_path / role / "out"), script.parent,
                    output.fileno(), errors.fileno(),
                ))  # fmt: skip
        try:
            codes = [process.wait(60) for process in running]
        finally:
            for process in running:
                process.kill()
    printed = [[(tmp_path / f"{role}.{kind}").read_text() for kind in ("out", "err")] for role, *_ in nodes]
    assert codes == [0, 0], printed
    assert printed[0][0].splitlines() == ["0 0 a 0 1 3 1 x"]
    assert sorted(printed[1][0].splitlines()) == ["1 1 b 0 2 3 2 y", "1 2 b 1 2 3 2 y"]
    assert any("another script" in error for _, error in printed)
