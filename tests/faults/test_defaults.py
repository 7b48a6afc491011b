"""What ends a job, and what does not, with the command of the quick start: no --max-restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.job import ROOT, SOURCE_ROOTS, Agents, Outcome

pytestmark = pytest.mark.timeout(120)

SCRIPT = ROOT / "tests" / "support" / "failing_train.py"
Run = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents], tmp_path: Path) -> Run:
    def run(
        fails: str, max_restarts: int | None = None, start_method: str = "forkserver", **environment: str
    ) -> Outcome:
        environment = {"FAILS": fails, "HERE": str(tmp_path), **environment}
        agents = make_agents(
            num_nodes=1, max_restarts=max_restarts, script=SCRIPT, environment=environment, start_method=start_method
        )
        agents.start("a")
        return agents.wait(80)

    return run


def lines(outcome: Outcome, what: str) -> list[str]:
    return [line for line in outcome.text().splitlines() if what in line]


def test_a_rank_that_advances_may_be_killed_many_times(run: Run) -> None:
    outcome = run("often")
    assert outcome.exit_codes == {"a": 0}, outcome.text()
    assert len(outcome.pids[1]) == 6 and len(outcome.pids[0]) == 1, outcome.text()
    assert len({path.read_text() for path in outcome.directory.glob("hash.*")}) == 1
    assert len(lines(outcome, "a lost worker is replaced in place, as often as it takes")) == 1
    assert len(lines(outcome, "no job.checkpoint: should all workers have to start again")) == 1


def test_kills_without_progress_end_the_job_at_the_third(run: Run) -> None:
    outcome = run("oom")
    assert outcome.exit_codes == {"a": 1}, outcome.text()
    assert len(outcome.pids[1]) == 3 and len(outcome.pids[0]) == 1, outcome.text()
    (cause, *_) = lines(outcome, "3 failures within 10 iterations of its own")
    assert cause.count("killed by signal 9, in iteration 20 (pid ") == 3
    summary = outcome.text().partition("Root Cause")[2]
    assert all(word in summary for word in ("tried since", "replaced in place twice", "safe:", "to do:")), summary


@pytest.mark.parametrize("fails", ["raises", "all-raise"])
def test_the_same_exception_ends_the_job_at_the_second_time(run: Run, fails: str) -> None:
    outcome = run(fails)
    assert outcome.exit_codes == {"a": 1}, outcome.text()
    line = 1 + SCRIPT.read_text().splitlines().index('            raise ValueError(f"a bad sample, {os.getpid()}")')
    cause = f"the same exception at the same place, ValueError at failing_train.py:{line}"
    assert lines(outcome, cause), outcome.text()
    # If both raise it depends on which is first whether one of them is replaced alone or all are started again.
    raised = [line for line in outcome.text().splitlines() if "]: ValueError: a bad sample" in line]
    assert max(sum(f"[rank{rank}]" in line for line in raised) for rank in outcome.pids) == 2, outcome.text()
    assert fails == "all-raise" or max(len(pids) for pids in outcome.pids.values()) == 2, outcome.text()
    assert "a bad sample" in outcome.text().partition("Root Cause")[2]


def test_what_a_worker_raised_that_was_started_as_by_torchrun_counts_too(run: Run) -> None:
    """Nothing handles an exception any more when its hook is called: torch finds no traceback by itself there."""
    outcome = run("raises", start_method="spawn")
    assert outcome.exit_codes == {"a": 1}, outcome.text()
    assert lines(outcome, "the same exception at the same place, ValueError at failing_train.py:"), outcome.text()
    assert len(outcome.pids[1]) == 2, outcome.text()
    assert "NoneType" not in outcome.text()


@pytest.mark.parametrize("number", [None, 5])
def test_replacements_that_cannot_be_set_up_restart_all(run: Run, number: int | None) -> None:
    outcome = run("set-up-once", number)
    assert outcome.exit_codes == {"a": 0}, outcome.text()
    (why, *_) = lines(outcome, "all workers restart")
    assert "two replacements of rank 1 have failed before an iteration (RuntimeError at failing_train.py:" in why
    assert len(outcome.pids[1]) == 4 and len(outcome.pids[0]) == 2, outcome.text()


def test_all_restart_for_that_once(run: Run) -> None:
    outcome = run("set-up")
    assert outcome.exit_codes == {"a": 1}, outcome.text()
    (cause, *_) = lines(outcome, "rank 1 fails again and again: it has failed again after a restart of all workers")
    assert "(1) killed by signal 9, in iteration 20" in cause and "(4) RuntimeError at failing_train.py:" in cause
    assert len(outcome.pids[1]) == 4, outcome.text()


def test_a_number_keeps_its_meaning(run: Run) -> None:
    outcome = run("often", PET_MAX_RESTARTS="1")
    assert outcome.exit_codes == {"a": 1} and len(outcome.pids[1]) == 2, outcome.text()
    assert lines(outcome, "no restart is left (--max-restarts)")
    assert lines(outcome, "--max-restarts 1: so many times the workers of a node")


def test_the_example_goes_on_when_rank_0_is_killed_in_its_evaluation(
    make_agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """Its replacement begins behind the last batch of an epoch: no variable of the loop over batches is there."""
    pytest.importorskip("sklearn", reason="the example trains on scikit-learn's digits")
    script = ROOT / "tests" / "support" / "digits_killed.py"
    agents = make_agents(num_nodes=1, max_restarts=None, script=script, environment={"HERE": str(tmp_path)})
    agents.start("a")
    outcome = agents.wait(80)
    assert outcome.exit_codes == {"a": 0}, outcome.text()
    assert len(lines(outcome, "killed by signal 9")) and not lines(outcome, "exited with code"), outcome.text()
    assert len(lines(outcome, "epoch 1/2: test loss")) == 1 and len(lines(outcome, "epoch 2/2: test loss")) == 1


@pytest.fixture
def quick_start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command of the README; its output goes to `log`."""
    started: list[subprocess.Popen[str]] = []

    def start(script: Path, **environment: str) -> subprocess.Popen[str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
            "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "HERE": str(tmp_path), **environment,
        }  # fmt: skip
        with open(tmp_path / "log", "w") as log:
            command = [sys.executable, "-m", "swift_agent.run", "--standalone", "--nproc-per-node", "2", str(script)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(20)


def test_the_quick_start_goes_on_when_a_worker_is_killed(
    quick_start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """By the process id that it prints."""
    agent = quick_start(SCRIPT, SLOW="1")
    log = tmp_path / "log"
    deadline_s = time.monotonic() + 60
    while "iteration 20\n" not in log.read_text():
        assert time.monotonic() < deadline_s and agent.poll() is None, log.read_text()
        time.sleep(0.05)
    found = re.search(r"rank 1 is process (\d+)", log.read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    assert agent.wait(60) == 0, log.read_text()
    text = log.read_text()
    assert "recovered: generation 2 goes on" in text and "iteration 50" in text, text
    assert len((tmp_path / "pids.0").read_text().split()) == 1
    assert (tmp_path / "hash.0").read_text() == (tmp_path / "hash.1").read_text()


def test_a_script_as_it_is_has_torchruns_default(
    quick_start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, signal, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "open(os.environ['HERE'] + '/begun.' + str(dist.get_rank()), 'a').write('x')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    began_s = time.monotonic()
    assert quick_start(script).wait(60) == 1
    text = (tmp_path / "log").read_text()
    assert "no restart is left (--max-restarts)" in text and "replaced in place" not in text, text
    assert (tmp_path / "begun.1").read_text() == "x" and time.monotonic() - began_s < 50
