"""Scripts in the idioms of strangers, each killed before, inside and after an iteration, a worker and a node.

Equal or told: the result is bit for bit that of an undisturbed run, or the expected line is printed (`idioms`). Every
test asserts that its faults fired.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.strangers.idioms import IDIOMS, Idiom, Told
from tests.support.agent_forks import ForkServer
from tests.support.job import Agents, Outcome

pytestmark = pytest.mark.timeout(300)  # most tests run a job twice

SCRIPTS = Path(__file__).parent / "scripts"
MOMENTS = ("before", "inside", "after")


# What libraries that take seconds of a processor in each process, and again in each agent's standby server, import.
HEAVY = {"lightning": "lightning", "transformers": "transformers.trainer"}


@pytest.fixture(scope="session")
def forks_with() -> Iterator[dict[str, ForkServer]]:
    """By library: what agents and workers are forked from that have imported it."""
    made: dict[str, ForkServer] = {}
    yield made
    for server in made.values():
        server.close()


@pytest.fixture(autouse=True)
def warm_forks(request: pytest.FixtureRequest, forks_with: dict[str, ForkServer]) -> ForkServer | None:
    """Those of the test's library, if it is a heavy one."""
    library = IDIOMS[request.node.callspec.params["name"]].needs
    if library not in HEAVY or importlib.util.find_spec(library) is None:
        return None
    if library not in forks_with:
        forks_with[library] = ForkServer(HEAVY[library])
    return forks_with[library]


@pytest.fixture(autouse=True)
def no_leftover_processes(warm_forks: ForkServer | None, no_leftover_processes: None) -> None:
    """As for all tests, but that these forks stay for others."""


@pytest.fixture
def run(make_agents: Callable[..., Agents], warm_forks: ForkServer | None) -> Callable[..., Outcome]:
    """Run *idiom* on two nodes, with three spares if nodes are to be lost. Heavy libraries have been imported before,
    but for undisturbed runs: there the script does it, so what is compared shows that it makes no difference."""

    def start(idiom: Idiom, directory: Path, faults: list[dict[str, Any]]) -> Outcome:
        directory.mkdir()
        warm = {"forks": warm_forks} if faults and warm_forks is not None else {}
        spares = 3 if any(fault["scope"] == "node" for fault in faults) else 0
        agents = make_agents(
            directory, num_workers=idiom.workers, max_restarts=None, script=SCRIPTS / idiom.script,
            script_args=idiom.args, options=(*idiom.options, "--spares", str(spares)), orders={"faults": faults},
            **warm,
        )  # fmt: skip
        for node in "abcde"[: 2 + spares]:
            agents.start(node)
        return agents.wait(120)

    return start


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, dict[int, str]]:
    """idiom -> rank -> hash at the end of a run without failure; each is run once."""
    return {}


@pytest.fixture
def expected_hashes(
    run: Callable[..., Outcome], undisturbed: dict[str, dict[int, str]], tmp_path: Path
) -> Callable[[str], dict[int, str]]:
    def find(name: str) -> dict[int, str]:
        if name not in undisturbed:
            outcome = run(IDIOMS[name], tmp_path / "undisturbed", [])
            assert set(outcome.exit_codes.values()) == {0}, outcome.text()
            undisturbed[name] = hashes_of(outcome)
            assert len(undisturbed[name]) == 2 * IDIOMS[name].workers, outcome.text()
            _check_told_at_start(IDIOMS[name], outcome)
        return undisturbed[name]

    return find


def hashes_of(outcome: Outcome) -> dict[int, str]:
    return {rank: result["hash"] for rank, result in outcome.results.items()}


def _check_told_at_start(idiom: Idiom, outcome: Outcome) -> None:
    told = idiom.expected
    if isinstance(told, Told) and told.when == "start":
        assert told.is_in(outcome.text()), outcome.text()
        assert not told.never or told.never not in outcome.text(), outcome.text()


def faults_of(idiom: Idiom, scopes: tuple[str, ...]) -> list[dict[str, Any]]:
    """One at each moment for each of *scopes*, the ranks in turn."""
    num_ranks = 2 * idiom.workers
    return [
        {"at": moment, "iteration": iteration + later, "rank": (index + 1) % num_ranks, "scope": scope}
        for index, (moment, iteration) in enumerate(zip(MOMENTS, idiom.at, strict=True))
        for later, scope in enumerate(scopes)
    ]


def when_the_other_has_updated(fault: dict[str, Any]) -> list[dict[str, Any]]:
    """Else the iteration may be undone, and made again: then there is nothing to tell."""
    here = {"at": fault["at"], "iteration": fault["iteration"]}
    wait = {**here, "rank": fault["rank"], "scope": "wait"}
    return [wait, {**here, "rank": 1 - fault["rank"], "scope": "go", "on": 0}, fault]


@pytest.mark.parametrize(
    ("name", "scopes"),
    [pytest.param(name, scopes, id=f"{name}-{'+'.join(scopes)}") for name in IDIOMS for scopes in IDIOMS[name].jobs()],
)
def test_stranger(
    name: str,
    scopes: tuple[str, ...],
    run: Callable[..., Outcome],
    expected_hashes: Callable[[str], dict[int, str]],
    tmp_path: Path,
) -> None:
    idiom = IDIOMS[name]
    if idiom.needs and importlib.util.find_spec(idiom.needs) is None:
        pytest.skip(f"{idiom.needs} is not installed")
    if isinstance(idiom.expected, Told) and idiom.expected.then == "refused":
        _check_refused(idiom.expected, run(idiom, tmp_path / "refused", []))
        return
    hashes = expected_hashes(name)
    faults = faults_of(idiom, scopes)
    if isinstance(idiom.expected, Told):
        faults = [faults[MOMENTS.index(idiom.expected.moment)]]
        if idiom.expected.moment == "after":
            faults = when_the_other_has_updated(faults[0])
    outcome = run(idiom, tmp_path / "disturbed", faults)
    assert outcome.fired == set(range(len(faults))), f"faults that fired: {outcome.fired}\n{outcome.text()}"
    if isinstance(idiom.expected, Told):
        _check_told(idiom.expected, outcome, hashes)
    else:
        _check_equal(idiom, faults, outcome, hashes)


def _check_equal(idiom: Idiom, faults: list[dict[str, Any]], outcome: Outcome, hashes: dict[int, str]) -> None:
    text = outcome.text()
    assert hashes_of(outcome) == hashes, text
    killed = sum(fault["scope"] == "node" for fault in faults)
    assert sorted(outcome.exit_codes.values()) == [-9] * killed + [0] * (len(outcome.exit_codes) - killed), text
    # Whoever was not lost was not started again.
    lost = Counter(rank for fault in faults for rank in _ranks_lost(fault, idiom.workers))
    again = {rank: len(pids) - 1 for rank, pids in outcome.pids.items() if len(pids) > 1}
    assert again == lost, f"processes started again: {again}, lost were {lost}\n{text}"


def _check_told(told: Told, outcome: Outcome, hashes: dict[int, str]) -> None:
    text = outcome.text()
    assert told.is_in(text), text
    if told.then == "restart":
        assert hashes_of(outcome) == hashes, text
    else:
        assert 0 not in outcome.exit_codes.values(), text


def _check_refused(told: Told, outcome: Outcome) -> None:
    text = outcome.text()
    assert told.is_in(text), text
    assert not outcome.results and 0 not in outcome.exit_codes.values(), text


def _ranks_lost(fault: dict[str, Any], workers: int) -> list[int]:
    if fault["scope"] == "worker":
        return [fault["rank"]]
    first = fault["rank"] // workers * workers
    return list(range(first, first + workers))
