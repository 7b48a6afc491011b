"""What deploy/slurm/train.sbatch makes of how its nodes end, with programs of the test in place of Slurm's and ours.

It must never tell how Slurm itself behaves: that is in tests/faults/test_slurm.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job import ROOT

TEMPLATE = ROOT / "deploy" / "slurm" / "train.sbatch"
PROGRAMS = {
    "scontrol": """
case $* in
"show hostnames "*) printf '%s\\n' $SLURM_JOB_NODELIST ;;
*) echo "$*" >>"$LAB/orders" ;;
esac""",
    "sinfo": "echo up",
    "scancel": 'echo "scancel $*" >>"$LAB/orders"',
    # One in twenty of the time: who waits here waits for other processes of this test.
    "sleep": 'exec /bin/sleep "$(echo "$1" | awk \'{ print $1 / 20 }\')"',
    "swiftctl": 'echo >>"$LAB/asked"; [ -e "$LAB/over" ] || exit 0; echo "there is no job"; exit 1',
    "srun": """
while [ "${1#--}" != "$1" ]; do
    case $1 in --nodelist=*) export NODE=${1#*=} ;; esac
    shift
done
[ "$NODE" != "${UNSHARED:-}" ] || set -- "${@//$SWIFT_SLURM_DIR//nowhere}"
exec "$@" """,
    "swift-run": """
while [ $# -gt 0 ]; do
    [ "$1" != --result ] || result=$2
    shift
done
echo "$PET_PREEMPT_GRACE" >>"$LAB/begun.$NODE"
says() { echo "{\\"exit_code\\": $1, \\"cause\\": \\"$2\\", \\"why\\": \\"$3\\"}" >"$result"; exit "$1"; }
. "$LAB/does.$NODE" """,
}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The script, on nodes that each do what is said of them."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(*nodes: str, **variables: str) -> subprocess.CompletedProcess[str]:
        names = [f"n{number}" for number in range(1, len(nodes) + 1)]
        for name, does in zip(names, nodes, strict=True):
            (tmp_path / f"does.{name}").write_text(does)
        environment = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LAB": str(tmp_path), "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": " ".join(names), "SLURM_CLUSTER_NAME": "lab", "SWIFT_SLURM_DIR": str(tmp_path),
            "SWIFT_ETCD_ENDPOINTS": "etcd1:2379", "SWIFT_SLURM_WATCH_S": "100000", **variables,
        }  # fmt: skip
        return subprocess.run(
            ["bash", str(TEMPLATE), "train.py"], env=environment, capture_output=True, text=True, timeout=50,
            check=False,
        )  # fmt: skip

    return run


def orders(lab: Path) -> list[str]:
    path = lab / "orders"
    return path.read_text().splitlines() if path.exists() else []


PREEMPTED, DRAINED, SUCCEEDED = "says 75 preempted 'told to go'", "says 0 drained 'n1 has its slot'", "says 0 succeeded"
MISSING, SCRIPT, STOPPED = "says 69 infrastructure 'no node'", "says 1 script 'rank 1'", "says 3 operator"


@pytest.mark.parametrize(
    ("nodes", "code", "again"),
    [
        ((PREEMPTED, DRAINED, PREEMPTED), 75, True),
        ((PREEMPTED, "says 75 drained", SUCCEEDED), 0, False),
        (("says 75 drained", SCRIPT, SCRIPT), 1, False),
        ((MISSING, PREEMPTED, MISSING), 69, True),
        ((MISSING, DRAINED, "says 75 drained"), 69, True),
        ((SUCCEEDED, PREEMPTED, SUCCEEDED), 0, False),
        ((STOPPED, MISSING, PREEMPTED), 3, False),
        (("exit 2", "exit 2", "exit 2"), 2, False),
        ((SUCCEEDED, "exit 7", SUCCEEDED), 0, False),
        (("exit 7", DRAINED, "exit 7"), 7, False),
    ],
)
def test_how_the_job_ends(nodes: tuple[str, ...], code: int, again: bool, run: Run, tmp_path: Path) -> None:
    done = run(*nodes)
    assert (done.returncode, orders(tmp_path)) == (code, ["requeue 17"] if again else []), done.stdout + done.stderr
    assert f"swift-run ended with {code}\n" in done.stdout
    assert list(tmp_path.glob(".swift-*/*")) == ([tmp_path / ".swift-17" / "retries"] if code == 69 else [])


def test_what_is_missing_is_waited_for_a_few_times(run: Run, tmp_path: Path) -> None:
    for number in (1, 2):
        done = run(MISSING, MISSING, SWIFT_SLURM_RETRIES="2")
        assert f"queued again, for the {number}. time" in done.stdout and done.returncode == 69
    assert orders(tmp_path) == ["requeue 17"] * 2
    assert "queued again" not in run(MISSING, MISSING, SWIFT_SLURM_RETRIES="2").stdout
    assert orders(tmp_path) == ["requeue 17"] * 2 and not list(tmp_path.glob(".swift-*"))
    # What has trained to the end of its time begins anew.
    run(MISSING, MISSING)
    run(PREEMPTED, PREEMPTED)
    assert "for the 1. time" in run(MISSING, MISSING).stdout


def test_a_node_that_cannot_even_start_is_given_up(run: Run, tmp_path: Path) -> None:
    """Such as one without the environment; the others train on."""
    wait = 'while [ "$(wc -l <"$LAB/begun.n2")" -lt 3 ]; do /bin/sleep 0.1; done; /bin/sleep 0.5; ' + SUCCEEDED
    done = run(wait, "exit 1")
    assert done.returncode == 0 and "n2 is given up: swift-run ended three times" in done.stdout, done.stdout
    assert len((tmp_path / "begun.n2").read_text().split()) == 3


def test_nodes_that_all_cannot_start_end_the_job(run: Run, tmp_path: Path) -> None:
    """Also if swiftctl cannot say whether there is a job."""
    (tmp_path / "swiftctl").write_text("#!/bin/sh\necho no module >&2; exit 1\n")
    done = run("exit 127", "exit 127")
    assert done.returncode == 127 and not orders(tmp_path), done.stdout
    assert "n1 is given up" in done.stdout and "n2 is given up" in done.stdout


def test_it_is_not_asked_all_the_time_whether_the_job_is_over(run: Run, tmp_path: Path) -> None:
    """While a node that was drained has ended: each question starts a Python."""
    done = run(f"/bin/sleep 4; {SUCCEEDED}", DRAINED)
    assert done.returncode == 0 and len((tmp_path / "asked").read_text()) <= 3, done.stdout


def test_a_step_that_hangs_is_not_waited_for_when_the_job_is_over(run: Run, tmp_path: Path) -> None:
    """That of a lost node."""
    done = run(f': >"$LAB/over"; {SUCCEEDED}', "exec /bin/sleep 5")
    assert done.returncode == 0, done.stdout


def test_a_directory_that_nodes_do_not_share_is_told(run: Run, tmp_path: Path) -> None:
    done = run(SUCCEEDED, SUCCEEDED, UNSHARED="n2")
    assert done.returncode == 2 and not list(tmp_path.glob("begun.*")), done.stdout
    told = "SWIFT_SLURM_DIR has to be a directory that all nodes see"
    assert done.stdout == f"[train.sbatch] n2 does not see {tmp_path}/.swift-17: {told}\n"


def test_of_the_time_before_its_limit_most_is_for_a_checkpoint(run: Run, tmp_path: Path) -> None:
    """What the line with --signal asks for is more than what a node takes, and ten seconds (docs/signals.md)."""
    asked = int(TEMPLATE.read_text().partition("#SBATCH --signal=USR1@")[2].split()[0])
    run(SUCCEEDED)
    run(SUCCEEDED, PET_PREEMPT_GRACE="7")
    grace, chosen = map(int, (tmp_path / "begun.n1").read_text().split())
    assert asked // 2 < grace <= asked - 10 and chosen == 7
