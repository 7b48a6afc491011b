"""Real gloo processes whose connections are cut again and again in the middle of one iteration, and who stay in it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.asked import Asked
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
NUM_OPERATIONS = 60


def exchange_and_be_cut(num_iterations: int, num_cuts: int, directory: str) -> dict[str, Any]:
    """Each of three ranks sends to the next one, in two groups and with two tags; waits come in any order, those for
    sends among them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from swift_agent.errors import UsageError
    from swift_agent.worker.groups import process_groups
    from swift_agent.worker.messages.messages import Messages

    me, groups, meeting = rank(), process_groups.install(), control()
    groups.init_default_group("gloo", store_of(1), 1, me, 3, timeout=LONG, store_token=TOKEN)
    pairs = [None, dist.new_group([2, 1, 0])]
    (Path(directory) / str(me)).mkdir()
    in_place = Asked()
    messages = Messages(me, Path(directory) / str(me), print, in_place=in_place)
    generation, until = 1, 1
    cutters: list[threading.Thread] = []

    def meet() -> None:
        if meeting.add(f"round/{generation}", 1) == 3:
            meeting.set(f"go/{generation}", "")
        meeting.get(f"go/{generation}")

    def cut_soon() -> None:
        """All at about the same time, which differs from generation to generation."""
        meet()
        after_s, at = random.Random(generation).random() * 0.02, generation
        cutters.append(threading.Thread(target=lambda: (time.sleep(after_s), groups.abort("cut", at))))
        cutters[-1].start()

    def stays(error: Exception | None) -> bool:
        nonlocal generation
        cutters[-1].join()
        assert groups.wait_quiet(timedelta(seconds=10))
        generation += 1
        with messages.aside():
            groups.rebuild(store_of(1), generation, LONG, TOKEN)
            store = PrefixStore(f"told/{generation}", groups.store)
            store.set(str(me), json.dumps(messages.told(iteration)))
            told = {other: json.loads(store.get(str(other))) for other in range(3) if other != me}
            messages.rejoin(told, (), iteration, generation)
        if generation < until:
            cut_soon()
        return True

    # What is cut is so by `cut_soon`: on the last connections of an iteration nothing may be.
    in_place.when_stays, in_place.when_cut = stays, lambda error: generation < until
    wrong, num_received, done = [], 0, []
    for iteration in range(num_iterations):
        messages.begin(iteration, generation)
        until = generation + num_cuts
        cut_soon()
        same, own = random.Random(iteration), random.Random(3 * iteration + me)
        sends: list[tuple[Any, torch.Tensor]] = []
        waiting: list[tuple[Any, torch.Tensor, float]] = []
        for number in range(NUM_OPERATIONS):
            group, tag, size = pairs[same.randrange(2)], same.randrange(2), 1 << same.randrange(2, 17)
            sent = torch.full((size,), 1000.0 * iteration + number + 0.1 * me)
            sends.append((dist.isend(sent, (me + 1) % 3, group=group, tag=tag), sent))
            received = torch.zeros(size)
            expected = 1000.0 * iteration + number + 0.1 * ((me - 1) % 3)
            waiting.append((dist.irecv(received, (me - 1) % 3, group=group, tag=tag), received, expected))
            time.sleep(0.0005)
            if own.random() < 0.3:
                sends.pop(own.randrange(len(sends)))[0].wait()
            while waiting and own.random() < 0.5:
                work, received, expected = waiting.pop(own.randrange(len(waiting)))
                work.wait()
                num_received += 1
                if not torch.equal(received, torch.full_like(received, expected)):
                    wrong.append([iteration, expected, received[0].item()])
                done.append(received.fill_(-1.0))
                waiting = [one for one in waiting if one[0] is not work]
        for work, received, expected in waiting:
            work.wait()
            num_received += 1
            if not torch.equal(received, torch.full_like(received, expected)):
                wrong.append([iteration, expected, received[0].item()])
        for work, _ in sends:
            work.wait()
        while generation < until:
            stays(None)
        # What has come must not be received into once more.
        wrong += [[iteration, -1.0, tensor[0].item()] for tensor in done if bool((tensor != -1.0).any())]
        assert not messages.unwinds()
        dist.all_reduce(torch.zeros(1))
        assert "collective" in messages.unwinds()
        messages.refuse_collectives()
        try:
            dist.all_reduce(torch.zeros(1))
            wrong.append([iteration, 0.0, 0.0])
        except RuntimeError as error:
            assert messages.refusal(error)
        with messages.aside():
            dist.all_reduce(torch.zeros(1))
        messages.end()
    agree = messages.agreeing(lambda: None)
    refused = []
    for compiled in ("never", "before the update", "after it"):
        messages.begin(num_iterations, generation)
        sent, received = torch.zeros(3), torch.zeros(3)
        thread = threading.Thread(target=lambda sent=sent: dist.send(sent, (me + 1) % 3))
        thread.start()
        dist.recv(received, (me - 1) % 3)
        thread.join()
        with messages.aside():
            works = [dist.isend(sent, (me + 1) % 3), dist.irecv(received, (me - 1) % 3)]
            assert all(work is not None and work.wait() for work in works)
        group = dist.group.WORLD.boxed()  # type: ignore[union-attr]
        try:
            if compiled == "after it":
                agree()
            if compiled != "never":
                work = torch.ops.c10d.send([sent], group, (me + 1) % 3, 5)
                torch.ops.c10d.recv_([received], group, (me - 1) % 3, 5).wait()
                work.wait()
            if compiled != "after it":
                agree()
            messages.end()
            messages.begin(num_iterations + 1, generation)
        except UsageError as error:
            refused.append([compiled, str(error)[:58]])
            messages.rewind()
    return {"wrong": wrong, "received": num_received, "cuts": generation - 1, "refused": refused}


def test_messages_come_once_and_in_order_whatever_is_cut(make_job: Callable[[str, int], Job], tmp_path: Path) -> None:  # noqa: F811
    job = make_job("native", 3)
    job.open_generation(1)
    logs = tmp_path / "logs"
    logs.mkdir()
    for found in job.results(job.start_all("exchange_and_be_cut", num_iterations=6, num_cuts=4, directory=str(logs))):
        refused = found.pop("refused")
        assert found == {"wrong": [], "received": 6 * NUM_OPERATIONS, "cuts": 24}
        why = "2 sends or receives of an iteration were made by C++ code "
        assert refused == [["before the update", why], ["after it", why]]
