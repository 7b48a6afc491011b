"""What iterations are given: kept where a successor finds it, compared; refused where no replacement would have it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.wire.given import NUM_SLOTS, Given, GivenPage, fingerprint, fingerprint_of_indices
from swift_agent.worker.data.batches import Batches, Looping, Passes
from swift_agent.worker.data.draws import Draws
from swift_agent.worker.data.given_again import GivenAgain
from swift_agent.worker.data.inputs import Inputs
from swift_agent.worker.data.made_before import MadeBefore
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Position, Units
from swift_agent.worker.tracked.seeds import Seeds


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    names: list[str] = dataclasses.field(default_factory=list)


def page(directory: Path, *, is_replacement: bool = False) -> Given:
    return Given(GivenPage(directory / "given.0", is_replacement=is_replacement))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(5000), torch.cat([torch.zeros(2500), torch.ones(2500)])),
        ({"x": torch.zeros(2), "y": 1}, {"x": torch.zeros(2), "y": 2}),
        (["a text"], ["another"]),
        (Sample(torch.zeros(2)), Sample(torch.ones(2))),
        ([Sample(torch.zeros(2), ["a"])], [Sample(torch.zeros(2), ["b"])]),
        (deque([torch.zeros(2)]), deque([torch.ones(2)])),
        (numpy.zeros(4), numpy.ones(4)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_other_data_has_another_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other) and fingerprint(one) == fingerprint(one)


def test_anything_has_a_fingerprint() -> None:
    tensors = [torch.zeros(0), torch.tensor(1.0), torch.zeros(3, 4).t(), torch.eye(2).to_sparse()]
    others = [numpy.array("text"), numpy.array([object()]), torch.zeros(2, device="meta"), [1] * 99, None, object(), []]
    kinds = [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag]
    kinds += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=one) for one in (None, torch.jagged)]
    for value in [*tensors, *others, *kinds]:
        fingerprint(value)
    complex_ones = torch.full((2,), 1 + 1j)
    assert fingerprint(complex_ones.conj()) != fingerprint(complex_ones), "its numbers count, not how they are kept"
    assert fingerprint(complex_ones.conj()) == fingerprint(complex_ones.conj().resolve_conj())


def test_what_is_a_part_of_itself_has_a_fingerprint() -> None:
    sample, batch = Sample(torch.zeros(2)), list[Any]()
    sample.x = sample  # type: ignore[assignment]  # a node of a graph names its parent
    batch.append(batch)
    for value in (sample, batch, {"batch": batch}):
        assert fingerprint(value) == fingerprint(value)
        GivenAgain(lambda _: False).begin(value)


def test_a_successor_is_given_the_same_or_told(tmp_path: Path) -> None:
    first = page(tmp_path)
    for iteration in range(NUM_SLOTS + 3):
        first.begin(iteration)
        assert first.add(torch.full((4,), iteration)) and first.add("second")
    again = page(tmp_path, is_replacement=True)
    last = NUM_SLOTS + 2
    again.begin(last)
    assert again.add(torch.full((4,), last)) and again.add("second") and again.add("more than that is not known")
    again.begin(last - 1)
    assert again.add(torch.full((4,), 0)), "of what was given in two parts, the first alone says nothing"
    assert not again.add("second")
    again.begin(0)
    assert again.add("forgotten long ago")
    third = page(tmp_path, is_replacement=True)
    third.begin(last - 1)
    third.add(torch.full((4,), last - 1))
    assert third.add("second"), "who was told that it differs leaves nothing"
    fresh = page(tmp_path)
    fresh.begin(last)
    assert fresh.add("all began again")


def test_a_write_that_was_cut_is_nothing(tmp_path: Path) -> None:
    first = page(tmp_path)
    first.begin(3)
    first.add(1)
    content = bytearray((tmp_path / "given.0").read_bytes())
    content[3 * 56 + 41] ^= 1
    (tmp_path / "given.0").write_bytes(content)
    again = page(tmp_path, is_replacement=True)
    again.begin(3)
    assert again.add(2)


def test_what_was_given_in_another_pass_or_run_is_not_compared(tmp_path: Path) -> None:
    first = page(tmp_path)
    first.begin(5, run=1, passes=1)
    assert all(first.add(number) for number in (0, 1))
    first.begin(5, run=1, passes=2)
    assert first.add("a batch") and first.call()
    content = (tmp_path / "given.0").read_bytes()
    for passes, run in ((1, 1), (3, 1), (2, 2)):
        (tmp_path / "given.0").write_bytes(content)
        again = page(tmp_path, is_replacement=True)
        again.begin(5, run=run, passes=passes)
        assert again.add("another")
        assert again.call() == (run == 2), "but the iteration itself has to come in the same pass"
        again.begin(5, run=1, passes=2)
        assert not again.add("another"), "nothing has been overwritten"
    died_before = page(tmp_path)
    died_before.begin(5, run=1, passes=1)
    died_before.add("of a validation")
    after = page(tmp_path, is_replacement=True)
    after.begin(5, run=1, passes=2)
    assert after.add("a batch") and after.call(), "it had not come to the iteration"


class Script:
    """The parts of a job that its loop uses, without groups."""

    def __init__(self, given: Given | None = None, *, target: Position | None = None) -> None:
        seeds = Seeds("iteration", 5, 0)
        seeds.settle()
        self.place = Place(0, seeds, threading.RLock())
        self.place.target, self.place.target_units = target, Units(1)
        self.place.point = SimpleNamespace(restore=lambda: None, restore_generators=lambda: None)  # type: ignore[assignment]
        self.notes: list[str] = []
        self.unfit: list[str] = []
        self.points: list[tuple[int, int, int]] = []
        self.inputs = Inputs(self.place, None, MadeBefore(), self.notes.append, self.unfit.append)
        self.draws = Draws(self.place, self.inputs.drawn)
        running: Any = SimpleNamespace(at_point=self._at_point)
        self.passes = Passes(self.place, running, self.draws, self.inputs, lambda: None, 1, self.notes.append)
        self.model = nn.Linear(2, 1)
        self.inputs.watch([self.model], given or Given(None))

    def _at_point(self) -> None:
        if not self.place.drawn:
            here = self.place.here
            self.points.append((here.iteration, here.passes, here.batch))

    def batches(self, loader: Any, group: int | None = None) -> Batches[Any]:
        return self.passes.over(loader, group)

    def iterate(self, function: Any, *args: Any, times: int = 1) -> Any:
        """As `Job.iteration` does; cut *times* - 1 times."""
        self.inputs.begin("train", args, {})
        run = self.draws.remembered(lambda: (self.inputs.run(), function(*args))[1])
        for _ in range(times):
            self.place.seeds.for_iteration(self.place.here.iteration)
            self.place.inside = "iteration"
            result = run()
            self.place.inside = ""
        self.place.here.iteration += 1
        self.place.drawn = 0
        return result


    def section(self, function: Any, *, times: int = 1) -> Any:
        """As `Job.resilient` does; cut *times* - 1 times."""
        run = self.draws.remembered(function, is_section=True)
        for _ in range(times):
            self.place.seeds.for_section(self.place.here.sections)
            result = run()
        self.place.here.sections += 1
        return result


def test_state_that_an_iteration_is_given_is_not_put_back() -> None:
    """A run whose update is made already comes again for its result: it would end with the state before that."""
    script = Script()
    model, runs = script.model, itertools.count()
    optimizer = torch.optim.Adam(model.parameters())
    script.inputs.watch([model], Given(None), optimizers=[optimizer])

    def update(weights: dict[str, torch.Tensor], part: torch.Tensor, state: dict[str, Any]) -> None:
        if (number := next(runs)) % 2 == 0:  # the other run is for its result only
            model(torch.ones(2)).backward()
            optimizer.step()
            with torch.no_grad():
                model.bias.fill_(number)

    for number in range(3):
        script.iterate(update, model.state_dict(), model.bias.detach()[:1], optimizer.state_dict(), times=2)
        assert not script.unfit
        assert model.bias.item() == 2 * number and optimizer.state[model.bias]["step"] == number + 1


def numbers(count: int = 12) -> list[torch.Tensor]:
    return [torch.full((2,), float(index)) for index in range(count)]


def test_what_is_collected_for_an_update_a_replacement_collects_too() -> None:
    script, collected, updates = Script(), [], []
    for batch in script.batches(numbers()):
        collected.append(batch)
        if len(collected) == 3:
            updates.append(script.iterate(lambda batches: [int(one[0]) for one in batches], collected))
            collected = []
    assert updates == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert script.points == [(0, 0, 0), (1, 0, 3), (2, 0, 6), (3, 0, 9), (4, 0, 12)]
    replacement = Script(target=Position(iteration=2, batch=6))
    assert int(next(replacement.batches(numbers()))[0]) == 6


def test_the_last_group_is_used_within_its_pass() -> None:
    script = Script()
    for _ in range(2):
        for group in script.batches(numbers(6), 4):
            assert script.passes.num_open, "an iteration is refused outside of a loop"
            script.iterate(lambda batches: None, group)
    assert script.points == [(0, 0, 0), (1, 0, 4), (2, 0, 6), (2, 1, 0), (3, 1, 4), (4, 1, 6)]
    inside, sizes = script.batches(numbers(6), 4), []
    for _ in range(2):
        script.iterate(lambda: sizes.append(len(next(inside))))
    with pytest.raises(StopIteration):
        script.iterate(lambda: next(inside))
    assert sizes == [4, 2]


def test_a_batch_from_before_the_point_is_refused() -> None:
    """One ahead of the update that uses it."""
    script, held = Script(), None
    with pytest.raises(UsageError, match=r"before the last\s+iteration: a replacement would not have it.*group=k"):
        for batch in script.batches(numbers()):
            if held is not None:
                script.iterate(lambda one: None, held)
            held = batch
    assert script.place.here.iteration == 1, "at once, in the second iteration"


def test_two_updates_with_one_batch_are_right() -> None:
    script = Script()
    for batch in script.batches(numbers(4)):
        for _ in range(2):
            script.iterate(lambda one: None, batch)
    assert script.place.here.iteration == 8 and not script.notes


def test_a_batch_that_is_left_out_is_right() -> None:
    script = Script()
    for batch in script.batches(numbers(6)):
        if int(batch[0]) % 3:
            script.iterate(lambda one: None, batch)
    assert script.place.here.iteration == 4


def test_an_iteration_that_draws_for_itself_gets_the_same_again() -> None:
    script = Script()
    source = script.batches(numbers())
    seen: list[Any] = []

    def train() -> Any:
        drawn = [(int(next(source)[0]), torch.rand(1).item()) for _ in range(2)]
        seen.append(drawn)
        return drawn

    script.iterate(train)
    script.iterate(train, times=3)
    script.iterate(train)
    assert [[number for number, _ in drawn] for drawn in seen] == [[0, 1], [2, 3], [2, 3], [2, 3], [4, 5]]
    assert seen[1] == seen[2] == seen[3], "and draws the same after it"
    assert script.place.here.batch == 6


def test_a_run_for_its_result_only_may_take_fewer_batches() -> None:
    """Of an iteration that sums up over ranks how much it has: with local values only that is reached sooner or later,
    while the update exists already. A run that counts has to take all."""
    script = Script()
    source, num = script.batches(numbers()), iter([3, 2, 1])

    def train() -> list[int]:
        return [int(next(source)[0]) for _ in range(next(num))]

    script.inputs.begin("train", (), {})
    run = script.draws.remembered(train)
    assert run() == [0, 1, 2]
    with script.place.without_points():
        assert run() == [0, 1]
    with pytest.raises(UsageError, match="takes fewer batches than before it was cut"):
        run()
    assert script.place.here.batch == 3


def test_a_replacement_that_arrived_in_a_loop_of_numbers_draws_from_there() -> None:
    script = Script(target=Position(iteration=3, batch=6))
    script.place.arrive(in_no_loader=True)
    source = script.batches(numbers())
    assert script.iterate(lambda: int(next(source)[0])) == 6
    assert script.place.here.batch == 7


def test_a_loader_with_a_state_of_its_own_is_where_that_is() -> None:
    class Stateful:
        at = 0

        def __iter__(self) -> Any:
            while self.at < 9:
                self.at += 1
                yield torch.full((2,), float(self.at - 1))

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    first, loader, other = Script(), Stateful(), Stateful()
    for _ in zip(range(5), first.batches(loader), strict=False):
        pass
    other.load_state_dict(loader.state_dict())
    replacement = Script(target=Position(iteration=5, batch=5))
    replacement.passes.has_state = lambda one: one is other
    assert [int(batch[0]) for batch in replacement.batches(other)] == [5, 6, 7, 8]


def test_an_end_inside_an_iteration_goes_on_with_the_next_pass() -> None:
    script = Script()

    def endless() -> Any:
        while True:
            yield from script.batches(numbers(3))

    source = endless()
    drawn = [script.iterate(lambda: [int(next(source)[0]) for _ in range(2)], times=2) for _ in range(3)]
    assert drawn == [[0, 1], [2, 0], [1, 2]]
    assert (script.place.here.passes, script.place.here.batch) == (1, 3)


def test_an_iteration_in_which_the_pass_ends_gets_its_last_batches_again() -> None:
    """It asks `next(source, None)` for as many as there are."""
    script = Script()
    source = script.batches(numbers(5))
    runs: list[list[Any]] = []

    def train() -> Any:
        drawn: list[Any] = []
        while len(drawn) < 2 and (batch := next(source, None)) is not None:
            drawn.append((int(batch[0]), torch.rand(1).item()))
        drawn.append(torch.rand(1).item())
        runs.append(drawn)
        return drawn

    for _ in range(4):
        script.iterate(train, times=3)
    for same in zip(*[iter(runs)] * 3, strict=True):
        assert same[0] == same[1] == same[2]
    assert [[one[0] for one in run[:-1]] for run in runs[::3]] == [[0, 1], [2, 3], [4], []]
    assert (script.place.here.passes, script.place.here.batch) == (1, 0)


def test_batches_that_a_generator_of_the_script_cannot_give_again_are_told() -> None:
    script = Script()
    source = (batch for batch in script.batches(numbers(3)))

    def train() -> int:
        return len([batch for _ in range(2) if (batch := next(source, None)) is not None])

    assert script.iterate(train, times=2) == 2
    with pytest.raises(UsageError, match="come from a generator that has ended"):
        script.iterate(train, times=2)


class Cut(Exception):
    pass


def test_a_pass_that_an_iteration_makes_starts_again_when_it_is_run_again() -> None:
    script = Script()
    runs: list[list[Any]] = []

    def train(cut_at: int) -> None:
        runs.append([])
        for batch in script.batches(numbers(3)):
            runs[-1].append((int(batch[0]), torch.rand(1).item()))
            if len(runs[-1]) == cut_at and len(runs) < 3:
                raise Cut

    for cut_at in (2, 9):
        runs.clear()
        before = script.place.here.passes
        run = script.draws.remembered(functools.partial(train, cut_at))
        for _ in range(3):
            with contextlib.suppress(Cut):
                run()
        assert [number for number, _ in runs[2]] == [0, 1, 2]
        assert runs[0] == runs[2][: len(runs[0])] and runs[1] == runs[0]
        assert (script.place.here.passes, script.passes.num_open) == (before + 1, 0)


def test_passes_that_cannot_be_told_apart_are_refused() -> None:
    script = Script()
    with pytest.raises(UsageError, match=r"begins while another one is not over.*@job\.resilient"):
        for _ in zip(script.batches(numbers()), script.batches(numbers()), strict=True):
            pass
    other, made = Script(), []
    source = other.batches(numbers())

    def train() -> None:
        next(source if not made else other.batches(numbers()))
        made.append(True)

    with pytest.raises(UsageError, match=r"next\(\) on its result inside"):
        other.iterate(train, times=2)


def test_a_pass_in_a_section_starts_again_and_is_no_part_of_the_place() -> None:
    """In the middle of a pass of the loop; cut; of a replacement that is on its way to where the others are."""

    def validation(script: Script, cut_at: int = 0) -> list[Any]:
        seen: list[Any] = []
        for batch in script.batches(loader):
            seen.append((batch.tolist(), torch.rand(1).item()))
            if len(seen) == cut_at:
                raise Cut
        return seen

    loader = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    script, results = Script(), []
    for number, batch in enumerate(script.batches(numbers(4))):
        script.iterate(lambda one: None, batch)
        if number % 2:
            with pytest.raises(Cut):
                script.draws.remembered(lambda: validation(script, cut_at=3), is_section=True)()
            results.append(script.section(lambda: validation(script), times=2))
        place = script.place.here
        assert (place.passes, place.batch, script.passes.num_open) == (0, number + 1, 1)
    assert len(results[0]) == 4 and results[0] != results[1], "an order for each section"
    assert not script.place.drawn and script.points == [(n, 0, n) for n in range(5)]

    replacement = Script(target=Position(iteration=4, passes=1, sections=2))
    assert [replacement.section(lambda: validation(replacement)) for _ in range(2)] == results


def test_a_pass_in_a_section_is_forgotten_with_it() -> None:
    script, kept = Script(), []
    script.place.drawn = 1
    assert script.section(lambda: sum(len(group) for group in script.batches(numbers(7), 3))) == 7
    assert script.place.drawn == 1, "a batch that was collected before is still to be used"
    gone = weakref.ref(script.section(lambda: next(script.batches([torch.zeros(1)]))))
    assert gone() is None, "nothing of a validation set is kept"
    script.section(lambda: kept.append(script.batches(numbers())))
    with pytest.raises(UsageError, match="has ended since"):
        script.section(lambda: next(kept[0]))
    with pytest.raises(UsageError, match="has to start over if it is repeated"):
        script.section(lambda: next(script.batches(iter(numbers()))))


def test_what_is_carried_from_iteration_to_iteration_is_told_once() -> None:
    script = Script()
    held = torch.randn(3, 2)
    fixed = torch.randn(3, 2)

    def train() -> None:
        nonlocal held
        script.model(held)
        held = torch.randn(3, 2)

    def right() -> None:
        other.model(fixed)
        other.model(torch.randn(3, 2))

    for _ in range(6):
        script.passes.at_point()
        script.iterate(train)
    assert "uses a tensor of shape [3, 2] that was made before the point" in script.place.carries
    assert len(script.notes) == 1 and "restarts all workers" in script.notes[0]

    other = Script()
    for _ in range(6):
        other.passes.at_point()
        other.iterate(right)
    assert not other.place.carries


def test_what_is_carried_is_of_no_use_where_workers_were_lost_before_it_was_known() -> None:
    script = Script()
    script.place.has_recovered = True
    held = torch.randn(3, 2)

    def train() -> None:
        nonlocal held
        script.model(held)
        held = torch.randn(3, 2)

    for _ in range(4):
        script.passes.at_point()
        script.iterate(train)
    assert "Workers have been lost before this was known" in script.unfit[0]


def test_an_iteration_that_is_run_again_is_given_the_same_or_told() -> None:
    """Its data lies in a file, say, and the script counts how far it has read."""
    reader, drawing = Script(), Script()
    position = 0

    def read() -> None:
        nonlocal position
        reader.model(torch.full((1, 2), float(position)))
        position += 1

    def draw() -> None:
        drawing.model(torch.randn(1, 2))
        drawing.model(drawing.model(torch.randn(4, 2)).repeat(1, 2))

    for times in (1, 3, 1, 2):
        drawing.iterate(draw, times=times)
    reader.iterate(read)
    assert not drawing.unfit and not reader.unfit
    reader.iterate(read, times=2)
    assert "iteration 1 was given other data when it was run again than in its first run" in reader.unfit[0]


def test_an_iteration_that_was_cut_before_it_called_the_model_is_compared_as_in_its_first_run(tmp_path: Path) -> None:
    """A collective at its beginning was cut."""
    predecessor, other, same = Script(page(tmp_path)), None, None
    for _ in range(2):
        predecessor.iterate(lambda: predecessor.model(torch.ones(1, 2)))
    for factor in (1.0, 2.0):
        script = Script(page(tmp_path, is_replacement=True))
        script.place.here.iteration = 1
        num_runs = itertools.count()

        def train(script: Script = script, factor: float = factor, num_runs: Any = num_runs) -> None:
            if next(num_runs):
                script.model(torch.ones(1, 2) * factor)

        script.iterate(train, times=2)
        other, same = script, other or script
    assert same is not None and not same.unfit and same.inputs._first_runs.knows(1)
    assert other is not None and "iteration 1 was given other data than in the process" in other.unfit[0]


def test_what_depends_on_parameters_says_nothing_after_the_update() -> None:
    script = Script()
    script.inputs.begin("train", (), {})
    script.place.inside = "iteration"
    for factor in (1.0, 2.0):  # the second: a run without effect, after the update
        script.inputs.run()
        script.model(torch.ones(1, 2, requires_grad=True) * factor)
        script.place.inside = ""
    assert not script.unfit


@pytest.mark.parametrize("kind", ["drawn", "counted", "hidden state"])
def test_what_an_iteration_leaves_to_the_next_is_made_once_more_or_told(kind: str) -> None:
    """As `DryRuns.remake` does, on a rank that was there: what it makes is what was there, or it is told."""
    script = Script()
    script.place.can_remake = lambda: True  # type: ignore[method-assign]
    held, count = torch.randn(3, 2), 0

    def train() -> None:
        nonlocal held, count
        script.model(held)
        count += 1
        if kind == "hidden state":
            held = held * 0.5 + torch.randn(3, 2)
        else:
            held = torch.randn(3, 2) + (count if kind == "counted" else 0)

    for _ in range(6):
        script.passes.at_point()
        script.iterate(train)
    assert "is run once more" in script.notes[0] and script.place.remakes
    before = held
    script.inputs.begin("train", (), {})
    for number in (4, 5):
        script.place.seeds.for_iteration(number)
        script.place.remaking, script.place.has_to_fit = number, number == 5
        script.inputs.run()
        train()
    script.place.remaking = None
    assert torch.equal(held, before) is (kind == "drawn")
    assert ("ran again, for what it leaves" in "".join(script.unfit)) is (kind != "drawn")


def test_batches_of_a_loader_are_not_carried() -> None:
    script = Script()
    for batch in script.batches(numbers()):
        script.iterate(lambda one: script.model(one), batch)
    ahead = Script()
    source = ahead.batches(numbers())
    batch = next(source)
    for _ in range(6):
        ahead.passes.at_point()
        ahead.iterate(lambda one: ahead.model(one), batch)
        batch = next(source)  # in the body: a replacement takes it in front of its loop
    assert not script.place.carries and not ahead.place.carries
    assert ahead.points[-1] == (6, 0, 6)


def test_the_check_keeps_nothing_alive() -> None:
    script = Script()
    tensor = torch.zeros(2)
    gone = weakref.ref(tensor)
    for _ in range(3):
        script.passes.at_point()
        script.iterate(lambda: None)
    del tensor
    assert gone() is None


def test_a_replacement_with_other_data_is_of_no_use(tmp_path: Path) -> None:
    first = Script(page(tmp_path))
    for batch in first.batches(numbers(5)):
        first.iterate(lambda one: None, batch)
    right = Script(page(tmp_path, is_replacement=True), target=Position(iteration=4, batch=4))
    right.iterate(lambda one: None, next(right.batches(numbers(5))))
    assert not right.unfit
    wrong = Script(page(tmp_path, is_replacement=True), target=Position(iteration=4, batch=3))
    wrong.iterate(lambda one: None, next(wrong.batches(numbers(5))))
    assert "iteration 4 was given other data than in the process that this one replaces" in wrong.unfit[0]


def said_of(
    given: Given, begin: int, numbers: list[float], *, epoch: int = 0, as_argument: bool = True,
    handed: Callable[[int], Any] | None = None,
) -> list[bool]:  # fmt: skip
    """Of iterations from *begin* on that a script gives those *numbers*, by its own count: whether it starts again.
    *handed*: what the loop's loader gives besides."""
    script, said = Script(), dict[int, bool]()

    def say(iteration: int, is_again: bool, is_first: bool) -> None:
        said[iteration] = is_again
        assert is_first == (script.inputs._is_replacement and iteration == begin)

    script.inputs._is_replacement = bool(begin)
    script.inputs.watch([script.model], given, say_own=say)
    script.place.here.iteration = begin
    for number in numbers:
        script.place.here.epoch = epoch
        batch = torch.full((1, 2), number)
        if handed is not None:
            script.inputs.at_point()
            script.passes.hand_out(also := handed(script.place.here.iteration))
        if handed is not None and as_argument:
            script.iterate(lambda also, one: script.model(one), also, batch)
        elif as_argument:
            script.iterate(lambda one: script.model(one), batch)
        else:
            script.iterate(lambda batch=batch: script.model(batch))
    assert not script.unfit
    return [said[iteration] for iteration in sorted(said)]


@pytest.mark.parametrize("as_argument", [False, True])
def test_own_data_that_starts_again(tmp_path: Path, as_argument: bool) -> None:
    said = functools.partial(said_of, as_argument=as_argument)
    assert said(page(tmp_path), 0, [0.0, 1.0, 2.0, 3.0]) == [False] * 4
    copy = (tmp_path / "given.0").read_bytes()
    assert said(page(tmp_path, is_replacement=True), 4, [0.0, 1.0]) == [True, False]
    (tmp_path / "given.0").write_bytes(copy)
    assert said(page(tmp_path, is_replacement=True), 4, [4.0, 5.0]) == [False, False]
    assert said(page(tmp_path, is_replacement=True), 6, [0.0]) == [True], "its successor"
    # On another node: from who has kept a copy.
    (tmp_path / "other").mkdir()
    elsewhere = page(tmp_path / "other", is_replacement=True)
    assert elsewhere.page is not None
    elsewhere.page.learn(copy)
    assert said(elsewhere, 4, [0.0]) == [True]
    assert elsewhere.page.first_of_run.iteration == 0, "it is kept for others"
    kept = GivenPage(tmp_path / "other" / "given.0", is_replacement=True)
    assert (kept.first_of_run.iteration, kept.first_of_epoch.iteration) == (0, 0)


def test_own_data_that_starts_again_in_an_epoch(tmp_path: Path) -> None:
    assert said_of(page(tmp_path), 0, [0.0, 1.0]) == [False, False]
    assert said_of(page(tmp_path, is_replacement=True), 2, [5.0, 6.0, 7.0], epoch=1) == [False] * 3
    copy = (tmp_path / "given.0").read_bytes()
    for number in (0.0, 5.0):  # what the run began with, and this epoch
        (tmp_path / "given.0").write_bytes(copy)
        assert said_of(page(tmp_path, is_replacement=True), 5, [number], epoch=1) == [True]


def test_own_data_that_is_the_same_in_each_iteration_says_nothing(tmp_path: Path) -> None:
    assert said_of(page(tmp_path), 0, [0.0, 1.0, 0.0]) == [False, False]
    assert said_of(page(tmp_path, is_replacement=True), 3, [0.0, 5.0]) == [False]


def test_own_data_that_comes_again_later_is_said(tmp_path: Path) -> None:
    said = said_of(page(tmp_path), 0, [*map(float, range(NUM_SLOTS + 1)), 0.0])
    assert said == [False] * (NUM_SLOTS + 1) + [True]


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize("kind", ["number", "batch"])
def test_own_data_beside_the_loops(tmp_path: Path, kind: str, as_argument: bool) -> None:
    """A second loader of the script's own; or that of the loop gives numbers only."""
    if kind == "batch" and not as_argument:
        return  # the batch is taken for all that there is
    handed = (lambda number: number) if kind == "number" else (lambda number: torch.full((1, 2), -1.0 - number))
    said = functools.partial(said_of, as_argument=as_argument, handed=handed)
    assert said(page(tmp_path), 0, [0.0, 1.0, 2.0]) == [False] * 3
    copy = (tmp_path / "given.0").read_bytes()
    assert said(page(tmp_path, is_replacement=True), 4, [0.0, 1.0]) == [True, False]
    (tmp_path / "given.0").write_bytes(copy)
    assert said(page(tmp_path, is_replacement=True), 4, [4.0, 5.0]) == [False, False]


def test_own_data_is_said_in_each_run_of_an_iteration(tmp_path: Path) -> None:
    """A rank that is cut in it has been given it before the recovery, and a replacement after it."""
    script, said = Script(), list[tuple[int, bool, bool]]()
    script.inputs.watch([script.model], page(tmp_path), say_own=lambda *what: said.append(what))
    script.iterate(lambda one: script.model(one), torch.ones(1, 2), times=3)
    assert said == [(0, False, False)] * 3


def test_own_data_on_a_device_says_nothing(tmp_path: Path) -> None:
    script, said = Script(), list[tuple[int, bool, bool]]()
    script.inputs.watch([script.model], page(tmp_path), say_own=lambda *what: said.append(what))
    script.iterate(lambda one: None, torch.ones(1, 2, device="meta"))
    assert not said


@pytest.mark.parametrize("compiled", [False, True])
def test_an_iteration_without_arguments_is_known_by_what_its_model_gets(tmp_path: Path, compiled: bool) -> None:
    def script(*, is_replacement: bool) -> tuple[Script, Any]:
        one = Script()
        model = torch.compile(one.model, backend="eager", fullgraph=True) if compiled else one.model
        one.inputs.watch([model], page(tmp_path, is_replacement=is_replacement))
        return one, model

    first, model = script(is_replacement=False)
    first.iterate(lambda: model(torch.ones(1, 2)))
    second, other = script(is_replacement=True)
    second.iterate(lambda: other(torch.zeros(1, 2)))
    assert len(second.unfit) == 1


def test_a_model_that_is_watched_can_be_copied_and_saved_whole() -> None:
    script, forwards = Script(), []
    script.iterate(lambda: script.model(torch.ones(1, 2)))
    stream = io.BytesIO()
    torch.save(script.model, stream)
    assert b"swift_agent" not in stream.getvalue(), "who loads it need not have it"
    stream.seek(0)
    for other in (copy.deepcopy(script.model), torch.load(stream, weights_only=False)):
        forwards.append(script.iterate(lambda model=other: model(torch.ones(1, 2))))
        assert script.inputs._given is not None and script.inputs._given.count == 0, "a copy is not watched"
    assert torch.equal(*forwards)
    script.iterate(lambda: script.model(torch.ones(1, 2)))
    assert script.inputs._given.count == 1, "the model is, as before"


def test_a_loader_for_code_that_iterates_by_itself() -> None:
    script = Script()
    loader = torch.utils.data.DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    looping: Looping[Any] = Looping(script.passes, loader, 2)
    assert (len(looping), looping.batch_size, looping.dataset) == (3, 2, loader.dataset)
    for _ in range(2):
        assert [[one.tolist() for one in group] for group in looping] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert script.place.here.passes == 2


def test_the_next_pass_ends_one_that_nobody_took_to_its_end() -> None:
    """Also where something still holds its iterator, as frames of a cut iteration do after a recovery: it would be the
    same pass once more, with the same order."""
    script = Script()
    loader = torch.utils.data.DataLoader(range(10), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    looping: Looping[Any] = Looping(script.passes, loader, None)
    held = [iter(looping) for _ in range(2)]
    orders = [torch.cat([next(one) for _ in range(5)]).tolist() for one in held]
    assert orders[0] != orders[1] and script.place.here.passes == 1
    with pytest.raises(UsageError, match="after the next pass over the same loader has begun"):
        next(held[0])
    assert next(held[1], None) is None and script.place.here.passes == 2
    assert script.passes.num_open == 0


def test_a_loader_that_looks_ahead_carries_nothing() -> None:
    """It has made the next batch when the point is kept."""

    def ahead() -> Any:
        held = torch.randn(3, 2)
        for _ in range(8):
            following = torch.randn(3, 2)
            yield held
            held = following

    script = Script()
    for batch in script.batches(ahead()):
        script.iterate(lambda one: script.model(one), batch)
    wrapped = Script()
    for batch in wrapped.batches(SimpleNamespace(x=one) for one in ahead()):
        wrapped.iterate(lambda one: wrapped.model(one.x), batch)
    assert not script.place.carries and not wrapped.place.carries


def test_a_validation_that_the_predecessor_had_passed_is_not_compared_with_what_came_after(tmp_path: Path) -> None:
    """In the loop, and without a collective: the source is still in it."""
    first = Script(page(tmp_path))
    for _ in range(2):
        for batch in first.batches(numbers(2)):
            first.iterate(lambda one: None, batch)
        for _ in first.batches(numbers(3)[::-1]):
            pass
    source = first.batches(numbers(9)[::-1])
    first.iterate(lambda one: None, next(source))  # iteration 4, in pass 4
    second = Script(page(tmp_path, is_replacement=True), target=Position(iteration=4, passes=3))
    for _ in range(2):
        for batch in second.batches(numbers(2)):
            second.iterate(lambda one: None, batch)
        for _ in second.batches(numbers(3)[::-1]):
            pass
    assert not second.unfit
    second.iterate(lambda one: None, next(second.batches(numbers(9))))
    assert len(second.unfit) == 1


def test_what_an_iteration_draws_is_compared_in_a_loop_of_numbers(tmp_path: Path) -> None:
    first = Script(page(tmp_path))
    source = first.batches(numbers())
    for _ in range(4):
        first.passes.at_point()
        first.iterate(lambda: [next(source) for _ in range(2)])
    for data, num_unfit in ((numbers(), 0), (numbers()[::-1], 1)):
        second = Script(page(tmp_path, is_replacement=True), target=Position(iteration=3, batch=6))
        second.place.arrive(in_no_loader=True)
        again = second.batches(data)
        second.passes.at_point()
        second.iterate(functools.partial(lambda of: [next(of) for _ in range(2)], again))
        assert len(second.unfit) == num_unfit


def test_a_rank_that_was_in_another_pass_than_the_others_is_told(tmp_path: Path) -> None:
    """Its loader is longer than that of the rank whose place the replacement has got."""
    first = Script(page(tmp_path))
    for batch in first.batches(numbers(5)):
        first.iterate(lambda one: None, batch)
    second = Script(page(tmp_path, is_replacement=True), target=Position(iteration=4, passes=1))
    assert not list(second.batches(numbers(4)))
    second.iterate(lambda one: None, next(second.batches(numbers(4))))
    assert len(second.unfit) == 1


def test_who_died_between_batch_and_iteration_has_left_the_batch(tmp_path: Path) -> None:
    first = Script(page(tmp_path))
    source = first.batches(numbers(5))
    first.iterate(lambda one: None, next(source))
    next(source)
    wrong = Script(page(tmp_path, is_replacement=True), target=Position(iteration=1, batch=2))
    next(wrong.batches(numbers(5)))
    assert len(wrong.unfit) == 1


class Counting:
    """An order, or samples, from a number that it keeps: a sampler, and a data set that is a stream."""

    def __init__(self, *, counts: bool = True) -> None:
        self.turn, self.counts = 0, counts

    def __iter__(self) -> Any:
        self.turn += self.counts
        yield from torch.randperm(24, generator=torch.Generator().manual_seed(self.turn)).tolist()

    def __len__(self) -> int:
        return 24


class CountingStream(Counting, torch.utils.data.IterableDataset[int]):
    pass


def loader_of(kind: str, *, counts: bool) -> Any:
    if kind == "stream":
        return torch.utils.data.DataLoader(CountingStream(counts=counts), batch_size=4)
    data: Any = range(24)
    if kind == "batch sampler":
        return torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(
            Counting(counts=counts), 4, drop_last=False))  # fmt: skip
    num_workers = 2 if kind == "processes" else 0
    return torch.utils.data.DataLoader(data, batch_size=4, sampler=Counting(counts=counts), num_workers=num_workers)


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream", "processes"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_pass_that_goes_through_something_else_is_told_wherever_it_is_joined(
    kind: str, counts: bool, tmp_path: Path
) -> None:
    """Nothing is known of the iteration with which the replacement begins: the one before was the last of its
    predecessor."""
    first, loader = Script(page(tmp_path)), loader_of(kind, counts=counts)
    given = first.inputs._given
    assert given is not None and given.page is not None
    for _ in range(2):
        for batch in first.batches(loader):
            first.iterate(lambda one: None, batch)
    source = first.batches(loader)
    for _ in range(3):
        first.iterate(lambda one: None, next(source))
    copy = given.page.whole()
    for batch in (0, 1, 3):
        (tmp_path / f"{batch}").mkdir()
        elsewhere = page(tmp_path / f"{batch}", is_replacement=True)
        assert elsewhere.page is not None
        elsewhere.page.learn(copy)
        elsewhere.page.predecessor.clear()
        second = Script(elsewhere, target=Position(iteration=12 + batch, passes=2, batch=batch))
        other = loader_of(kind, counts=counts)
        assert not [*second.batches(other), *second.batches(other)], "the others have been through these"
        rest = second.batches(other)
        second.iterate(lambda one: None, next(rest))
        assert len(second.unfit) == int(counts), (batch, second.unfit)


def test_a_successor_finds_no_less_of_a_pass_than_its_predecessor_has_found(tmp_path: Path) -> None:
    pages = [page(tmp_path)]
    pages[0].begin_track(3, run=1)
    assert all(pages[0].follow(lambda digest, number=number: digest * 31 + number) for number in range(9))
    for _ in range(2):
        pages.append(page(tmp_path, is_replacement=True))
        pages[-1].begin_track(3, run=1)
        assert all(pages[-1].follow(lambda digest, number=number: digest * 31 + number) for number in range(2))
    again = page(tmp_path, is_replacement=True)
    again.begin_track(3, run=1)
    same = [again.follow(lambda digest, number=number: digest * 31 + number + (number > 5)) for number in range(9)]
    assert same == [True] * 8 + [False]
    again = page(tmp_path, is_replacement=True)
    for passes, run in ((4, 1), (3, 2)):
        again.begin_track(passes, run=run)
        assert again.follow(lambda digest: 7), "of another pass, or run, nothing is known"


def test_indices_have_a_fingerprint_by_which_all_of_them_count() -> None:
    many = list(range(300))
    kinds: list[Any] = [
        many, [*many[:-1], 7], numpy.int64(3), numpy.int64(4), 3, (1, 2), (1, 3), ["a"], ["b"], [], torch.arange(3),
        [1, "a"], [1 << 80], [1.5], [[1, 2], [3]], [[1, 2], [4]],
    ]  # fmt: skip
    assert len({fingerprint_of_indices(one, 1) for one in kinds}) == len(kinds)
    assert fingerprint_of_indices(many, 1) != fingerprint_of_indices(many, 2)


def test_what_is_given_is_shown_before_the_iteration_and_with_the_first_batch_of_a_pass() -> None:
    script, shown = Script(), []
    script.inputs.watch([script.model], Given(None), lambda: shown.append(script.place.here.batch))
    for batch in script.batches(numbers(3)):
        before = len(shown)
        script.iterate(lambda one: None, batch)
        assert len(shown) == before + 1
    assert shown == [1, 1, 2, 3]


def test_a_pass_of_which_nothing_is_known_is_told_if_numbers_change_from_pass_to_pass(tmp_path: Path) -> None:
    """The last batch that the predecessor was given was that of the pass before."""
    for kind, counts in itertools.product(("sampler", "batch sampler", "stream"), (True, False)):
        script, loader = Script(), loader_of(kind, counts=counts)
        for _ in range(2):
            for batch in script.batches(loader):
                script.iterate(lambda one: None, batch)
        name = "CountingStream.turn" if kind == "stream" else "Counting.turn"
        assert script.place.changing == ({name} if counts else set())
        directory = tmp_path / f"{kind} {counts}"
        directory.mkdir()
        second = Script(page(directory, is_replacement=True), target=Position(iteration=6, passes=1))
        second.place.changing |= script.place.changing  # as the others have told it
        other = loader_of(kind, counts=counts)
        assert not list(second.batches(other))
        next(second.batches(other))
        assert len(second.unfit) == int(counts)
        assert not counts or second.unfit[0].startswith(f"{name} changes from pass to pass on the other ranks")


class ByEpoch(torch.utils.data.Sampler[int]):
    """What it counts says nothing: where it is in a pass, and the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.at = 0
        for index in range(8):
            self.at += 1
            yield (index + self.epoch) % 8

    def __len__(self) -> int:
        return 8


def test_numbers_that_start_over_with_each_pass_are_no_reason(tmp_path: Path) -> None:
    data: Any = range(8)
    kinds = [
        torch.utils.data.DataLoader(data, batch_size=2, sampler=ByEpoch()),
        torch.utils.data.DataLoader(data, batch_size=2, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=2, sampler=torch.utils.data.DistributedSampler(data, 2, 0)),
        numbers(4), ByEpoch(),
    ]  # fmt: skip
    for loader in kinds:
        script = Script(page(tmp_path))
        for _ in range(3):
            for batch in script.batches(loader):
                script.iterate(lambda one: None, batch)
        assert not script.place.changing


def test_where_generators_are_the_scripts_a_pass_says_nothing(tmp_path: Path) -> None:
    """What is left out may draw from them, and is not the same then; what comes after it is."""
    first = Script(page(tmp_path))
    first.place.seeds.keeps_generators = True
    next(first.batches(loader_of("stream", counts=True)))
    second = Script(page(tmp_path, is_replacement=True), target=Position(iteration=4, batch=4))
    second.place.seeds.keeps_generators = True
    other = loader_of("stream", counts=True)
    other.dataset.turn = 9
    next(second.batches(other))
    assert not second.unfit
