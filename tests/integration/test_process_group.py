"""Process groups of real gloo processes: stopped, connected again, with a member replaced, many times."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.gloo_job import (  # noqa: F401 - fixtures
    TOKEN,
    Job,
    control,
    hear,
    make_job,
    native_library,
    nursery,
    rank,
    store_of,
    tell,
    watch,
    world_size,
)

MakeJob = Callable[[str, int], Job]
both = pytest.mark.parametrize("mechanism", ["native", "python"])
SOON_S = 1.0  # far more than the milliseconds that an abort takes, far less than any timeout
LONG = timedelta(seconds=25)


def connect(generation: int, solo: bool = False) -> Any:
    """The default group of the generation, and its watcher."""
    from swift_agent.worker.groups import process_groups as process_group

    groups = process_group.install()
    assert groups.is_native == (os.environ["SWIFT_NATIVE"] == "1")
    watch(groups, generation)
    address = ("", 0) if solo else store_of(generation)
    groups.init_default_group("gloo", address, generation, rank(), world_size(), timeout=LONG, solo=solo,
                              store_token=TOKEN)  # fmt: skip
    return groups


def rebuild(groups: Any, generation: int, timeout: timedelta = LONG) -> None:
    watch(groups, generation)
    groups.rebuild(store_of(generation), generation, timeout, TOKEN)


def total() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def reduce_parts() -> list[list[float]]:
    """What each kind of reduce-scatter leaves on this rank of three, of inputs that differ from rank to rank."""
    import torch
    import torch.distributed as dist

    connect(1)
    mine = torch.arange(12.0).view(6, 2) * (rank() + 1)
    out, later = torch.empty(2, 2), torch.empty(4)
    dist.reduce_scatter_tensor(out, mine)
    work = dist.reduce_scatter_tensor(later, mine.flatten(), op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        parts = [torch.empty(4), torch.empty(1, dtype=torch.int64)]
        dist.reduce_scatter_tensor(parts[0], mine.flatten())
        dist.reduce_scatter_tensor(parts[1], torch.tensor([1, 2, 3]))
    manager.wait()
    return [out.flatten().tolist(), later.tolist(), *(part.tolist() for part in parts)]


@both
def test_a_reduce_scatter_leaves_this_ranks_part(make_job: MakeJob, mechanism: str) -> None:  # noqa: F811
    job = make_job(mechanism, 3)
    job.open_generation(1)
    for number, found in enumerate(job.results(job.start_all("reduce_parts"))):
        part = [float(value) for value in range(4 * number, 4 * number + 4)]
        sums = [6 * value for value in part]
        assert found == [sums, [3 * value for value in part], sums, [3 * (number + 1)]]


# ------------------------------------------------------------------------------------------------ blocked collectives

OPERATIONS = ["all_reduce", "recv", "async", "barrier", "subgroup", "big_send", "backward", "reduce_scatter"]


def block_and_be_freed() -> list[list[Any]]:
    """Everyone but the last rank blocks in each operation in turn; returns (operation, error, when)."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    groups = connect(1)
    pair = dist.new_group([0, 2])
    other = dist.new_group([1, 2])
    model = DDP(torch.nn.Linear(64, 64))
    foreign = socket.create_connection(("127.0.0.1", int(os.environ["TEST_CONTROL"])))
    outcome: list[list[Any]] = []
    for generation, operation in enumerate(OPERATIONS, start=1):
        if generation > 1:
            rebuild(groups, generation)
        assert total() == 6
        if rank() == 2:
            hear(f"abort/{generation}")
            groups.abort("idle rank")
        else:
            subgroup = pair if rank() == 0 else other
            tell(f"blocked/{generation}/{rank()}")
            try:
                if operation == "all_reduce":
                    dist.all_reduce(torch.ones(1 << 16))
                elif operation == "recv":
                    dist.recv(torch.ones(4), 2)
                elif operation == "async":
                    dist.all_reduce(torch.ones(8), async_op=True).wait()
                elif operation == "barrier":
                    dist.barrier()
                elif operation == "subgroup":
                    dist.all_reduce(torch.ones(8), group=subgroup)
                elif operation == "big_send":
                    dist.send(torch.ones(1 << 24), 2)
                elif operation == "reduce_scatter":
                    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(12))
                else:
                    model(torch.ones(2, 64)).sum().backward()
                outcome.append([operation, None, time.time()])
            except RuntimeError as error:
                outcome.append([operation, str(error), time.time()])
        groups.abort("again")  # must change nothing
        hear(f"abort/{generation}")
        deadline_s = time.monotonic() + 5
        while groups.aborted is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match=r"generation|again|idle"):
            groups.check()
        with contextlib.suppress(RuntimeError):
            model.reducer._reset_state()
        refused_s = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(8))
        assert time.monotonic() - refused_s < SOON_S
        assert groups.wait_quiet(timedelta(seconds=10))
    foreign.sendall(b"\0")  # not shut down
    foreign.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        assert foreign.recv(1) != b"", "a foreign socket was closed"
    return outcome


@both
def test_abort_frees_every_blocked_operation(make_job: MakeJob, mechanism: str) -> None:  # noqa: F811
    job = make_job(mechanism, 3)
    for generation in range(1, len(OPERATIONS) + 1):
        job.open_generation(generation)
    workers = job.start_all("block_and_be_freed")
    aborted_s = []
    for generation in range(1, len(OPERATIONS) + 1):
        job.wait_for(f"blocked/{generation}/0", f"blocked/{generation}/1")
        time.sleep(0.1)  # not needed for the result: lets them really be inside
        aborted_s.append(job.abort(generation))
    latencies_ms = []
    for outcome in job.results(workers)[:2]:
        assert [operation for operation, _, _ in outcome] == OPERATIONS
        for (operation, error, at_s), since_s in zip(outcome, aborted_s, strict=True):
            assert error is not None, f"{operation} was not interrupted"
            assert since_s <= at_s < since_s + SOON_S, f"{operation} took {at_s - since_s:.3f} s: {error}"
            latencies_ms.append((at_s - since_s) * 1e3)
    print(f"{mechanism}: freed after {statistics.median(latencies_ms):.1f} ms (max {max(latencies_ms):.1f})")


def meet(client: Any, round: int) -> None:
    """A barrier of three ranks that uses no process group."""
    if client.add(f"round/{round}", 1) == 3:
        client.set(f"go/{round}", "")
    client.get(f"go/{round}")


def be_cut_in_full_traffic(rounds: int) -> list[float]:
    """Abort at a random moment while operations of all sizes are under way; returns seconds until freed."""
    import random

    import torch
    import torch.distributed as dist

    groups = connect(1)
    address, meeting = store_of(1), control()
    longest_s = []
    for round in range(rounds):
        meet(meeting, round)  # all are connected before anyone cuts: else this would test how connecting fails
        same = random.Random(round)  # what all ranks must agree on
        cut_at_s = [0.0]

        def cut(after_s: float = same.random() * 0.02, cut_at_s: list[float] = cut_at_s, at: int = round + 1) -> None:
            time.sleep(after_s)
            groups.abort("cut", at)
            cut_at_s[0] = time.monotonic()

        cutter = threading.Thread(target=cut)
        cutter.start()
        with pytest.raises(RuntimeError):
            while True:
                size = 1 << same.randrange(2, 18)
                works = [dist.all_reduce(torch.ones(size), async_op=True) for _ in range(4)]
                works.append(dist.isend(torch.ones(size), (rank() + 1) % 3))
                works.append(dist.irecv(torch.ones(size), (rank() + 2) % 3))
                for work in works:
                    work.wait()
        cutter.join()
        longest_s.append(time.monotonic() - cut_at_s[0])
        assert groups.wait_quiet(timedelta(seconds=10))
        groups.rebuild(address, round + 2, LONG, TOKEN)
    assert total() == 6
    return longest_s


def test_abort_frees_natively_in_full_traffic(make_job: MakeJob) -> None:  # noqa: F811
    """gloo forgets some of the waiting threads when connections break (see native/forward.cpp)."""
    job = make_job("native", 3)
    job.open_generation(1)
    for longest_s in job.results(job.start_all("be_cut_in_full_traffic", rounds=60)):
        assert max(longest_s) < SOON_S
        print(f"freed after {statistics.median(longest_s) * 1e3:.1f} ms, max {max(longest_s) * 1e3:.1f}")


# ------------------------------------------------------------------------------------------------ replacement


def set_up_and_die_or_live(generation: int, solo: bool = False) -> dict[str, Any]:
    """A script's set-up with several groups; then failure 1 (rank 2 killed), failure 2 while connecting, recovery."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP

    from swift_agent.worker.groups import process_groups as process_group

    report: dict[str, Any] = {}
    groups = connect(generation, solo)
    backend = dist.get_backend(), dist.get_backend_config()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = DDP(torch.nn.Linear(8, 8))
    assert backend == ("gloo", "cpu:gloo,cuda:gloo")
    assert dist.get_world_size() == 4 and dist.get_rank() == rank()

    dist.new_group(backend="gloo").monitored_barrier()  # Fabric's rank_zero_first() in a replacement's set-up

    def sums() -> list[float]:
        """One sum per group, so that each is known to connect the right ranks."""
        out = []
        for group in (None, pairs[rank() // 2], mesh.get_group("replicate"), mesh.get_group("shard")):
            tensor = torch.tensor([float(10 ** rank())])
            dist.all_reduce(tensor, group=group)
            out.append(tensor.item())
        return out

    if not solo:
        report["before"] = sums()
        tell(f"ready/{rank()}")
        with pytest.raises(RuntimeError):
            while True:
                dist.all_reduce(torch.ones(1000))
        hear("abort/1")
        while groups.aborted is None:
            time.sleep(0.001)
        model.reducer._reset_state()
        with groups.dry_run():
            assert total() == rank() + 1
            dist.barrier()
            dist.monitored_barrier()  # torch's fake backend has none
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4))
        # Rank 2 is missing: this blocks until the test says that generation 2 has failed too.
        tell(f"connecting/{rank()}")
        with pytest.raises(process_group.GroupsAborted, match="generation 2 has failed"):
            rebuild(groups, 2)
        report["freed_s"] = time.time()
        with pytest.raises(process_group.GroupsAborted):
            groups.rebuild(store_of(2), 2, LONG)  # a failed generation stays failed
    rebuild(groups, 3)
    report["after"] = sums()
    report["ints"] = groups.all_gather_ints([rank(), -(1 << 40) * rank()])
    after = dist.new_group([1, 2, 3])
    if rank() > 0:
        tensor = torch.tensor([float(10 ** rank())])
        dist.all_reduce(tensor, group=after)
        report["new_group"] = tensor.item()
    model(torch.ones(2, 8)).sum().backward()
    report["gradient"] = model.module.weight.grad.sum().item()
    report["world"] = [type(dist.group.WORLD).__name__, dist.get_backend(), dist.group.WORLD.group_name]
    dist.barrier()
    dist.destroy_process_group()
    return report


@both
def test_replacement_joins_after_two_failures(make_job: MakeJob, mechanism: str) -> None:  # noqa: F811
    job = make_job(mechanism, 4)
    for generation in (1, 2, 3):
        job.open_generation(generation)
    workers = job.start_all("set_up_and_die_or_live", generation=1)
    job.wait_for(*(f"ready/{one}" for one in range(4)))
    workers[2].kill()
    job.abort(1)
    job.wait_for("connecting/0", "connecting/1", "connecting/3")
    time.sleep(0.1)  # not needed for the result: lets them really be inside
    second_s = job.abort(2)
    workers[2] = job.start("set_up_and_die_or_live", rank=2, generation=1, solo=True)
    reports = job.results(workers)
    sums = {0: [1111, 11, 101, 11], 1: [1111, 11, 1010, 11], 2: [1111, 1100, 101, 1100], 3: [1111, 1100, 1010, 1100]}
    for one, report in enumerate(reports):
        assert report["after"] == sums[one]
        assert report["ints"] == [[rank, -(1 << 40) * rank] for rank in range(4)]
        assert report["world"] == ["ProcessGroup", "gloo", "0"]
        assert report["gradient"] == reports[0]["gradient"]
        if one != 2:
            assert report["before"] == sums[one]
            assert second_s <= report["freed_s"] < second_s + SOON_S
        if one > 0:
            assert report["new_group"] == 1110


# ------------------------------------------------------------------------------------------------ odds and ends


def new_group_without_partner() -> list[str]:
    import torch
    import torch.distributed as dist

    from swift_agent.worker.groups import process_groups as process_group

    groups = connect(1)
    names = [dist.new_group([0, 1]).group_name]
    tell(f"creating/{rank()}")
    if rank() == 0:
        with pytest.raises(process_group.GroupsAborted):
            dist.new_group([0, 1])
    else:
        hear("abort/1")
        groups.abort("1")
    assert not torch.distributed.distributed_c10d._world.pg_names.keys() - set(
        [dist.group.WORLD, *(group.pg for group in groups._groups)]
    )
    with pytest.raises(process_group.GroupsAborted):
        dist.new_group([0, 1])
    rebuild(groups, 2)
    made = dist.new_group([0, 1])
    dist.barrier(group=made)
    split = dist.split_group(split_ranks=[[0, 1]])
    dist.barrier(group=split)
    names.append(made.group_name)
    started_s = time.monotonic()
    if rank() == 0:
        with pytest.raises(process_group.RebuildFailed, match=r"group '0' \(all 2 ranks"):
            groups.rebuild(store_of(3), 3, timedelta(seconds=0.3), TOKEN)
        assert time.monotonic() - started_s < 2
        tell("gave up")
    hear("gave up")
    rebuild(groups, 4)
    dist.barrier(group=split)
    groups.abort("future", generation=6)
    with pytest.raises(process_group.GroupsAborted, match=r"future|failed already"):
        groups.rebuild(store_of(4), 5, LONG)
    with pytest.raises(ValueError, match="cannot be connected again"):
        dist.new_group([0, 1], backend="ucc")
    return names


@both
def test_a_group_that_cannot_be_created_leaves_nothing(make_job: MakeJob, mechanism: str) -> None:  # noqa: F811
    job = make_job(mechanism, 2)
    for generation in (1, 2, 3, 4):
        job.open_generation(generation)
    workers = job.start_all("new_group_without_partner")
    job.wait_for("creating/0", "creating/1")
    job.abort(1)
    names = job.results(workers)
    # The failed creation must not have moved the counter from which all ranks draw names.
    assert names == [["1", "2"], ["1", "2"]]


def meet_late() -> dict[str, Any]:
    """The last rank comes when the others would have given up; then again, and is not waited for any more."""
    from swift_agent.worker.groups import connecting
    from swift_agent.worker.groups import process_groups as process_group

    connecting._TELL = timedelta(seconds=0.4)
    groups, notes, short, meeting = connect(1), [], timedelta(seconds=1), control()
    meet(meeting, 0)  # nobody cuts what another still uses
    groups.abort("1")
    if rank() == 2:
        time.sleep(1.5)
    groups.rebuild(store_of(2), 2, short, TOKEN, meets=notes.append)
    result = total()
    meet(meeting, 1)
    groups.abort("2")
    if rank() == 2:
        hear("cut/0")
        hear("cut/1")
        return {"notes": notes, "total": result, "took_s": 0.0}
    threading.Timer(0.5, lambda: groups.abort("nobody else comes", 3)).start()
    began_s = time.monotonic()
    with pytest.raises(process_group.GroupsAborted, match="nobody else comes"):
        groups.rebuild(store_of(3), 3, short, TOKEN, meets=notes.append)
    took_s = time.monotonic() - began_s
    tell(f"cut/{rank()}")
    return {"notes": notes, "total": result, "took_s": took_s}


@both
def test_all_ranks_meet_before_they_connect(make_job: MakeJob, mechanism: str) -> None:  # noqa: F811
    """However late one of them comes: one of the others says for whom they wait."""
    job = make_job(mechanism, 3)
    for generation in (1, 2, 3):
        job.open_generation(generation)
    found = job.results(job.start_all("meet_late"))
    assert [one["total"] for one in found] == [6.0] * 3
    assert all(0.4 < one["took_s"] < 5.0 for one in found[:2])
    assert not found[1]["notes"] and not found[2]["notes"]
    assert len(found[0]["notes"]) >= 3 and set(found[0]["notes"]) == {
        "ranks 2 have not come yet, all others wait for them"
    }


def usage() -> list[int]:
    """Threads, open files, Python threads."""
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()]


def settled_usage() -> list[int]:
    """Once what is being released in the background has gone: Python lists a thread no more while it still ends, so
    that the numbers have to stay the same for a while."""
    deadline_s = time.monotonic() + 5
    seen, since_s = usage(), time.monotonic()
    while time.monotonic() < min(since_s + 0.1, deadline_s) or (
        any(thread.name == "swift-release" for thread in threading.enumerate()) and time.monotonic() < deadline_s
    ):
        time.sleep(0.01)
        if usage() != seen:
            seen, since_s = usage(), time.monotonic()
    return seen


def rebuild_often(rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    groups = connect(1)
    pair = dist.new_group([0, 1]) if rank() < 2 else dist.new_group([0, 1]) and None
    swaps = [groups.swaps_left]
    used, took_ms = [], []
    address, meeting = store_of(2), control()
    for round in range(rounds):
        assert total() == 6
        if pair is not None:
            dist.all_reduce(torch.ones(4), group=pair)
        meet(meeting, round)  # nobody cuts what another still uses
        groups.abort("next round")
        assert groups.wait_quiet(timedelta(seconds=10))
        started_s = time.perf_counter()
        groups.rebuild(address, round + 2, LONG, TOKEN)
        took_ms.append((time.perf_counter() - started_s) * 1e3)
        swaps.append(groups.swaps_left)
        if round in (5, rounds - 1):
            used.append(settled_usage())
    assert total() == 6
    return {"usage": used, "took_ms": took_ms, "swaps": swaps}


def test_fifty_rebuilds_do_not_grow_natively(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("native", 3)
    job.open_generation(1)
    job.open_generation(2)
    for report in job.results(job.start_all("rebuild_often", rounds=50)):
        assert set(report["swaps"]) == {None}
        early, late = report["usage"]
        assert all(a <= b for a, b in zip(late, early, strict=True)), f"threads, open files: {early}, later {late}"
        print(f"rebuild: median {statistics.median(report['took_ms']):.1f} ms, max {max(report['took_ms']):.1f}")


def test_swaps_are_counted_in_python(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("python", 3)
    job.open_generation(1)
    job.open_generation(2)
    for report in job.results(job.start_all("rebuild_often", rounds=5)):
        first = report["swaps"][0]
        assert first > 150 and report["swaps"] == [first - used for used in range(6)]
