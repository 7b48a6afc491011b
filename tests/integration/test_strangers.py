"""Who is no member connects to the ports of process groups while they are made: nothing comes of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import pytest

from tests.support.gloo_job import (  # noqa: F401 - fixtures
    TOKEN,
    Job,
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
SOON_S = 1.0


def connect_late() -> float:
    """The last rank comes once strangers have connected to the others; seconds until a collective that waits is cut."""
    import torch
    import torch.distributed as dist

    from swift_agent.worker.groups import process_groups

    groups = process_groups.install()
    watch(groups, 1)
    if rank() == world_size() - 1:
        hear("strangers are there")
    timeout = timedelta(seconds=30)
    groups.init_default_group("gloo", store_of(1), 1, rank(), world_size(), timeout=timeout, store_token=TOKEN)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world_size()
    tell(f"connected/{rank()}")
    if rank() == world_size() - 1:
        hear("abort/1")
        return 0.0
    with pytest.raises(RuntimeError):
        dist.all_reduce(tensor)  # the last rank never comes
    cut_s = time.time() - float(hear("abort/1"))
    assert groups.wait_quiet(timedelta(seconds=10))
    return cut_s


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03"])
def test_a_stranger_at_a_port_of_gloo_is_no_member(make_job: MakeJob, said: bytes) -> None:  # noqa: F811
    job = make_job("native", 3)
    job.open_generation(1)
    workers = job.start_all("connect_late")
    waiting = workers[:2]
    strangers: list[socket.socket] = []
    deadline_s = time.monotonic() + 30
    try:
        for worker in waiting:
            listening: list[tuple[str, int]] = []
            while not listening and time.monotonic() < deadline_s:
                found = psutil.Process(worker.pid).net_connections("tcp")
                listening = [tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN]
            for address in listening:
                for _ in range(3):
                    strangers.append(socket.create_connection(address, timeout=5))
                    strangers[-1].sendall(said)
        assert len(strangers) >= 6
        job.control.set("strangers are there", "1")
        job.wait_for("connected/0", "connected/1", "connected/2")
        job.abort(1)
        assert max(job.results(workers)) < SOON_S
    finally:
        for one in strangers:
            one.close()
