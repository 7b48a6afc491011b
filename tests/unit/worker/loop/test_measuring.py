"""What a rank measures of itself, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from swift_agent.wire import messages as msg
from swift_agent.worker.loop import measuring
from swift_agent.worker.loop.measuring import NUM_MEASURED, SKIPPED, Measuring
from swift_logging_store.log.rate import Rate
from swift_recovery.checkpoint.writer import Cost
from swift_recovery.state.training_state import TrainingState
from swift_recovery.strategy.measured import RankMeasured


class Worker:
    """With messages whose waits take a quarter of a second each, on a clock of its own, and with that *share* of a
    core."""

    def __init__(self, monkeypatch: Any, share: float = 1.0) -> None:
        self.now_s, self.generation = 10.0, 3
        self.told: list[msg.Measured] = []
        monkeypatch.setattr(measuring, "time", SimpleNamespace(
            perf_counter=lambda: self.now_s, thread_time=lambda: self.now_s * share))  # fmt: skip
        self.has_nccl = False
        monkeypatch.setattr(measuring, "groups", SimpleNamespace(has_nccl=lambda: self.has_nccl))
        net = torch.nn.Linear(4, 2)
        self.log = SimpleNamespace(written=Rate(4000, 2.0), copied=None)
        self.messages = SimpleNamespace(meter=None, is_complete=True, log=self.log)
        self.costs: list[Cost] = []
        self.tracked = SimpleNamespace(
            messages=self.messages, pipelines=None, replicas=[1],
            checkpoints=SimpleNamespace(every=7, costs=self.costs),
            state=TrainingState({"net": net}, {"o": torch.optim.SGD(net.parameters(), lr=0.1)}, {}),
        )  # fmt: skip
        self.measuring = Measuring(1, cast(Any, self), cast(Any, self.tracked))

    def send(self, message: msg.Measured) -> None:
        self.told.append(message)

    def iterations(self, num: int, takes_s: float = 1.0) -> None:
        for _ in range(num):
            self.measuring.begin()
            self.now_s += takes_s
            if self.messages.meter is not None:
                self.messages.meter.waited_s += 0.25
                self.messages.meter.sent(2, 600)
                self.messages.meter.sent(2, 400)
                self.messages.meter.sent(0, 100)
            self.measuring.finish()
            self.now_s += 0.5  # between two iterations


class CountsItsCalls:
    """Of a script: what it gives depends on how often it was asked, which nothing but a failure must do."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_what_the_script_tracks_is_not_asked(monkeypatch: Any) -> None:
    worker, other = Worker(monkeypatch), CountsItsCalls()
    net = torch.nn.BatchNorm1d(2)  # two parameters, two buffers of two floats, and a count
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    worker.tracked.state = TrainingState({"net": net}, {"o": optimizer}, {"other": other})
    worker.iterations(20)
    found = RankMeasured.from_json(worker.told[0].measured)
    assert found.state_bytes == 2 * 8 + 2 * 8 + 2 * 8 + 8 and other.calls == 0
    assert found.gradient_bytes == 2 * 8


def test_it_is_told_once(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch)
    worker.iterations(SKIPPED + NUM_MEASURED)
    assert not worker.told
    worker.iterations(20)
    (told,) = worker.told
    assert told.generation == 3 and worker.messages.meter is None
    found = RankMeasured.from_json(told.measured)
    assert found == RankMeasured(
        1, 1.5, 0.75, 10 * 4, (1,), {2: 1000, 0: 100}, 2, 7, True, log_written=(4000, 2.0), gradient_bytes=10 * 4
    )


def test_micro_batches_are_those_of_the_schedule(monkeypatch: Any) -> None:
    """Interleaved stages send more messages than there are micro-batches."""
    worker = Worker(monkeypatch)
    worker.tracked.pipelines = SimpleNamespace(micro_batches=8)
    worker.iterations(20)
    found = RankMeasured.from_json(worker.told[0].measured)
    assert (found.micro_batches, found.num_messages) == (8, 2)


def test_time_in_which_others_have_the_core_does_not_count(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch, share=0.5)
    worker.iterations(20)
    assert RankMeasured.from_json(worker.told[0].measured).computation_s == 0.5


def test_where_a_failure_comes_between_it_begins_again(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch)
    worker.iterations(SKIPPED + NUM_MEASURED)
    worker.generation = 4
    worker.iterations(SKIPPED + NUM_MEASURED)
    assert not worker.told
    worker.iterations(1)
    (told,) = worker.told
    assert told.generation == 4 and worker.messages.meter is None
    assert RankMeasured.from_json(told.measured).sent_bytes == {2: 1000, 0: 100}


def test_who_is_through_measures_again_with_those_that_a_failure_cut(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch)
    worker.iterations(SKIPPED + NUM_MEASURED + 1)
    worker.generation = 4
    worker.iterations(SKIPPED + NUM_MEASURED + 5)
    assert [told.generation for told in worker.told] == [3, 4] and worker.messages.meter is None
    assert worker.told[0].measured == worker.told[1].measured


def test_that_waits_are_not_seen_is_told(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch)
    worker.has_nccl = True
    worker.iterations(SKIPPED + NUM_MEASURED + 1)
    assert RankMeasured.from_json(worker.told[0].measured).sees_waits is False


def test_a_checkpoint_is_told_once_when_there_is_one(monkeypatch: Any) -> None:
    worker = Worker(monkeypatch)
    worker.iterations(SKIPPED + NUM_MEASURED + 5)
    worker.costs.append(Cost(300, 0.5, 0.01))
    worker.iterations(3)
    first, second = (RankMeasured.from_json(told.measured) for told in worker.told)
    assert not first.is_all and second == replace(
        first, checkpoint_written=(300, 0.5), checkpoint_still_s=0.01, is_all=True
    )


def test_iterations_that_take_less_later_count(monkeypatch: Any) -> None:
    """The first ones share the node with standbys that are being made; later ones may have pauses between them."""
    for takes_s, iteration_s in ((0.1, 0.6), (3.0, 1.5)):
        worker = Worker(monkeypatch)
        worker.iterations(SKIPPED + NUM_MEASURED)
        worker.iterations(20, takes_s)
        worker.costs.append(Cost(300, 0.5, 0.01))
        worker.iterations(2, takes_s)
        first, second = (RankMeasured.from_json(one.measured) for one in worker.told)
        assert first.iteration_s == 1.5 and abs(second.iteration_s - iteration_s) < 1e-9


def test_copies_of_logs_are_waited_for_until_the_second_checkpoint(monkeypatch: Any) -> None:
    for copied_bytes, num_needed in ((0, 2), (50, 1)):
        worker = Worker(monkeypatch)
        worker.log.copied = Rate(copied_bytes, 0.1)
        worker.iterations(SKIPPED + NUM_MEASURED + 5)
        for number in (1, 2):
            worker.costs.append(Cost(300, 0.5, 0.01))
            worker.iterations(3)
            assert len(worker.told) == (2 if number >= num_needed else 1)
        assert RankMeasured.from_json(worker.told[-1].measured).log_copied == (copied_bytes, 0.1)


def test_a_job_whose_size_changes_says_where_there_is_no_room_for_its_state(
    monkeypatch: Any, tmp_path: Path
) -> None:
    free = SimpleNamespace(free=2 << 10)
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda path: free)
    notes: list[str] = []
    for kept_in, num in ((str(tmp_path), 39), ("", 39), (str(tmp_path), 60_000)):
        worker = Worker(monkeypatch)
        worker.note = notes.append  # type: ignore[attr-defined]
        worker.tracked.state = TrainingState({"net": torch.nn.Linear(num, 1)}, {}, {})
        worker.measuring = Measuring(1, cast(Any, worker), cast(Any, worker.tracked), kept_in)
        worker.iterations(SKIPPED + NUM_MEASURED + 1)
        worker.costs.append(Cost(3000, 1.5, 0.25))
        worker.iterations(1)
        assert len(worker.told) > 0
    (note,) = notes
    assert note.startswith(f"{tmp_path} has room for 2 KiB, and 234 KiB of state are kept there")
