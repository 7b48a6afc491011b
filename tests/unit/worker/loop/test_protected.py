"""An iteration is counted whole or not at all, and which errors of user code may come from the loss of a peer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_agent.errors import CannotConnect, PeerFailure, UsageError
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import WorkerChannel
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.groups.errors import GroupsAborted, RebuildFailed, WornOut
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.job import init, restarts
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.iterations import Iterations
from swift_agent.worker.loop.peer_errors import cause_of, is_communication_error, is_own, own
from swift_agent.worker.loop.protected import Protected
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.replicas.comparison import Comparison
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.tracked import others
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Position
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.errors import LostLog
from swift_recovery.planning.plan import Plan
from swift_recovery.state.snapshots import by_hand

# As torch's future says it.
IN_CALLBACK = "Got the following error when running the callback:"


def caused(text: str, by: Exception) -> RuntimeError:
    """As a stage of `torch.distributed.pipelining` raises it."""
    error = RuntimeError(text)
    error.__cause__ = by
    return error


def test_why_a_stage_failed() -> None:
    """It may be something of ours, several errors down."""
    lost, own = LostLog("the log of rank 1 did not come to its end"), ValueError("the script's own")
    cut = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error")
    assert cause_of(lost) is lost
    assert cause_of(caused("Failed to run stage", by=caused("in its layer", by=lost))) is lost
    assert cause_of(caused("Failed to run stage", by=cut)) is cut
    error = caused("Failed to run stage", by=own)
    assert cause_of(error) is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistStoreError("store at a:1 cannot be reached"), True),
        (PeerFailure("generation 3 was stopped"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42197"), True),
        # An operation whose group was ended by one that had run over its timeout.
        (RuntimeError("Application timeout caused pair closure"), True),
        # An operation of the compiled backend, or a hook's, that has gone through a future.
        (RuntimeError("DistBackendError: process group aborted: node b is lost\n\nAt:\n  train.py(3): f"), True),
        (RuntimeError("Operation timed out!\nException raised from wait at Work.cpp:73"), True),
        (GroupsAborted("generation 3 was stopped"), True),
        (RuntimeError("[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:492] 24 vs 12"), True),
        (RuntimeError("Rank 0 timed out in monitoredBarrier after 500 ms."), True),
        (RuntimeError("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms\n Original exception: "), True),
        (RuntimeError("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 500 ms"), True),
        (RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors while waiting"), True),
        # In a communication hook.
        (RuntimeError(f"{IN_CALLBACK} RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [::1]:1"), True),
        (RuntimeError(f"{IN_CALLBACK} DistBackendError: process group aborted: node b is lost"), True),
        (RuntimeError(f"{IN_CALLBACK} RuntimeError: no connection to gloo"), False),
        (RuntimeError(f"{IN_CALLBACK} AssertionError: timed out"), False),
        # The script's own, whatever words they have.
        (RuntimeError("connection to database timed out"), False),
        (RuntimeError("the socket of /data/swift/labels was aborted"), False),
        (RuntimeError("no gloo in this build, no NCCL"), False),
        (RuntimeError("set USE_BARRIER=1: monitoredBarrier is for debugging only"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection"), False),
        (caused("Failed to run stage backward", by=RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error")), True),
        (caused("Failed to run stage backward", by=RuntimeError("mat1 and mat2 cannot be multiplied")), False),
        # Asked about, it would keep the script for 30 s, and then be called a failed collective.
        (UsageError("swift_agent.init() was called twice"), False),
    ],
)
def test_only_what_torch_raises_when_a_connection_breaks_is_asked_about(error: Exception, expected: bool) -> None:
    assert is_communication_error(error) is expected


class Watched(Position):
    """Whoever reads the iteration in another thread than the main one waits until that had time to go on."""

    reached = threading.Event()
    passed = threading.Event()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "iteration" and threading.current_thread() is not threading.main_thread():
            type(self).reached.set()
            type(self).passed.wait(0.3)
        return value


@contextlib.contextmanager
def stopped_after_its_update(here: Position) -> Iterator[tuple[Any, Place, WorkerChannel]]:
    """The update of an iteration is made, then the stop comes."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours, theirs = socket.socketpair()
    agent = WorkerChannel(theirs)
    agent.sock.settimeout(5.0)
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    tracked = Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, supervisor)
    place.hold(tracked)
    place.status, place.here = "holding", here
    groups = ProcessGroups.__new__(ProcessGroups)
    loop = Protected(place, supervisor, groups, torch.device("cpu"), None).assemble(tracked)
    supervisor.start(wire.Hello(0, 1), place.report, lambda why, generation: None)
    agent.receive()
    agent.send({"op": "go", "generation": 1, "plan": Plan("fresh", "w").to_json(), "world_size": 1,
                "store": {"host": "h", "port": 1, "session_port": 2, "token": ""}})
    supervisor.wait_go()
    tracked.begin(7)
    place.enter("iteration")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    agent.send({"op": "stop", "generation": 1, "why": "w"})
    yield loop, place, agent
    supervisor.close()  # first, else it ends this process: its agent is gone
    agent.close()


def test_a_report_is_not_torn_by_the_end_of_the_iteration() -> None:
    """The iteration ends while the report is being put together."""
    with stopped_after_its_update(Watched(7)) as (loop, place, agent):
        assert Watched.reached.wait(5.0)
        loop.iterations.complete()
        Watched.passed.set()
        report = agent.receive()["report"]
        assert place.here.iteration == 8 and report["iteration"] == 8


def test_over_nccl_what_was_cut_after_the_update_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL raises nothing for it. The update is counted later, as where an error had been raised."""
    monkeypatch.setattr("swift_agent.torch_private.groups.has_nccl", lambda: True)
    with stopped_after_its_update(Position(7)) as (loop, place, agent):
        assert agent.receive()["op"] == "report"
        with pytest.raises(PeerFailure, match="whole"):
            loop.iterations.complete()
        assert place.here.iteration == 7 and place.inside == "iteration"


def test_a_report_says_why_it_holds_no_state() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    tracked = Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, supervisor)
    place.hold(tracked)
    place.status, place.here = "holding", Position(30)
    assert "lacks" not in place.report()
    tracked.updates.mixed = True
    report = place.report()
    assert (report["status"], report["lacks"]) == (
        "empty", "had begun update 30, which may not be whole, and cannot take it back"
    )  # fmt: skip
    supervisor.close()
    theirs.close()


def test_an_exception_of_the_script_stays_its_own() -> None:
    """Also where a peer fails, as of the same, before it has come out of the script."""
    error = ValueError("x")
    assert not is_own(error)
    own(error)
    assert is_own(error)
    why = init.why_unfit(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), None)
    assert why.startswith("a collective outside an iteration was cut (RuntimeError")
    why = init.why_unfit(KeyError("loss"), None)
    assert "KeyError" in why and "was cut" not in why and "may have been cut" in why


def test_whether_a_restart_of_all_starts_over() -> None:
    def tracked(optimizer: torch.optim.Optimizer) -> Tracked:
        named: dict[str, dict[str, Any]] = {"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}
        return Tracked(named, [0], 1, None)

    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    assert restarts.starts_over(tracked(optimizer))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    # The script has loaded a snapshot, with the state of its optimizer.
    assert not restarts.starts_over(tracked(optimizer))
    # It has its state from the beginning.
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state and restarts.starts_over(tracked(optimizer))
    optimizer.step()
    assert not restarts.starts_over(tracked(optimizer))


def test_a_snapshot_of_the_scripts_own_draws_the_first_numbers_once_more() -> None:
    def tracked(optimizer: torch.optim.Optimizer) -> Tracked:
        named: dict[str, dict[str, Any]] = {"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}
        return Tracked(named, [0], 1, None)

    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    without = torch.optim.SGD(model.parameters(), lr=0.1)
    say = restarts.what_is_drawn_again
    assert not say(tracked(optimizer), None, 0, seeded=True) and not say(tracked(optimizer), 0, 0, seeded=True)
    assert "loop begins with iteration 0" in say(tracked(without), 3, 0, seeded=True), "job.epochs(n, start=3)"
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert "loop begins with iteration 0" in say(tracked(optimizer), None, 0, seeded=True), "range(3, n)"
    # The script has said how many; or draws by itself; or all is in a checkpoint.
    assert not say(tracked(optimizer), 24, 24, seeded=True)
    assert not say(tracked(optimizer), 3, 0, seeded=False)
    kept = tracked(optimizer)
    kept.checkpoints = object()  # type: ignore[assignment]
    assert not say(kept, 3, 0, seeded=True)


@pytest.mark.parametrize(
    ("cause", "by_itself"), [(RebuildFailed("no way to rank 1"), True), (WornOut("all ports are used"), False)]
)
def test_who_cannot_be_connected_fails_by_itself(cause: Exception, by_itself: bool) -> None:
    """Else a rank that no process can connect would be replaced for ever."""
    told: list[tuple[str, bool]] = []

    def replaced(why: str, *, by_itself: bool = False) -> NoReturn:
        told.append((why, by_itself))
        raise SystemExit

    def run(*, staying: bool) -> bool:
        raise CannotConnect(str(cause)) from cause

    recovery: Any = object.__new__(Recovery)
    recovery.wait_quiet = lambda: None
    recovery._dry_runs = SimpleNamespace(leave=lambda: None)
    recovery._tracked, recovery._lookout = SimpleNamespace(messages=None), None
    recovery._place = SimpleNamespace(status="holding")
    recovery._rejoin = SimpleNamespace(run=run)
    recovery._out = SimpleNamespace(have_replaced=replaced)
    with pytest.raises(SystemExit):
        recovery.run()
    assert told == [(str(cause), by_itself)]


def test_who_pays_in_a_recovery_is_compared_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the iteration, and not with the learning rate that its script has set since."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    tracked = Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, supervisor)
    place.hold(tracked)
    place.status, place.here = "holding", Position(7)
    groups = ProcessGroups.__new__(ProcessGroups)
    dry_runs, out = DryRuns(place, groups), WaysOut(place, supervisor, MyStanding())
    comparison = Comparison(place, supervisor, groups, tracked, lambda why, hopeless: None)
    checks = Checks(place, supervisor, groups, out.restart_all)
    recovery = Recovery(
        place, supervisor, groups, tracked, torch.device("cpu"), dry_runs, out, checks, comparison=comparison
    )  # fmt: skip
    iterations = Iterations(
        place, supervisor, groups, tracked, recovery, dry_runs, out, MyStanding(), comparison
    )  # fmt: skip
    place.keep_start()
    optimizer.param_groups[0]["lr"] = 0.05  # by a scheduler, between iterations
    before = model.weight.detach().clone()

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def rejoin(*, staying: bool) -> bool:
        iterations.over._pay(train)
        return True

    compared: list[int] = []
    monkeypatch.setattr(recovery, "wait_quiet", lambda: None)
    monkeypatch.setattr(recovery, "_rejoin", SimpleNamespace(run=rejoin, iteration=7, phases_s={}))
    monkeypatch.setattr(comparison, "take", compared.append)
    recovery.run()
    assert compared == [8]  # the others: after iteration 7, when they have made it
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    assert place.here.iteration == 8 and optimizer.param_groups[0]["lr"] == 0.05
    assert comparison.is_ahead and comparison._ahead is not None
    taken = comparison._ahead[1]
    now = Fingerprints(tracked.state).take()
    assert taken.parts["hyper"]["lr of o"] == "0.1" and taken.parts["parameter"] == now.parts["parameter"]
    supervisor.close()
    theirs.close()


class Reader:
    """A loader of a script's own. *own*: of the rank."""

    def __init__(self, position: int, own: int) -> None:
        self.position, self.own = position, own

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position + self.own}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("name", ["loader", "reader"])
def test_state_that_differs_from_rank_to_rank_is_no_good_to_a_replacement(name: str) -> None:
    def tracked(own: int) -> Tracked:
        pending = {"models": {"m": nn.Linear(2, 1)}, "optimizers": {}, "others": {name: Reader(3, own)}}
        return Tracked(pending, [0, 1], 2, None)

    notes: list[str] = []
    protected: Any = object.__new__(Protected)
    protected.place, protected.supervisor = SimpleNamespace(rank=0), SimpleNamespace(note=notes.append)
    mine = tracked(0)
    protected._check_others(mine, [others.samples(one.state.others) for one in (mine, tracked(0))])
    assert not notes
    refused = pytest.raises(UsageError, match="differs from rank to rank")
    with refused if name == "loader" else contextlib.nullcontext():
        protected._check_others(mine, [others.samples(one.state.others) for one in (mine, tracked(4))])
    assert len(notes) == (name != "loader") and all("another state on other ranks" in note for note in notes)


def test_a_value_that_a_rank_has_by_itself_is_told_and_no_iteration_uses_it() -> None:
    """Of a section that the others had finished. After a point it may be used all the same, by what the script keeps;
    mostly it is only printed."""
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, supervisor)
    place.hold(tracked)
    place.status = "holding"
    groups: Any = SimpleNamespace(aborted=None, local=contextlib.nullcontext)
    protected = Protected(place, supervisor, groups, torch.device("cpu"), None)
    protected.assemble(tracked)
    agent = WorkerChannel(theirs)
    agent.sock.settimeout(5.0)
    given_up: list[str] = []

    def give_up(why: str) -> NoReturn:
        given_up.append(why)
        raise SystemExit

    def count() -> float:
        assert place.is_past_section
        place.local_result = "all_reduce (count, train.py:3)"  # as `Outside` does
        return 1.0

    protected.out.give_up = give_up  # type: ignore[assignment,method-assign]
    for _ in range(2):
        place.dry_sections += 1
        protected.section(count)
        protected.at_point()
    note = agent.receive()
    assert note["op"] == "note" and "had finished this section, so all_reduce (count, train.py:3) gave" in note["text"]
    assert not place.local_result and not place.is_past_section
    place.dry_sections += 1
    protected.section(count)
    with pytest.raises(SystemExit):
        protected.iterate(lambda: None)
    assert "Iteration 0 comes next and may use them" in given_up[0]
    assert place.here.iteration == 0
    supervisor.close()
    assert agent.sock.recv(1) == b"", "it is said once"
    agent.close()


def test_a_section_that_has_changed_what_is_not_kept_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large average among the models, which a section brings up to date: it would be done twice."""
    monkeypatch.setattr(by_hand, "EAGER_BYTES", 0)
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    model, average = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = {"models": {"m": model, "average": average}, "optimizers": {"o": optimizer}, "others": {}}
    place.hold(tracked := Tracked(pending, [0], 1, supervisor))
    place.status = "holding"
    groups: Any = SimpleNamespace(store=None, generation=1)
    protected: Any = Protected(place, supervisor, groups, torch.device("cpu"), None)
    recovery = protected.assemble(tracked).recovery
    replaced: list[str] = []
    num_runs = 0

    def replace(why: str) -> NoReturn:
        replaced.append(why)
        raise SystemExit

    def update(*, changes: bool) -> None:
        nonlocal num_runs
        num_runs += 1
        if changes:
            with torch.no_grad():
                average.weight.lerp_(model.weight, 0.5)
        if num_runs in (1, 3):
            raise dist.DistBackendError("a peer is lost")

    protected.out.have_replaced = replace
    recovery.was_cut = lambda error: isinstance(error, dist.DistBackendError)
    recovery.wait_quiet = lambda: None
    protected.section(lambda: update(changes=False))
    assert (num_runs, replaced) == (2, [])
    with pytest.raises(SystemExit):
        protected.section(lambda: update(changes=True))
    assert num_runs == 3 and "section 1 was interrupted after it had changed parameters that belong" in replaced[0]
    supervisor.close()
    theirs.close()


@pytest.mark.parametrize("run", ["iterate", "section"])
def test_an_error_of_the_scripts_own_reaches_the_user_at_once(run: str) -> None:
    """Whatever words it has: nobody is asked whether a peer is lost, which takes up to half a minute."""
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    place = Place(0, Seeds("iteration", 0, 0), supervisor.fence)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place.hold(tracked := Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, None))
    place.status = "holding"
    groups: Any = SimpleNamespace(aborted=None, local=contextlib.nullcontext, store=None, generation=1)
    protected = Protected(place, supervisor, groups, torch.device("cpu"), None)
    protected.assemble(tracked)
    asked: list[BaseException] = []
    supervisor.confirm = lambda error: bool(asked.append(error))  # type: ignore[method-assign]

    def fail() -> None:
        raise RuntimeError("connection to database timed out")

    with pytest.raises(RuntimeError, match="database") as caught:
        getattr(protected, run)(fail)
    assert not asked and is_own(caught.value)
    supervisor.close()
    theirs.close()
