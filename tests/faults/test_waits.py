"""A wait that no rank will ever answer is told and ended, while somebody who is only slow is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job import ROOT, Agents, Outcome

SCRIPT = ROOT / "tests" / "support" / "waiting_train.py"


@pytest.fixture
def run(make_agents: Callable[..., Agents], tmp_path: Path) -> Callable[[str], Outcome]:
    def start(form: str) -> Outcome:
        agents = make_agents(tmp_path, num_workers=1, script=SCRIPT, orders={"form": form})
        for node in ("a", "b"):
            agents.start(node)
        return agents.wait(60)

    return start


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("uneven", "rank 0 has come to the end of the run after 10 iterations; rank 1 waits for others in"),
        ("no loop", "rank 0 has come to the end of the run after 0 iterations; rank 1 waits for others at the begin"),
        ("section of some", "rank 0 waits for others in a section (@job.resilient) after iteration 5 (evaluate,"),
        ("one's barrier", "rank 0 waits for others in a section (@job.resilient) after iteration 5 (main,"),
        ("barrier of some", "rank 0 waits for others outside of iterations, after 6 of them (main, waiting_train.py:"),
    ],
)
def test_a_wait_for_nobody_ends_the_job(form: str, told: str, run: Callable[[str], Outcome]) -> None:
    outcome = run(form)
    assert f"nobody can go on: {told}" in outcome.text(), outcome.text()
    assert 0 not in outcome.exit_codes.values()
    # The script would come to the same again.
    assert all(len(pids) == 1 for pids in outcome.pids.values()), outcome.text()


def test_who_works_alone_is_waited_for(run: Callable[[str], Outcome]) -> None:
    outcome = run("slow alone")
    text = outcome.text()
    assert set(outcome.exit_codes.values()) == {0} and "nobody can go on" not in text, text
    assert "nothing has moved here for" in text and "rank 0 works in a section" in text, text
