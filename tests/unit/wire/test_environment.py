"""The environment of a worker. That it is torchrun's is tested with a real torchrun among the integration tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_agent.wire.channel import ENV_SOCKET
from swift_agent.wire.environment import (
    ENV_COMPUTED,
    ENV_GENERATION,
    ENV_HELPER,
    ENV_LOCAL_RANK,
    ENV_LOG_STORE,
    ENV_MESSAGE_LOG,
    ENV_MESSAGE_LOG_BYTES,
    ENV_NODES,
    ENV_PARALLEL_SUM,
    ENV_RUN,
    ENV_SIZES,
    ENV_STARTED,
    NO_AGENT,
    Placement,
    WorkerEnvironment,
    helped_by,
    helper_number,
    read_worker_env,
    run_name,
    share_of,
    worker_env,
)

PLACE = Placement(slot=2, num_slots=4, num_workers=8, role="trainer", run_id="gpt", master_addr="10.0.0.7",
                  master_port=4711, restart_count=1, max_restarts=3, generation=6, socket_path="/run/agent.sock")


def test_ranks_belong_to_slots() -> None:
    env = worker_env(PLACE, 5, {})
    assert {k: env[k] for k in ("RANK", "ROLE_RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE",
                                "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")} == {
        "RANK": "21", "ROLE_RANK": "21", "LOCAL_RANK": "5", "GROUP_RANK": "2", "WORLD_SIZE": "32",
        "ROLE_WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}
    everyone = [worker_env(replace(PLACE, slot=s), r, {})["RANK"] for s in range(4) for r in range(8)]
    assert everyone == [str(rank) for rank in range(32)]


def test_only_workers_of_a_range_are_told_of_it() -> None:
    assert ENV_SIZES not in worker_env(PLACE, 0, {})
    assert worker_env(replace(PLACE, sizes="2:4"), 0, {})[ENV_SIZES] == "2:4"


def test_how_many_workers_each_node_has() -> None:
    assert ENV_NODES not in (even := worker_env(PLACE, 0, {ENV_NODES: "7"}))
    assert read_worker_env(even).nodes == (PLACE.num_workers,) * PLACE.num_slots
    assert read_worker_env(worker_env(replace(PLACE, nodes=(2, 1, 3)), 0, {})).nodes == (2, 1, 3)


def test_a_worker_reads_what_it_was_told() -> None:
    first = WorkerEnvironment(
        rank=21, world_size=32, number=5, node=2, nodes=(8,) * 4, num_local=8, run_id="gpt", restart_count=1,
        generation=6, socket_path="/run/agent.sock",
    )  # fmt: skip
    stale = {ENV_STARTED: "1.5", ENV_SIZES: "2:4", ENV_HELPER: "1"}  # of a job that this one is part of
    assert read_worker_env(worker_env(PLACE, 5, stale)) == first
    assert (first.directory, first.speaks_for_node) == ("/run", False)
    full = replace(
        PLACE, nodes=(4, 8, 8), run="e17", sizes="2:4", message_log="/disk", message_log_bytes=800, log_store="s3://b",
        parallel_sum="ordered", injects=True, computed=("AVX2",) * 8, first_rank=12, world_size=20,
    )  # fmt: skip
    told = read_worker_env({**worker_env(full, 5, {}), ENV_STARTED: "2.5"})
    assert told == WorkerEnvironment(
        rank=17, world_size=20, number=5, node=2, nodes=(4, 8, 8), num_local=8, run_id="gpt", run="e17",
        restart_count=1, generation=6, started_s=2.5, socket_path="/run/agent.sock", sizes="2:4", message_log="/disk",
        message_log_bytes=100, log_store="s3://b", parallel_sum="ordered", injection="/run", computed="AVX2",
    )  # fmt: skip
    number = helper_number(2, 0)
    helper = read_worker_env(worker_env(full, number, {}))
    assert (helper.rank, helper.number, helper.share, helper.speaks_for_node) == (12, number, 2, False)
    assert read_worker_env(worker_env(full, 0, {})).speaks_for_node


def test_a_process_that_no_agent_has_started_speaks_for_itself() -> None:
    alone = NO_AGENT
    assert alone.speaks_for_node and (alone.rank, alone.world_size, alone.nodes) == (0, 1, (1,))
    assert (alone.directory, alone.message_log, alone.sizes, alone.injection) == ("", "", "", "")


def test_workers_of_a_node_share_what_logs_may_take() -> None:
    env = worker_env(replace(PLACE, message_log="/disk", message_log_bytes=801), 3, {})
    assert (env[ENV_MESSAGE_LOG], env[ENV_MESSAGE_LOG_BYTES]) == ("/disk", "100")
    assert ENV_MESSAGE_LOG_BYTES not in worker_env(PLACE, 0, {ENV_MESSAGE_LOG_BYTES: "5"})


def test_where_logs_are_copied_to() -> None:
    assert worker_env(replace(PLACE, log_store="s3://b/logs"), 3, {})[ENV_LOG_STORE] == "s3://b/logs"
    assert ENV_LOG_STORE not in worker_env(PLACE, 0, {ENV_LOG_STORE: "s3://of/another"})


def test_what_a_rank_was_computed_with() -> None:
    assert ENV_COMPUTED not in worker_env(PLACE, 1, {ENV_COMPUTED: "of another job"})
    known = replace(PLACE, computed=("AVX2", "AVX512"))
    assert worker_env(known, 1, {})[ENV_COMPUTED] == "AVX512"
    assert ENV_COMPUTED not in worker_env(known, helper_number(1, 1), {}), "it is compared with whom it helps"


def test_a_helper_has_the_environment_of_the_worker_that_it_helps() -> None:
    number = helper_number(2, 5)
    assert (share_of(number), helped_by(number)) == (2, 5) and number not in range(PLACE.num_workers)
    worker, helper = worker_env(PLACE, 5, {ENV_HELPER: "9"}), worker_env(PLACE, number, {})
    assert ENV_HELPER not in worker and worker[ENV_LOCAL_RANK] == "5"
    assert helper == {**worker, ENV_HELPER: "2", ENV_LOCAL_RANK: str(number)}
    assert (share_of(5), helped_by(5)) == (0, 5)


def test_how_shares_are_put_together_is_told_where_there_may_be_helpers() -> None:
    assert ENV_PARALLEL_SUM not in worker_env(PLACE, 0, {ENV_PARALLEL_SUM: "ordered"})
    assert worker_env(replace(PLACE, parallel_sum="unordered"), 0, {})[ENV_PARALLEL_SUM] == "unordered"


def test_runs_of_a_job_have_an_order() -> None:
    """By etcd's revision, or by the clock of the only node where etcd is new each time."""
    assert (run_name(17, None), run_name(17, 1.5)) == ("e17", "t1500")
    assert worker_env(replace(PLACE, run="e17"), 0, {ENV_RUN: "e3"})[ENV_RUN] == "e17"


def test_the_rest_of_what_torchrun_sets() -> None:
    env = worker_env(PLACE, 0, {})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["ROLE_NAME"]) == ("10.0.0.7", "4711", "trainer")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")
    assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("gpt", "True")
    assert (env[ENV_SOCKET], env[ENV_GENERATION]) == ("/run/agent.sock", "6")
    assert all(isinstance(value, str) for value in env.values())


def test_what_is_inherited_stays_but_a_stale_rank_does_not() -> None:
    inherited = {"PATH": "/bin", "RANK": "99", "OMP_NUM_THREADS": "3"}
    env = worker_env(PLACE, 0, inherited)
    assert (env["PATH"], env["OMP_NUM_THREADS"], env["RANK"]) == ("/bin", "3", "16")
    assert inherited["RANK"] == "99"


def test_error_handling_of_nccl_is_on_unless_the_user_says_otherwise() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert worker_env(PLACE, 0, {})[name] == "1"
    assert worker_env(PLACE, 0, {name: "3"})[name] == "3"


def test_virtual_local_rank_gives_each_worker_one_device() -> None:
    place = replace(PLACE, virtual_local_rank=True)
    env = worker_env(place, 1, {"CUDA_VISIBLE_DEVICES": "4, GPU-abc,6"})
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["RANK"]) == ("0", "GPU-abc", "17")
    assert worker_env(place, 7, {})["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(ValueError, match="local rank 3 has no device: CUDA_VISIBLE_DEVICES=0,1"):
        worker_env(place, 3, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "CUDA_VISIBLE_DEVICES" not in worker_env(PLACE, 3, {})
