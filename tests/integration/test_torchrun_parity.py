"""Real jobs under torchrun and under swift-run, side by side: a script that knows nothing of us sees no difference.

Two tests start both commands as a user does. In all others the launcher is a fork of a process that has its imports.
Workers are new processes always.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.run import main
from tests.support.agent_forks import ForkServer
from tests.support.launchers import SWIFT_RUN, TORCHRUN, environment, launch

# Differ from run to run under torchrun as well.
PER_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OUT", "TMPDIR"}

SCRIPT = """
import json, os, signal, sys

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
mode = sys.argv[1] if len(sys.argv) > 1 else "pass"
raises = rank == "1" and (mode == "raise" or (mode == "raise-once" and attempt == "0"))

def main():
    # One write each: a print is several, since workers run with -u, and those of two workers mix, under torchrun too.
    print(f"out {rank}\\n", end="", flush=True)
    print(f"err {rank}\\n", end="", file=sys.stderr, flush=True)
    seen = {"environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "name": __name__}
    seen["path"] = [os.path.abspath(entry) for entry in sys.path]
    with open(os.path.join(os.environ["OUT"], f"seen-{attempt}-{rank}.json"), "w") as file:
        json.dump(seen, file)
    if raises:
        raise KeyError("lost my keys")
    if mode == "exit":
        sys.exit(7)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    if raises or mode == "pass":  # whoever else imports torch for this waits two seconds
        from torch.distributed.elastic.multiprocessing.errors import record
        main = record(main)
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work" / "train_env.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def seen(out: Path) -> dict[str, Any]:
    """What the workers saw, by attempt and rank, without what differs from run to run."""
    found = {path.name: json.loads(path.read_text()) for path in out.glob("seen-*.json")}
    for one in found.values():
        missing = PER_RUN - set(one["environ"])
        assert not missing, f"not set: {missing}"
        # The same place under two names: torchrun's standalone store is at localhost.
        one["environ"]["MASTER_ADDR"] = socket.gethostbyname(one["environ"]["MASTER_ADDR"])
        one["environ"] = {
            name: value
            for name, value in one["environ"].items()
            if name not in PER_RUN and not name.startswith("SWIFT_")
        }
    return found


def differences(theirs: dict[str, Any], ours: dict[str, Any], where: str = "") -> dict[str, tuple[Any, Any]]:
    """The leaves of two trees that are not equal: path -> (theirs, ours)."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(name, "absent"), ours.get(name, "absent")
        if isinstance(one, dict) and isinstance(other, dict):
            found.update(differences(one, other, f"{where}{name}/"))
        elif one != other:
            found[where + name] = (one, other)
    return found


def both(
    args: list[str], script: Path, forks: ForkServer | None
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run both, compare exit code and what the workers saw; return torchrun's and ours for more."""
    theirs, their_out = launch(TORCHRUN, args, script, forks=forks)
    ours, our_out = launch(SWIFT_RUN, args, script, forks=forks)
    assert ours.returncode == theirs.returncode, ours.stderr
    assert differences(seen(their_out), seen(our_out)) == {}
    return theirs, ours


def test_environment_and_arguments_of_a_script(script: Path) -> None:
    args = ["--standalone", "--nproc-per-node", "2", script.name, "pass", "--nnodes", "-m"]
    theirs, ours = both(args, script, forks=None)
    assert theirs.returncode == 0
    found = seen(script.parent.parent / SWIFT_RUN[-1])
    assert sorted(found) == ["seen-0-0.json", "seen-0-1.json"]
    assert found["seen-0-1.json"]["argv"] == [script.name, "pass", "--nnodes", "-m"]
    assert found["seen-0-1.json"]["environ"]["OMP_NUM_THREADS"] == "1"
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines()) == ["out 0", "out 1"]


@pytest.mark.parametrize(
    "args",
    [
        ["-m", "train_env", "a"],
        ["--no-python", sys.executable, "train_env.py", "a"],
        ["--run-path", "train_env.py", "a"],
    ],
    ids=["module", "no-python", "run-path"],
)
def test_environment_and_arguments_of_other_entries(args: list[str], script: Path, forks: ForkServer) -> None:
    # A worker of --run-path has its sys.path from its launcher.
    theirs, _ = both(
        ["--role", "trainer", "--max-restarts", "2", *args], script, None if args[0] == "--run-path" else forks
    )
    assert theirs.returncode == 0, theirs.stderr
    assert len(seen(script.parent.parent / SWIFT_RUN[-1])) == 1


def root_cause(printed: str) -> tuple[str, str]:
    """(rank, exit code) of the first failure in the summary of a ChildFailedError.

    What else torchrun lists depends on whether its other workers were quicker to end than its SIGTERM.
    """
    assert "ChildFailedError" in printed
    found = re.search(r"Root Cause.*?rank\s+: (\d+) .*?exitcode\s+: (\S+)", printed, re.DOTALL)
    assert found, printed
    return found[1], found[2]


@pytest.mark.parametrize(("mode", "code"), [("raise", "1"), ("exit", "7"), ("kill", "-9")])
def test_failure_is_reported_alike(mode: str, code: str, script: Path, forks: ForkServer) -> None:
    args = ["--standalone", "--nproc-per-node", "2" if mode == "raise" else "1", script.name, mode]
    theirs, ours = both(args, script, forks)
    assert ours.returncode == 1
    rank = "1" if mode == "raise" else "0"
    assert root_cause(ours.stderr) == root_cause(theirs.stderr) == (rank, code)
    for printed in (theirs.stderr, ours.stderr):
        assert ("KeyError: 'lost my keys'" in printed) == (mode == "raise")
        assert ("SIGKILL" in printed) == (mode == "kill")


def test_all_workers_of_an_unmodified_script_are_restarted(script: Path, forks: ForkServer) -> None:
    args = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script.name, "raise-once"]
    theirs, _ = both(args, script, forks)
    assert theirs.returncode == 0, theirs.stderr
    assert sorted(seen(script.parent.parent / SWIFT_RUN[-1])) == [
        f"seen-{attempt}-{rank}.json" for attempt in (0, 1) for rank in (0, 1)
    ]


@pytest.mark.parametrize("streams", [["--redirects", "3"], ["--tee", "1", "--redirects", "0:3"]])
def test_streams_go_to_the_same_files(streams: list[str], script: Path, forks: ForkServer) -> None:
    def logs(out: Path) -> dict[str, str]:
        # <log dir>/<run id>_<random>/attempt_0/...
        return {
            str(path.relative_to(out / "logs")).partition("/")[2]: path.read_text()
            for path in (out / "logs").rglob("*.log")
        }

    args = ["--standalone", "--nproc-per-node", "2", *streams]
    (theirs, their_out), (ours, our_out) = (
        launch(one, [*args, "--log-dir", f"../{one[-1]}/logs", script.name, "a"], script, forks=forks)
        for one in (TORCHRUN, SWIFT_RUN)
    )
    assert (theirs.returncode, ours.returncode) == (0, 0), ours.stderr
    assert logs(our_out) == logs(their_out)
    assert logs(our_out)["attempt_0/0/stdout.log"] == "out 0\n"
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines())


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_torchs_own_backends_still_work(backend: str, script: Path, forks: ForkServer) -> None:
    args = ["--rdzv-backend", backend, "--nproc-per-node", "1", script.name, "a"]
    done, out = launch(SWIFT_RUN, args, script, forks=forks)
    assert done.returncode == 0, done.stderr
    assert list(seen(out)) == ["seen-0-0.json"]


@pytest.mark.parametrize("backend", ["swift-etcd", "c10d"])
def test_main_returns_none_or_raises_as_torchs(
    backend: str, script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment(tmp_path / "out").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    args = ["--rdzv-backend", backend, "--nproc-per-node", "1", str(script)]
    assert main([*args, "a"]) is None  # type: ignore[func-returns-value]
    with pytest.raises(ChildFailedError) as failed:
        main([*args, "exit"])
    rank, failure = failed.value.get_first_failure()
    assert (rank, failure.exitcode) == (0, 7)
