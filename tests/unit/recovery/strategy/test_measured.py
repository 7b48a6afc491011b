"""What ranks have measured, put together: as the profile of a job, and as lines for people."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from swift_recovery.strategy.budget import Budget, groups_within, parse_budget
from swift_recovery.strategy.choose import chain_of, sent_bytes, ways
from swift_recovery.strategy.grouping import alone
from swift_recovery.strategy.measured import RankMeasured, put_together, to_file
from swift_recovery.strategy.profile import Machine, Profile, parse
from swift_recovery.strategy.sentences import lines, size_of, time_of


def rank(number: int, sent: Mapping[int, int] | None = None, **changes: object) -> RankMeasured:
    base = RankMeasured(number, 1.0, 0.7, 100, (number,), sent or {}, num_messages=4 if sent else 0,
                        checkpoint_every=10, logs=bool(sent))  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def pipeline(num: int = 4) -> list[list[RankMeasured]]:
    """Each sends 1000 bytes to each neighbour."""
    return [[rank(at, {to: 1000 for to in (at - 1, at + 1) if 0 <= to < num})] for at in range(num)]


def test_a_pipeline() -> None:
    job = put_together("J", pipeline())
    profile = job.profile
    assert profile.boundary_bytes == (2000.0, 2000.0, 2000.0) and job.elsewhere_bytes == 0
    assert (profile.micro_batches, profile.iteration_s, profile.checkpoint_every) == (4, 1.0, 10)
    assert [machine.computation_s for machine in profile.machines] == [0.7] * 4
    assert not any(machine.has_replica for machine in profile.machines) and job.takes_checkpoints
    assert {"network_bytes_per_s", "restart_s", "machine_mtbf_hours"} <= set(job.assumed)


def test_what_is_written_is_read_as_a_profile() -> None:
    for nodes in (pipeline(), [[rank(0, checkpoint_every=0, state_bytes=0, iteration_s=0.0, computation_s=0.0)]]):
        job = put_together("J", nodes)
        assert parse(json.dumps(to_file(job))) == job.profile
    one = pipeline()[1][0]
    assert RankMeasured.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_what_ranks_of_one_node_send_each_other_is_apart() -> None:
    nodes = [[rank(0, {1: 5}), rank(1, {2: 7})], [rank(2, {3: 9}), rank(3, {0: 3}, state_bytes=900)]]
    job = put_together("J", nodes)
    assert job.profile.boundary_bytes == (10.0,) and job.profile.gpus_per_machine == 2
    assert [(machine.stages, machine.inside_bytes) for machine in job.profile.machines] == [(2, 5.0), (2, 9.0)]
    assert [machine.state_bytes for machine in job.profile.machines] == [200.0, 1000.0]


def one_node(**changes: object) -> list[list[RankMeasured]]:
    """A pipeline of four stages on it."""
    return [[replace(of_node[0], state_bytes=100, **changes) for of_node in pipeline()]]  # type: ignore[arg-type]


def test_a_pipeline_inside_a_node() -> None:
    job = put_together("J", one_node())
    (machine,), profile = job.profile.machines, job.profile
    assert (machine.stages, machine.inside_bytes, profile.boundary_bytes) == (4, 6000.0, ())
    assert profile.micro_batches == 4 and parse(json.dumps(to_file(job))) == profile
    found = ways(profile, helpers="one worker")
    said = lines(job, found, "log", (), "--helpers N")
    assert said[2] == (
        "  log: 3.8 s for a lost worker; +0.00% without failures; 58.6 KiB on a node: taken; not possible for a "
        "node: messages pass inside nodes only: their logs are lost with them"
    )
    assert said[3].startswith("  log+parallel: 2 s for a lost worker; ") and "; --helpers N; not" in said[3]
    assert not said[4].endswith("taken") and "6.4 KiB" not in said[0]
    never = put_together("J", one_node(checkpoint_every=0))
    said = lines(never, ways(never.profile), "log", ())
    assert said[2].startswith("  log: as long as the job has run, since iteration 0: the script takes no checkpoints")


def test_stages_are_those_that_messages_link() -> None:
    """Parts of one stage, and replicas of it, send each other none."""
    links = {0: {2: 5}, 1: {3: 5}, 2: {0: 5}, 3: {1: 5}}
    (machine,) = put_together("J", [[rank(at, sent) for at, sent in links.items()]]).profile.machines
    assert machine.stages == 2
    assert put_together("J", [[rank(0), rank(1)]]).profile.machines[0].stages == 1


def test_where_waits_are_not_seen_each_stage_of_a_node_counts() -> None:
    profile = put_together("J", one_node(sees_waits=False)).profile
    assert profile.machines[0].computation_s == pytest.approx(4 / 7) and profile.iteration_s == pytest.approx(1.0)


def test_micro_batches_are_those_of_a_schedule_if_there_is_one() -> None:
    nodes = [[replace(one, num_messages=16, micro_batches=4) for one in of_node] for of_node in pipeline(2)]
    assert put_together("J", nodes).profile.micro_batches == 4
    by_hand = [[replace(one, micro_batches=0) for one in of_node] for of_node in nodes]
    assert put_together("J", by_hand).profile.micro_batches == 16


def test_ranks_of_a_node_write_at_the_same_time() -> None:
    """Four of them 1 GB each, in the same second: 4 GB/s of the node, whose bytes are theirs together."""
    gb = 10**9
    nodes = one_node(log_written=(gb, 1.0), log_copied=(gb, 2.0), checkpoint_written=(gb, 1.0), is_all=True)
    profile = put_together("J", [[replace(one, state_bytes=gb) for one in nodes[0]]]).profile
    assert (profile.log_bytes_per_s, profile.store_bytes_per_s, profile.load_s) == (4e9, 2e9, 1.0)
    # Who has little to write does not make the others faster.
    nodes[0][3] = replace(nodes[0][3], log_written=(1000, 1e-6))
    assert put_together("J", nodes).profile.log_bytes_per_s == 3 * gb + 1000


def test_messages_past_the_neighbour_are_told() -> None:
    nodes = [[rank(0, {1: 10})], [rank(1, {2: 10})], [rank(2, {0: 6})]]
    job = put_together("J", nodes)
    assert (job.profile.boundary_bytes, job.elsewhere_bytes) == ((10.0, 10.0), 6.0)


@pytest.mark.parametrize(("replicas", "has"), [((0, 1), False), ((0, 2), True)])
def test_a_replica_counts_on_another_node_only(replicas: tuple[int, ...], has: bool) -> None:
    nodes = [[rank(0, replicas=replicas), rank(1, replicas=(1, 3))], [rank(2), rank(3)]]
    assert put_together("J", nodes).profile.machines[0].has_replica is has


def test_without_pipeline_there_are_no_messages() -> None:
    job = put_together("J", [[rank(0, replicas=(0, 1), checkpoint_every=0)], [rank(1, replicas=(0, 1))]])
    assert job.profile.boundary_bytes == () and job.profile.micro_batches == 1
    found = {way.name: way.impossible for way in ways(job.profile)}
    assert not found["replica"] and "no pipeline" in found["log"]


def test_where_waits_are_not_seen_a_pipeline_is_taken_to_be_full() -> None:
    """However much of an iteration seems to be no computation: there is always some time between two of them."""
    nodes = [[replace(one, computation_s=0.9, sees_waits=False) for one in of_node] for of_node in pipeline()]
    profile = put_together("J", nodes).profile
    # 4 micro-batches through 4 stages: 4 of 7 parts of the time each computes.
    assert profile.machines[0].computation_s == pytest.approx(4 / 7) and profile.iteration_s == pytest.approx(1.0)


def test_nothing_is_put_together_of_nothing() -> None:
    with pytest.raises(ValueError, match="has nodes"):
        put_together("J", [[]])


@pytest.mark.parametrize(
    ("text", "budget"),
    [("20%", Budget(0.2, True)), ("2TiB", Budget(2.0 * (1 << 40), False)), ("0", Budget(0.0, False))],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


def test_a_budget_without_its_unit_is_no_budget() -> None:
    with pytest.raises(ValueError, match="'20' is a few bytes; type 20% of all messages, or 20GiB"):
        parse_budget("20")
    assert parse_budget("4096") == Budget(4096.0, False)


@pytest.mark.parametrize("text", ["", "101%", "2TB", "-1", "a", "1e3", "9" * 400])
def test_no_budgets(text: str) -> None:
    with pytest.raises(ValueError, match="type 500GiB"):
        parse_budget(text)


def profile(num: int = 6) -> Profile:
    return put_together("J", pipeline(num)).profile


@pytest.mark.parametrize(("part", "most"), [(1.0, 6), (0.5, 3), (0.2, 2), (0.1, 1)])
def test_a_part_of_all_messages(part: float, most: int) -> None:
    groups = groups_within(profile(), Budget(part, True))
    assert len(groups) == most and [machine for group in groups for machine in group] == list(range(6))


def test_a_size_is_for_each_node() -> None:
    job = profile()
    everything = groups_within(job, Budget(1e12, False))
    assert [len(group) for group in everything] == [1] * 6
    # A machine with a boundary on each side logs 2000 bytes in an iteration, and 10 of them between two checkpoints.
    groups = groups_within(job, Budget(10_000, False))
    assert len(groups) > 1 and max(sent_bytes(job, machine, groups) for machine in range(6)) <= 1000
    assert groups_within(job, Budget(0, False)) == (range(6),)


def test_a_size_of_a_long_uneven_pipeline_takes_no_minutes() -> None:
    """It is worked out between two events of the coordinator. Trying one total after the other took over 100 s."""
    chosen = random.Random(1)
    machines = tuple(Machine(chosen.uniform(1, 2), 1e9) for _ in range(48))
    boundaries = tuple(chosen.uniform(1e8, 4e8) for _ in range(47))
    job = replace(profile(), machines=machines, boundary_bytes=boundaries, checkpoint_every=100, micro_batches=32)
    began_s = time.perf_counter()
    groups = groups_within(job, Budget(20e9, False))
    assert time.perf_counter() - began_s < 10.0
    assert 1 < len(groups) < 48 and max(sent_bytes(job, machine, groups) for machine in range(48)) * 100 <= 20e9


def test_ways_of_named_groups() -> None:
    job = profile()
    found = {way.name: way for way in ways(job, groups=(range(0, 3), range(3, 6)))}
    assert found["log"].groups == (range(0, 3), range(3, 6)) and found["log"].storage_bytes == 1000 * 10
    assert found["log"].recovery_s > ways(job)[1].recovery_s
    assert "no two groups" in ways(job, groups=(range(6),))[1].impossible


def test_lines_for_people() -> None:
    job = put_together("J", pipeline())
    said = lines(job, ways(job.profile), "log", (range(0, 2), range(2, 4)), "--helpers N")
    assert said[0].startswith("measured: 1 s for an iteration, 100 B of state on a node, 5.86 KiB of messages")
    assert "assumed: a network of 1.16 GiB/s" in said[0]
    assert [line for line in said if line.endswith(": taken")] == [said[2]] and "for two" in said[2]
    assert said[1] == "  replica: not possible: no other node holds what node 0 does"
    assert said[3].endswith("; --helpers N")
    parallel = lines(job, ways(job.profile), "log+parallel", (), "--helpers N")
    assert parallel[3].endswith(": taken") and "--helpers" not in parallel[3]
    assert said[-1].endswith("from the next iteration on: 0-1 2-3")
    forever = put_together("J", [[replace(one, checkpoint_every=0) for one in node] for node in pipeline()])
    assert "since iteration 0: the script takes no checkpoints" in lines(forever, ways(forever.profile), "log", ())[2]


def test_times_and_sizes() -> None:
    said = ["2.1 ms", "3.1 s", "45 s", "2.2 min", "2.2 h"]
    assert [time_of(value) for value in (0.0021, 3.14, 45.0, 130.0, 8000.0)] == said
    assert [size_of(value) for value in (12, 2048, 3 * (1 << 30))] == ["12 B", "2 KiB", "3 GiB"]


def test_groups_of_many_uneven_nodes_are_found_in_time() -> None:
    nodes = [
        [rank(at, {to: 1000 + 37 * (min(at, to) * 7919 % 101) for to in (at - 1, at + 1) if 0 <= to < 200},
              computation_s=0.1 + (at * 31 % 17) / 100)]
        for at in range(200)
    ]  # fmt: skip
    job = put_together("J", nodes).profile
    everything = chain_of(job).log_bytes(alone(chain_of(job)))
    began_s = time.process_time()
    groups = groups_within(job, Budget(0.3, True))
    assert time.process_time() - began_s < 10 and chain_of(job).log_bytes(groups) <= 0.3 * everything
    assert [machine for group in groups for machine in group] == list(range(200))


def test_what_was_measured_is_not_assumed() -> None:
    """The slowest node counts; of too few bytes a time says nothing."""
    each = [
        [replace(one, log_written=(10 << 20, 0.01 * (1 + one.rank)), log_copied=(10 << 20, 0.5), is_all=True,
                 checkpoint_written=(4 << 20, 0.1), checkpoint_still_s=0.002 * one.rank, state_bytes=8 << 20)
         for one in of_node]
        for of_node in pipeline()
    ]  # fmt: skip
    job = put_together("J", each)
    profile = job.profile
    assert profile.log_bytes_per_s == pytest.approx((10 << 20) / 0.04) and profile.checkpoint_s == 0.006
    assert profile.load_s == pytest.approx(0.2) and profile.store_bytes_per_s == pytest.approx(20 << 20)
    assert job.assumed == ("network_bytes_per_s", "restart_s", "replace_s", "machine_mtbf_hours")
    assert parse(json.dumps(to_file(job))) == profile
    said = lines(job, ways(profile), "log", ())[0]
    assert said.endswith(
        ", logs of 250 MiB/s, checkpoints of 40 MiB/s, 6 ms of standing still for one, copies of logs of 20 MiB/s; "
        "assumed: a network of 1.16 GiB/s"
    )
    few = put_together("J", [[replace(one, log_written=(1000, 1.0)) for one in of_node] for of_node in pipeline()])
    assert few.profile.log_bytes_per_s == 2e9 and {"log_bytes_per_s", "checkpoint_s", "load_s"} <= set(few.assumed)


def test_slow_disks_make_logs_and_checkpoints_dearer() -> None:
    def costs(seconds: float) -> dict[str, tuple[float, float]]:
        nodes = [
            [replace(one, log_written=(1 << 20, seconds), checkpoint_written=(1 << 20, seconds), is_all=True,
                     checkpoint_still_s=seconds, state_bytes=64 << 20,
                     sent_bytes=dict.fromkeys(one.sent_bytes, 1 << 28))
             for one in of_node]
            for of_node in pipeline()
        ]  # fmt: skip
        return {way.name: (way.recovery_s, way.cost) for way in ways(put_together("J", nodes).profile)}

    slow, fast = costs(0.1), costs(0.0001)
    assert all(slow[name] > fast[name] and slow[name][1] > fast[name][1] for name in ("log", "checkpoint"))


def test_ranks_of_an_earlier_version_are_read() -> None:
    data = rank(0).to_json()
    for name in ("log_written", "log_copied", "checkpoint_written", "checkpoint_still_s", "is_all"):
        del data[name]
    assert RankMeasured.from_json(data) == rank(0)


def test_replicas_of_a_stage_on_its_node() -> None:
    """A lost worker gets its state from there, whatever is done for a node."""
    nodes = [[rank(2 * at + one, {2 * to + one: 1000 for to in (at - 1, at + 1) if 0 <= to < 3},
                   replicas=(2 * at, 2 * at + 1)) for one in range(2)] for at in range(3)]  # fmt: skip
    profile = put_together("J", nodes).profile
    assert all(machine.has_replica_inside and not machine.has_replica for machine in profile.machines)
    found = {way.name: way for way in ways(profile, helpers="one worker")}
    from_replica_s = profile.replace_s + 100 / profile.network_bytes_per_s + profile.iteration_s / 2
    assert {found[name].worker_s for name in ("replica", "log", "checkpoint")} == {from_replica_s}
    assert found["replica"].impossible and found["log"].recovery_s > from_replica_s
    assert "on each machine another one holds the same" in found["log+parallel"].impossible
    (line,) = (one for one in lines(put_together("J", nodes), tuple(found.values()), "log", ()) if "  replica" in one)
    assert line == "  replica: 750 ms for a lost worker; not possible for a node: no other node holds what node 0 does"
    alone = [[rank(2 * at + one, {2 * at + one + 1: 1000}) for one in range(2)] for at in range(3)]
    found = {way.name: way for way in ways(put_together("J", alone).profile, helpers="one worker")}
    assert found["log+parallel"].worker_s < found["log"].worker_s, "helpers help one rank"
    assert found["log+parallel"].recovery_s == found["log"].recovery_s
