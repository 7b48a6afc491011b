"""How the end of a node becomes an exit code."""

from __future__ import annotations

from argparse import Namespace

import pytest

from swift_agent.errors import JobStopped
from swift_agent.launch.config import AgentConfig, ConfigError
from swift_agent.launch.options import parse_args
from swift_agent.launch.outcome import EXIT_CODES, exit_code, raise_outcome
from swift_rendezvous.roster.records import ResultRecord


def config(code: int) -> AgentConfig:
    return AgentConfig.from_args(parse_args(["--drained-exit-code", str(code), __file__]), {})


DRAINED = ResultRecord("succeeded", "slot 1 is of node c now", cause="drained")


def test_a_drained_node_ends_with_the_code_that_was_asked_for() -> None:
    assert raise_outcome(DRAINED, config(0)) == "drained"
    with pytest.raises(JobStopped, match="goes on without this node: slot 1 is of node c now") as ended:
        raise_outcome(DRAINED, config(75))
    assert ended.value.cause == "drained"
    assert exit_code(Namespace(drained_exit_code=75), ended.value.cause) == 75


def test_a_run_that_is_complete_is_a_success_whatever_a_drained_node_ends_with() -> None:
    assert raise_outcome(ResultRecord("succeeded", "all workers exited with code 0"), config(75)) == "succeeded"


@pytest.mark.parametrize("cause", EXIT_CODES)
def test_other_ends_have_their_own(cause: str) -> None:
    assert exit_code(Namespace(drained_exit_code=7), cause) == EXIT_CODES[cause]


@pytest.mark.parametrize("code", [-1, 256])
def test_what_is_no_exit_code_is_a_mistake(code: int) -> None:
    with pytest.raises(ConfigError, match=f"--drained-exit-code {code}: must be from 0 to 255"):
        config(code)
