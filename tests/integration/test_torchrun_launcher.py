"""What a launcher does for who calls it, under torchrun and under swift-run: its caller's processes, its reply file,
its events, its timers, the place where workers meet."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.run import main
from swift_rendezvous.etcd import EtcdStore
from swift_rendezvous.private_etcd import PrivateEtcd
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


def call(launcher: tuple[str, ...], folder: Path, *args: str) -> dict[str, Any]:
    """What CALLER prints."""
    caller = write(folder, CALLER, "caller.py")
    done, _ = launch((sys.executable, str(caller), launcher[-1]), list(args), caller)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_caller_of_main_keeps_its_children(tmp_path: Path) -> None:
    found = [call(launcher, tmp_path / launcher[-1]) for launcher in BOTH]
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


def test_the_reply_file_of_the_launcher(tmp_path: Path) -> None:
    replies, printed = [], []
    for launcher in BOTH:
        script = write(tmp_path / launcher[-1], RECORDED)
        done, _ = launch(launcher, ["--standalone", script.name], script, {"TORCHELASTIC_ERROR_FILE": "../reply.json"})
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


def test_run_path_records_how_a_script_fails(tmp_path: Path) -> None:
    printed = []
    for launcher in BOTH:
        script = write(tmp_path / launcher[-1], BOOM)
        done, _ = launch(launcher, ["--standalone", "--nproc-per-node", "2", "--run-path", script.name], script)
        assert done.returncode == 1
        printed.append(done.stderr.partition("Root Cause")[2])
    for one in printed:
        assert "KeyError: 'lost my keys'" in one and "error.json" in one, one


GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == int(os.environ["WORLD_SIZE"])
"""


def test_run_path_ends_with_a_live_group(tmp_path: Path) -> None:
    script = write(tmp_path, GROUP)
    done, _ = launch(SWIFT_RUN, ["--nproc-per-node", "6", "--run-path", script.name], script)
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
        main(["--standalone", str(write(tmp_path, RECORDED))])
    assert main(["--standalone", str(write(tmp_path, "pass"))]) is None  # type: ignore[func-returns-value]
