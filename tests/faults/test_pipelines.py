"""Pipelines: a lost stage that nobody holds a replica of repeats its iterations from what its neighbours had sent it.

Each test asserts that its faults fired, that survivors kept their processes, and that the state of every stage and the
losses of every micro-batch are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_agent.wire.injected import Fault
from tests.support.injected import apart
from tests.support.job import Agents, Outcome
from tests.support.pipelines import (
    SCRIPT,
    References,
    assert_equal,
    assert_only_the_killed_ended,
    assert_same,
    at,
    kill_at_random,
    repeated,
)
from tests.tiers import in_soak, long

PLACES = ["forward", "backward", "before_step", "agree", "agreed", "after_step", "between"]
SCHEDULES = [
    "ByHand", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble",
]  # fmt: skip
Start = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        faults: Sequence[dict[str, Any] | Fault], nodes: str = "abcd", schedule: str = "Schedule1F1B", spares: int = 0,
        num_workers: int = 1, max_restarts: int = 20, **orders: Any,
    ) -> Outcome:  # fmt: skip
        of_script, injected = apart(faults)
        return make_agents(
            num_nodes=4 // num_workers, num_workers=num_workers, max_restarts=max_restarts, script=SCRIPT,
            orders={"faults": of_script, "schedule": schedule, **orders},
            options=("--spares", str(spares)) if spares else (),
        ).run(nodes, injected)  # fmt: skip

    return train


@pytest.fixture
def undisturbed(undisturbed_pipelines: References) -> References:
    return undisturbed_pipelines


@pytest.mark.parametrize("place", PLACES)
def test_workers(place: str, run: Start, undisturbed: References) -> None:
    """Each stage once, the first and the last too, in the first iteration too."""
    faults = [at(place, iteration, rank) for iteration, rank in ((0, 1), (3, 3), (5, 0), (8, 2))]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {0, 1, 2, 3})


def test_the_same_stage_again(run: Start, undisturbed: References) -> None:
    faults = [{"at": "backward", "iteration": number, "rank": 2, "scope": "worker"} for number in (2, 4, 5, 9)]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {2})


def test_logs_lie_where_the_user_says(
    make_agents: Callable[..., Agents], undisturbed: References, tmp_path: Path
) -> None:
    """And nothing of them is left at the end."""
    place = tmp_path / "disk" / "logs"
    faults = [{"at": "backward", "iteration": 4, "rank": 2, "scope": "worker"}]
    agents = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, orders={"faults": faults, "schedule": "Schedule1F1B"},
        options=("--message-log", str(place), "--message-log-limit", "1"),
    )  # fmt: skip
    for node_id in "abcd":
        agents.start(node_id)
    deadline_s = time.monotonic() + 60.0
    while len({path.parent for path in place.glob("swift-agent-*/messages-*/sent/*.seg")}) < 4:
        assert time.monotonic() < deadline_s, "no logs there"
        time.sleep(0.01)
    assert_same(agents.wait(), undisturbed("Schedule1F1B"), {2})
    assert list(place.iterdir()) == []


def test_logs_take_no_more_than_the_user_says(
    make_agents: Callable[..., Agents], undisturbed: References
) -> None:
    faults = [{"at": "forward", "iteration": 6, "rank": 2, "scope": "worker"}]
    outcome = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, orders={"faults": faults, "schedule": "Schedule1F1B"},
        options=("--message-log-limit", "0.00001"),
    ).run("abcd")  # fmt: skip
    assert "messages are logged no more: what --message-log-limit leaves this rank is used up" in outcome.text()
    assert "all workers restart" in outcome.text()
    assert_equal(outcome, undisturbed("Schedule1F1B"))


@pytest.mark.parametrize("place", ["forward", "agreed"])
def test_nodes(place: str, run: Start, undisturbed: References) -> None:
    faults = [at(place, 4, 1, "node"), at(place, 7, 3, "node")]
    outcome = run(faults, nodes="abcdef", spares=2)
    assert_same(outcome, undisturbed("Schedule1F1B"), {1, 3})
    assert sorted(outcome.exit_codes.values()) == [-9, -9, 0, 0, 0, 0], outcome.text()


def test_neighbours_are_lost_together(run: Start, undisturbed: References) -> None:
    """Two stages on each node: the messages between the lost ones are in no log, and are sent again."""
    faults = [at("backward", 4, 2, "node"), at("agreed", 7, 1, "node")]
    assert_same(run(faults, nodes="abcd", spares=2, num_workers=2), undisturbed("Schedule1F1B"), {0, 1, 2, 3})


def all_at_once(place: str, iteration: int, ranks: list[int]) -> list[dict[str, Any]]:
    """Nodes that die when the last of them has come to that place."""
    *waiting, last = ranks
    faults: list[dict[str, Any]] = [{"at": place, "iteration": iteration, "rank": rank} for rank in waiting * 2]
    for number, fault in enumerate(faults):
        fault["scope"] = "wait" if number < len(waiting) else "node"
    for number in range(len(waiting)):
        faults.append({"at": place, "iteration": iteration, "rank": last, "scope": "go", "on": number})
    return [*faults, {"at": place, "iteration": iteration, "rank": last, "scope": "node"}]


@pytest.mark.parametrize("ranks", [[2, 0], [3, 2, 0], [3, 2, 1]], ids=str)
def test_several_nodes_are_lost_at_once(ranks: list[int], run: Start, undisturbed: References) -> None:
    """Stages that are no neighbours; and all but one, which has stayed in its iteration."""
    outcome = run(all_at_once("before_step", 5, ranks), nodes="abcdefg"[: 4 + len(ranks)], spares=len(ranks))
    assert_same(outcome, undisturbed("Schedule1F1B"), set(ranks))
    assert sorted(outcome.exit_codes.values()) == [-9] * len(ranks) + [0] * 4, outcome.text()


def test_messages_in_bfloat16(run: Start, undisturbed: References) -> None:
    faults = [at("backward", 3, 1), at("backward", 6, 3)]
    assert_same(run(faults, dtype="bfloat16"), undisturbed("Schedule1F1B", dtype="bfloat16"), {1, 3})


def test_a_neighbour_is_lost_meanwhile(run: Start, undisturbed: References) -> None:
    """While the first one repeats its iterations, which it goes on with."""
    faults = [
        {"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "rebuild", "rank": 2, "scope": "worker", "after": 0},
        {"at": "forward", "iteration": 9, "rank": 1, "scope": "worker"},
        {"at": "transfer", "rank": 3, "scope": "worker", "after": 2},
    ]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {1, 2, 3})


# A log that takes half a second, in pieces of two messages or three.
SLOWLY = {"piece_bytes": 2000, "piece_s": 0.02}


def test_iterations_are_repeated_while_their_logs_come(run: Start, undisturbed: References) -> None:
    """And another rank that is lost meanwhile, which has nothing to give, does not disturb that."""
    faults = [
        {"at": "forward", "iteration": 7, "rank": 1, "scope": "worker"},
        {"at": "verify", "rank": 3, "scope": "worker", "delay_s": 0.2, "after": 0},
        {"at": "piece", "iteration": 15, "rank": 2, "scope": "wait"},
        {"at": "forward", "iteration": 2, "rank": 1, "scope": "go", "on": 2, "after": 0},
    ]
    outcome = run(faults, **SLOWLY)
    assert_same(outcome, undisturbed("Schedule1F1B"), {1, 3})
    assert [len(outcome.pids[rank]) for rank in (1, 3)] == [2, 2], outcome.text()


def test_who_repeats_iterations_for_long_is_waited_for(run: Start, undisturbed: References) -> None:
    """For longer than groups may take to connect: by those who join a replacement that came later."""
    faults = [
        {"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "verify", "rank": 2, "scope": "worker", "delay_s": 0.5, "after": 0},
        {"at": "forward", "iteration": 3, "rank": 1, "scope": "sleep", "s": 3.0, "after": 0},
    ]
    outcome = run(faults, connect_s=1.0)
    assert_same(outcome, undisturbed("Schedule1F1B"), {1, 2})
    assert [len(outcome.pids[rank]) for rank in (1, 2)] == [2, 2], outcome.text()


def test_logs_that_take_longer_than_an_operation_may(run: Start, undisturbed: References) -> None:
    """Two stages are lost, and take all logs before they begin: the others wait for that, and not in an operation."""
    faults = [{"at": "backward", "iteration": 7, "rank": 2, "scope": "node"}]
    outcome = run(
        faults, nodes="abc", spares=1, num_workers=2, timeout_s=2.0, piece_bytes=2000, piece_s=0.2, waits_s=0.5,
        progress_s=0.0,
    )  # fmt: skip
    assert_same(outcome, undisturbed("Schedule1F1B"), {2, 3})
    text = outcome.text()
    assert "rank 0: others wait for ranks that have not taken checkpoint and logs yet: 2\n" in text, text
    for rank in (2, 3):
        told = re.findall(rf"rank {rank}: has repeated (\d) of 7 iterations in \d+ s", text)
        assert told == list("123456"), text
    phases = re.search(r"recovered: .* transfer (\d+) ms, .* logs (\d+) ms, replay", outcome.text())
    assert phases is not None and int(phases[1]) > 2000 and int(phases[2]) < 1000, outcome.text()


def test_who_gives_a_log_is_lost_meanwhile(run: Start, undisturbed: References) -> None:
    """Whoever takes it cannot go on with what has come."""
    faults = [
        {"at": "forward", "iteration": 7, "rank": 1, "scope": "worker"},
        {"at": "piece", "iteration": 12, "rank": 2, "scope": "worker"},
        {"at": "forward", "iteration": 9, "rank": 2, "scope": "node"},
        {"at": "piece", "iteration": 10, "rank": 3, "scope": "node", "after": 2},
    ]
    outcome = run(faults, nodes="abcdef", spares=2, **SLOWLY)
    assert_same(outcome, undisturbed("Schedule1F1B"), {1, 2, 3})
    text = outcome.text()
    assert text.count("has itself replaced") == 2, text
    for rank in (2, 3):
        assert f"the log of rank {rank} did not come to its end" in text


def test_the_replacement_is_lost_as_well(run: Start, undisturbed: References) -> None:
    """While it repeats iterations, at the end of that, and two together."""
    faults = [
        {"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "backward", "iteration": 3, "rank": 1, "scope": "worker", "after": 0},
        {"at": "between", "iteration": 5, "rank": 1, "scope": "worker", "after": 1},
        {"at": "forward", "iteration": 8, "rank": 3, "scope": "worker"},
    ]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {1, 3})


def test_one_of_two_replacements_is_lost_as_well(run: Start, undisturbed: References) -> None:
    faults = [
        {"at": "forward", "iteration": 6, "rank": 2, "scope": "node"},
        {"at": "backward", "iteration": 3, "rank": 3, "scope": "worker", "after": 0},
    ]
    assert_same(run(faults, nodes="abc", spares=1, num_workers=2), undisturbed("Schedule1F1B"), {2, 3})


@pytest.mark.parametrize(
    ("schedule", "nodes"),
    [("Schedule1F1B", True), ("ScheduleInterleavedZeroBubble", False),
     long("Schedule1F1B", False), long("ScheduleInterleaved1F1B", False)],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_random_moments(
    seed: int, schedule: str, nodes: bool, make_agents: Callable[..., Agents], undisturbed: References
) -> None:
    """Ten kills, of workers or of their nodes; `make soak` makes it thirty of each, in two more schedules."""
    iterations, num_kills = 30, 10
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=60, script=SCRIPT,
        orders={"schedule": schedule, "iterations": iterations, "pace_s": 0.2},
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    killed = kill_at_random(agents, num_kills, random.Random(seed), nodes=nodes)
    outcome = agents.wait()
    assert_only_the_killed_ended(outcome, killed)
    assert_equal(outcome, undisturbed(schedule, iterations=iterations), iterations)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, run: Start, undisturbed: References) -> None:
    choose = random.Random(schedule)
    faults = [
        {"at": choose.choice(PLACES), "iteration": number, "rank": choose.randrange(4), "scope": "worker"}
        for number in (0, 3, 6, 9)
    ]
    assert_same(run(faults, schedule=schedule), undisturbed(schedule), {fault["rank"] for fault in faults})


@pytest.mark.parametrize(
    ("scope", "iteration", "checkpoint"),
    [("worker", 5, 0), ("node", 5, 0), ("node", 2, 0), ("worker", 7, 4), ("node", 7, 4)],
)
def test_a_repetition_that_differs_is_noticed(
    scope: str, iteration: int, checkpoint: int, run: Start, undisturbed: References
) -> None:
    """Also where what was sent before is lost with its node: those who have received it tell. And in the iteration in
    which survivors have stayed. Then all begin with the checkpoint, if there is one."""
    faults = [{"at": "backward", "iteration": iteration, "rank": 1, "scope": scope}]
    drifts = checkpoint + 2 - (checkpoint > 0)
    orders = {"checkpoint": checkpoint, "patient": True} if checkpoint else {}
    outcome = run(faults, "abcde", spares=1, drifts=[1, drifts], **orders)
    text = outcome.text()
    # The first one of such a stage in that iteration, after three that told shapes, and eight of each before.
    first = rf"message {3 + 8 * drifts} of .*source=1, destination=2.* is not what was sent before: the repetition"
    assert re.search(rf"iteration {drifts} cannot be repeated from logs: {first}", text), text
    assert "all workers restart" in text and (not checkpoint or "all ranks begin with the checkpoint of" in text), text
    assert_equal(outcome, undisturbed("Schedule1F1B"))


def test_set_up_without_a_seed_cannot_be_repeated(make_agents: Callable[..., Agents]) -> None:
    """It is noticed, and all workers begin again, instead of training on with another state."""
    faults = [{"at": "forward", "iteration": 5, "rank": 2, "scope": "worker"}]
    outcome = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, orders={"faults": faults, "seedless": True}
    ).run("abcd")  # fmt: skip
    assert "the script's set-up gives another state than when the job began" in outcome.text()
    assert "all workers restart" in outcome.text()
    assert len(outcome.results) == 4, outcome.text()


def test_sections_without_communication_are_repeated(run: Start, undisturbed: References) -> None:
    faults = [
        {"at": "backward", "iteration": number, "rank": rank, "scope": "worker"} for number, rank in ((2, 1), (6, 0))
    ]
    assert_same(run(faults, section="alone"), undisturbed("Schedule1F1B", section="alone"), {0, 1})


def test_messages_of_a_section_cannot_be_repeated(run: Start, undisturbed: References) -> None:
    """They are in no log: nobody waits for them."""
    outcome = run([{"at": "forward", "iteration": 6, "rank": 2, "scope": "worker"}], section="messages")
    assert "a section cannot be repeated: a message outside of iterations is in no log" in outcome.text()
    assert "all workers restart" in outcome.text()
    assert_equal(outcome, undisturbed("Schedule1F1B", section="messages"))


def test_who_has_taken_part_in_a_collective_begins_its_iteration_again(
    run: Start, undisturbed: References
) -> None:
    """The checkpoint is of that iteration, so that no collective has to be repeated from logs: nobody keeps what those
    give that Python does not call."""
    faults = [
        {"at": "before_step", "iteration": 4, "rank": 2, "scope": "worker"},
        {"at": "forward", "iteration": 8, "rank": 1, "scope": "worker"},
    ]
    orders = {"collective": "compiled", "checkpoint": 4, "patient": True}
    outcome = run(faults, **orders)
    assert_same(outcome, undisturbed("Schedule1F1B", **orders), {1, 2}, again=True)
    text = outcome.text()
    assert "all begin iteration 4 again: ranks [0, 1, 3] have taken part in a collective of it" in text
    # Where there was none yet, all make it when they come to it.
    assert "survivors stay where they are in iteration 8" in text
    assert repeated(outcome.directory) == {0: [4], 1: [4], 3: [4]}, text


def test_who_is_lost_while_survivors_wait_in_their_iteration(run: Start, undisturbed: References) -> None:
    """Again and again: while the groups are connected, while logs are handed on, and when all were compared."""
    faults = [
        {"at": "backward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "rebuild", "rank": 2, "scope": "worker", "after": 0},
        {"at": "transfer", "rank": 1, "scope": "worker", "after": 1},
        {"at": "verify", "rank": 0, "scope": "worker", "after": 2},
    ]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {0, 1, 2})


def test_a_replacement_is_lost_in_the_iteration_of_its_predecessor(
    run: Start, undisturbed: References
) -> None:
    """When it is live again, in its middle; and then a neighbour, where the replacement stays."""
    faults = [
        {"at": "backward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "backward", "iteration": 6, "rank": 1, "scope": "worker", "after": 0},
        {"at": "before_step", "iteration": 6, "rank": 2, "scope": "worker", "after": 1},
    ]
    assert_same(run(faults), undisturbed("Schedule1F1B"), {1, 2})


# In iteration 5, once the first rank has one of two messages after its update: a rank is lost, and it goes on to the
# other one only when the rest has stopped.
def lost_after_the_update(lost: int) -> list[dict[str, Any]]:
    other = {1: 2, 3: 1}[lost]
    return [
        {"at": "after_step", "iteration": 5, "rank": lost, "scope": "wait"},
        {"at": "after_step", "iteration": 5, "rank": lost, "scope": "worker"},
        {"at": "report 1", "iteration": 5, "rank": 0, "scope": "go", "on": 0},
        {"at": "report 1", "iteration": 5, "rank": 0, "scope": "wait"},
        {"at": "rebuild", "rank": other, "scope": "go", "on": 3, "after": 1},
    ]


@pytest.mark.parametrize("lost", [1, 3], ids=["another", "the sender"])
def test_messages_that_are_received_after_the_update(
    lost: int, run: Start, undisturbed: References
) -> None:
    """Who waits for them stays, and has them from the log of the sender, or from its replacement when that repeats the
    iteration."""
    outcome = run(lost_after_the_update(lost), reports=True)
    assert_same(outcome, undisturbed("Schedule1F1B", reports=True), {lost})


@pytest.mark.parametrize("lost", [1, 3], ids=["another", "the sender"])
def test_messages_that_are_left_out_after_the_update(
    lost: int, run: Start, undisturbed: References
) -> None:
    """In a thread nobody can stay: what it had not received is not sent again, and what follows is counted from
    there."""
    faults = [*lost_after_the_update(lost), {"at": "forward", "iteration": 8, "rank": 2, "scope": "worker"}]
    outcome = run(faults, reports="thread")
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {lost, 2}, text
    assert_equal(outcome, undisturbed("Schedule1F1B", reports="thread"))
    assert "all workers restart" not in text
    assert "have messages in threads of the script's own" in text


def test_a_message_that_is_sent_after_the_update_is_refused(run: Start) -> None:
    outcome = run([], max_restarts=0, reports="late")
    assert not outcome.results
    assert "a message is sent in an iteration after its update" in outcome.text()


COLLECTIVES = [
    {"at": "forward", "iteration": 1, "rank": 1, "scope": "worker"},
    {"at": "clipping", "iteration": 3, "rank": 0, "scope": "worker"},
    {"at": "tying", "iteration": 4, "rank": 3, "scope": "worker"},
    {"at": "clipped", "iteration": 5, "rank": 2, "scope": "worker"},
    {"at": "agree", "iteration": 7, "rank": 3, "scope": "worker"},
    {"at": "agreed", "iteration": 9, "rank": 1, "scope": "worker"},
    {"at": "after_step", "iteration": 10, "rank": 0, "scope": "worker"},
]


@pytest.mark.parametrize("checkpoint", [0, 4], ids=["from the beginning", "from a checkpoint"])
def test_what_collectives_gave_is_repeated(checkpoint: int, run: Start, undisturbed: References) -> None:
    """Gradients of all stages are cut to one norm, and two stages have the same words: at each step of that a rank is
    lost. Its replacement repeats all iterations since the checkpoint with what the others have kept."""
    orders: dict[str, Any] = {"checkpoint": checkpoint, "patient": True} if checkpoint else {}
    outcome = run(COLLECTIVES, clips=True, **orders)
    assert_same(outcome, undisturbed("Schedule1F1B", clips=True), {0, 1, 2, 3}, again=True)


def test_neighbours_that_are_lost_together_get_what_collectives_gave(run: Start, undisturbed: References) -> None:
    """From one of the others, both of them, while their own messages are sent once more."""
    faults = [
        {"at": "backward", "iteration": 4, "rank": 2, "scope": "node"},
        {"at": "clipped", "iteration": 7, "rank": 1, "scope": "node"},
    ]
    outcome = run(faults, nodes="abcd", spares=2, num_workers=2, clips=True)
    assert_same(outcome, undisturbed("Schedule1F1B", clips=True), {0, 1, 2, 3}, again=True)


def test_a_collective_after_the_update_is_passed_over_if_it_was_cut(run: Start, undisturbed: References) -> None:
    """Nobody has had its result, so that a replacement does without it, too; also a later one."""
    faults = [
        {"at": "after_step", "iteration": 4, "rank": 3, "scope": "worker"},
        {"at": "told", "iteration": 6, "rank": 3, "scope": "worker"},
        {"at": "forward", "iteration": 9, "rank": 2, "scope": "worker"},
    ]
    # (Who passes over something runs it once more, without effect.)
    assert_same(run(faults, tells=True), undisturbed("Schedule1F1B"), {2, 3}, again=True)


@pytest.mark.parametrize("schedule", ["ByHandHalves", "Schedule1F1BHalves"])
def test_stages_of_several_ranks(schedule: str, run: Start, undisturbed: References) -> None:
    """Two stages of two ranks each, with collectives in the forward and the backward. One that is lost alone has what
    the other rank of its stage kept; two that are lost together make their collectives once more. In a first step from
    a checkpoint on, which a replacement makes alone, they count for nothing."""
    faults = [
        {"at": "backward", "iteration": 3, "rank": 1, "scope": "worker"},
        {"at": "forward", "iteration": 5, "rank": 2, "scope": "node"},
        {"at": "before_step", "iteration": 8, "rank": 0, "scope": "node"},
    ]
    outcome = run(faults, nodes="abcd", spares=2, num_workers=2, schedule=schedule, checkpoint=2, patient=True)
    assert_same(outcome, undisturbed(schedule), {0, 1, 2, 3}, again=True)
    assert "load the checkpoint of iteration 2" in outcome.text()


@pytest.mark.parametrize(
    "schedule", ["Schedule1F1B", *in_soak("ScheduleInterleaved1F1B")]
)
def test_random_kills_with_collectives(
    schedule: str, make_agents: Callable[..., Agents], undisturbed: References
) -> None:
    """Each iteration has collectives; an iteration in which one was under way is started over."""
    num_kills = 10
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=2 * num_kills, script=SCRIPT,
        orders={"schedule": schedule, "clips": True, "checkpoint": 5, "pace_s": 1.0},
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    killed = kill_at_random(agents, num_kills, random.Random(11))
    outcome = agents.wait()
    assert_equal(outcome, undisturbed(schedule, clips=True))
    text = outcome.text()
    assert "all workers restart" not in text
    for rank, num_killed in enumerate(killed):
        num_replaced = len(re.findall(rf"\] rank {rank}: .*itself replaced", text))
        assert num_killed <= len(outcome.pids[rank]) - 1 <= num_killed + num_replaced, text


def test_a_collective_of_a_stage_that_cannot_be_repeated(run: Start, undisturbed: References) -> None:
    """torch raises an error of its own for what fails in a stage."""
    faults = [{"at": "backward", "iteration": 4, "rank": 1, "scope": "worker"}]
    orders: dict[str, Any] = {"schedule": "Schedule1F1BHalves", "collective": "in a stage"}
    outcome = run(faults, **orders)
    text = outcome.text()
    assert "iteration 0 cannot be repeated from logs: " in text and "no log has what this collective gave" in text
    assert "all workers restart" in text and {len(pids) for pids in outcome.pids.values()} == {2, 3}, text
    assert_equal(outcome, undisturbed(**orders))


@pytest.mark.parametrize(
    "orders", [{"collective": "compiled"}, {"section": "communicates"}], ids=["compiled", "section"]
)
@pytest.mark.parametrize("num_workers", [1, 2], ids=["one is lost", "two are lost"])
def test_collectives_cannot_be_repeated(
    num_workers: int, orders: dict[str, Any], run: Start, undisturbed: References
) -> None:
    """Nothing is invented for them, nor taken from the ones that survivors are in: all workers begin again."""
    faults = [{"at": "forward", "iteration": 5, "rank": 2, "scope": "node"}]
    outcome = run(faults, nodes="abcde" if num_workers == 1 else "abc", spares=1, num_workers=num_workers, **orders)
    assert "no log has what this collective gave" in outcome.text()
    assert "all workers restart" in outcome.text()
    assert_equal(outcome, undisturbed("Schedule1F1B", **orders))
