"""What collectives of real gloo processes gave comes again, bit for bit, from the log of one of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.gloo_job import (  # noqa: F401 - fixtures
    TOKEN,
    Job,
    control,
    make_job,
    native_library,
    nursery,
    rank,
    store_of,
)

LONG = timedelta(seconds=25)
NUM_ITERATIONS = 3


def keep_and_repeat(directory: str) -> dict[str, Any]:
    """Three ranks make collectives; then the last one repeats them alone, with what the first one hands on."""
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    from swift_agent.worker.groups import process_groups
    from swift_agent.worker.messages.messages import Messages
    from swift_recovery.replay import serving
    from swift_recovery.replay.serving import LogServer

    me, groups, meeting = rank(), process_groups.install(), control()
    groups.init_default_group("gloo", store_of(1), 1, me, 3, timeout=LONG, store_token=TOKEN)
    outer = dist.new_group([0, 2])

    def new_messages() -> Messages:
        place = Path(directory) / str(me)
        place.mkdir(exist_ok=True)
        made = Messages(me, place, print)
        made.beginnings.origins = [[0, 0]] * 3
        return made

    def collectives(iteration: int, mine: float) -> list[Any]:
        """All that Python has; *mine* differs from rank to rank, and when they are repeated."""
        generator = torch.Generator().manual_seed(int(1000 * mine) + iteration)
        norm, many, half = (torch.randn(size, generator=generator) for size in (1, 30_000, 16))
        half = half.bfloat16()
        dist.all_reduce(norm)
        work = dist.all_reduce(many, async_op=True)
        assert work is not None
        dist.all_reduce(half, dist.ReduceOp.MAX)
        work.wait()
        later = dist.all_reduce(norm.clone(), async_op=True)
        assert later is not None
        doubled = later.get_future().then(lambda done: 2 * done.value()[0]).wait()
        dist.all_reduce_coalesced([norm, many[:5].clone()])
        whole, parts = torch.zeros(12), [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather_single(whole, torch.randn(4, generator=generator))
        dist.all_gather(parts, torch.tensor([int(100 * mine)]))
        told = torch.randn(5, generator=generator)
        dist.broadcast(told, 1)
        said: list[Any] = [None] * 3
        dist.all_gather_object(said, {"rank": mine})
        names = [f"{mine}", {"iteration": iteration}]
        dist.broadcast_object_list(names, 1)
        dist.barrier()
        tied = torch.randn(7, generator=generator)
        if me != 1:
            dist.all_reduce(tied, group=outer)
        return [norm, many, half, doubled, whole, *parts, told, *([tied] if me != 1 else []), said, names]

    messages = new_messages()
    first = []
    for iteration in range(NUM_ITERATIONS):
        messages.begin(iteration, 1)
        first.append(collectives(iteration, 1.0 + me))
        messages.end()
    server = LogServer(print)
    if me == 0:
        gift = messages.gift(2, NUM_ITERATIONS, [2])
        assert gift is not None
        meeting.set("where", server.serve(2, "127.0.0.1", gift))
    wrong, refused = [], ""
    if me == 2:
        again = new_messages()
        again.take({0: partial(serving.log_of, meeting.get("where").decode(), 0, lambda: False)})
        again.begin_replay([2])
        for iteration in range(NUM_ITERATIONS):
            again.begin(iteration, 2)
            with groups.refused("this one is not kept", among=again.repeating):
                found = collectives(iteration, 77.0)
                try:
                    wait_tensor(all_reduce(torch.zeros(1), "sum", dist.group.WORLD))
                except RuntimeError as error:
                    refused = str(error)
            again.end()
            for number, (one, other) in enumerate(zip(found, first[iteration], strict=True)):
                same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
                wrong += [] if same else [[iteration, number]]
        meeting.set("done", "")
    meeting.get("done")
    server.close()
    return {"wrong": wrong, "refused": "this one is not kept" in refused, "rank": me}


def test_they_come_again_bit_for_bit(make_job: Callable[[str, int], Job], tmp_path: Path) -> None:  # noqa: F811
    job = make_job("native", 3)
    job.open_generation(1)
    found = job.results(job.start_all("keep_and_repeat", directory=str(tmp_path)))
    assert [one["wrong"] for one in found] == [[], [], []]
    assert [one["refused"] for one in found] == [False, False, True]
