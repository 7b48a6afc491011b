"""All states of a small job, up to a bound, and proof that the search finds mistakes: planted ones must be found.

SWIFT_MODEL_STATES sets the number of states per search (default 2500). `-s` shows what was explored.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from swift_agent.agent import transactions
from swift_agent.agent.lifecycle import machine, steps
from swift_rendezvous.node import coordinator
from swift_rendezvous.roster import draining, losses, membership, mending, replacing, view
from swift_rendezvous.store import tenure
from tests.model import world as model
from tests.model.explore import explore
from tests.model.world import Action, World

MAX_STATES = int(os.environ.get("SWIFT_MODEL_STATES", "2500"))


def go_on(world: World, reached: Callable[[World], bool]) -> World:
    """Without failures, in one order, until *reached*."""
    for _ in range(200):
        if reached(world):
            return world
        world.do(world.actions()[0])
    raise AssertionError(f"not reached: {world.describe()}")


def training(**changes: Any) -> World:
    """Both workers are connected; nobody has finished."""
    world = go_on(World(ordered=True), lambda w: sum(n.proc is not None and n.proc.live > 0 for n in w.nodes) == 2)
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def ahead(**changes: Any) -> World:
    """The worker of slot 0 holds the state, and is an iteration ahead of the other."""
    world = training(**changes)
    world.do(("work", 0, 0))
    return world


def recovering(**changes: Any) -> World:
    """The worker of slot 0 was lost, and generation 2 begins."""
    world = training(faults=1)
    world.do(("kill", 0, 0))
    go_on(world, lambda w: w.view.number == 2)
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def joining(**changes: Any) -> World:
    """The node of slot 0 has crashed; the spare has its slot, and no state yet."""
    world = training(faults=1, kinds=("crash",), target=2)
    world.do(("work", 1, 0))
    world.do(("crash", 0, 0))
    world.do(("accuse", 1, 0))
    go_on(world, lambda w: w.view.number == 2)
    world.kinds = model.FAULTS
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def joining_again(**changes: Any) -> World:
    """As `joining`, with another slot, whose worker has been lost since: one node of three holds state."""
    world = World(4, 3, ordered=True, faults=2, kinds=("crash", "kill"), target=2)
    go_on(world, lambda w: sum(n.proc is not None and n.proc.live > 0 for n in w.nodes) == 3)
    world.do(("work", 1, 0))
    world.do(("work", 2, 0))
    world.do(("crash", 0, 0))
    world.do(("accuse", 1, 0))
    go_on(world, lambda w: w.view.number == 2)
    world.do(("kill", 2, 0))
    go_on(world, lambda w: w.view.number == 3)
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def draining_until(what: str, **changes: Any) -> World:
    """The node of slot 0 is drained: until its workers are asked where they are, or the spare has its slot."""
    world = training(faults=1, kinds=("drain",), target=2)
    generation = world.view.generation
    assert generation is not None
    world.do(("drain", int(generation.slots[0].node_id[1:]), 0))
    go_on(world, lambda w: w.view.pause is not None if what == "pause" else w.view.number == 2)
    world.kinds = (*model.FAULTS, "cancel")
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def cut_off(num_nodes: int, num_slots: int, **options: Any) -> World:
    """All train, and there is work left. etcd is about to be out of reach."""
    world = World(num_nodes, num_slots, ordered=True, target=3, **options)
    return go_on(world, lambda w: sum(n.proc is not None and n.proc.live > 0 for n in w.nodes) == num_slots)


def handing_over_alone(**changes: Any) -> World:
    """The only worker of a job is drained, and has handed nothing over yet."""
    world = cut_off(3, 1, faults=1, kinds=("drain",))
    generation = world.view.generation
    assert generation is not None
    world.do(("drain", int(generation.slots[0].node_id[1:]), 0))
    go_on(world, lambda w: w.view.number == 2)
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def given_away(num_nodes: int, num_slots: int, **options: Any) -> World:
    """The nodes of all slots are cut off from etcd, and their leases have ended."""
    world = cut_off(num_nodes, num_slots, faults=num_slots, kinds=("cut",))
    for what in ("cut", "doubt", "expire"):
        for index in range(num_slots):
            world.do((what, index, 0))
    for name, value in options.items():
        setattr(world, name, value)
    return world


SEARCHES: dict[str, Callable[[], World]] = {
    "no failure, every order": lambda: World(),
    "one failure from the start": lambda: World(faults=1, ordered=True),
    "two failures in training": lambda: training(faults=2),
    "two failures in a recovery": lambda: recovering(faults=2),
    "three crashes and kills": lambda: training(faults=3, kinds=("crash", "kill")),
    "leases are lost in training": lambda: training(faults=3, kinds=("lapse", "kill")),
    "a lease is lost in a recovery": lambda: recovering(faults=2, kinds=("lapse", "late", "freeze")),
    "a drain, every order": lambda: training(faults=1, kinds=("drain",), ordered=False, target=2),
    "one failure, or the order taken back, on the way to a boundary": lambda: draining_until("pause", faults=1),
    "one failure in a handover": lambda: draining_until("handover", faults=1),
    "leases are lost in a handover": lambda: draining_until("handover", faults=2, kinds=("lapse", "kill")),
    "a link is parted while the last copy is handed over": lambda: handing_over_alone(
        faults=2, kinds=("part",), ordered=False),
    "a lease is lost while the last copy is handed over": lambda: handing_over_alone(faults=2, kinds=("lapse", "part")),
    "a signal and a failure": lambda: training(faults=2, kinds=("signal", "kill", "crash")),
    "a signal, every order": lambda: training(faults=1, kinds=("signal",), ordered=False, target=2),
    "two nodes are told to go": lambda: training(faults=2, kinds=model.SIGNALS),
    "all nodes are told to go": lambda: training(faults=3, kinds=model.SIGNALS),
    "a signal in a recovery": lambda: recovering(faults=2, kinds=(*model.SIGNALS, "kill")),
    "a signal on the way to a boundary": lambda: draining_until("pause", faults=2, kinds=model.SIGNALS),
    "a signal in a handover": lambda: draining_until("handover", faults=2, kinds=model.SIGNALS),
    "one failure in a recovery, every order": lambda: recovering(faults=1, ordered=False),
    "two links are parted in training": lambda: training(faults=2, kinds=("part", "kill")),
    "a link is parted while a replacement has no state": lambda: joining(faults=1, kinds=("part",), ordered=False),
    "a link is parted while two of three have no state": lambda: joining_again(faults=1, kinds=("part",)),
    "a node is cut off while a replacement has no state": lambda: joining(faults=1, kinds=("cut",), ordered=False),
    "nodes are cut off from etcd, not from each other": lambda: cut_off(4, 2, faults=3, kinds=("cut",)),
    "the places of those who are cut off are given away": lambda: given_away(4, 2, faults=1, kinds=("cut", "kill")),
    "a single node is cut off from etcd": lambda: cut_off(2, 1, faults=3, kinds=("cut", "freeze")),
    "etcd is away for all, and a node is cut off": lambda: cut_off(3, 2, faults=3, kinds=("cut", "outage", "kill")),
    "two failures while a replacement has no state": lambda: joining(faults=2, kinds=("part", "kill", "late")),
    "a spare has been mistaken, and gets a slot": lambda: training(faults=2, kinds=(model.ALARM, "crash", "cut")),
    "a loss is told too late": lambda: training(faults=3, kinds=(model.STALE, "crash", "part")),
    "garbage in a record, and a failure, in training": lambda: training(faults=2, kinds=("garble", "remove", "kill")),
    "garbage in a record, and a failure, in a recovery": lambda: recovering(faults=2, kinds=("garble", "crash")),
    "garbage in a record on the way to a boundary": lambda: draining_until("pause", faults=1, kinds=("garble",)),
}


@pytest.mark.parametrize("start", SEARCHES.values(), ids=SEARCHES)
def test_every_state_is_sound(start: Callable[[], World]) -> None:
    found = explore(start(), MAX_STATES)
    print(found)
    assert not found.violation, f"{found}\n{found.trace}"
    assert found.num_states > 100


def patched(thing: Any, old: str, new: str, names: dict[str, Any]) -> Any:
    """*thing*, a function, with its source changed."""
    source = textwrap.dedent(inspect.getsource(thing))
    assert source.count(old) == 1, f"{source.count(old)} places for {old!r}"
    space = dict(names)
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), "<mutant>", "exec"), space)
    return space[thing.__name__]


# What is changed (owner, function), how, where the search begins, and what is wrong because of that.
MUTANTS: dict[str, tuple[Any, str, str, str, Callable[[], World], str]] = {
    "no fence on the generation": (
        transactions, "fence",
        'Compare.mod_revision(keys.generation, "==", view.generation_revision),', "",
        lambda: training(faults=2, kinds=("late", "kill")),
        "a late 'finished' of generation 1 counts in 2"),
    "no guard on the coordinator": (
        coordinator.Coordinator, "_execute",
        '[Compare.mod_revision(keys.coordinator, "==", view.coordinator_revision)]', "[]",
        lambda: training(faults=2, kinds=("freeze", "kill")),
        "n0.1 decides, but nobody coordinates"),
    "forgets a lost node after the generation, not with it": (
        coordinator.Coordinator, "_step",
        "if any(isinstance(command, PublishGeneration) for command in commands):", "if False:",
        lambda: training(faults=2, kinds=("crash",)),
        "a slot is given to a node that is lost: ['n1.1', 'n2.1']"),
    "a stale view writes progress": (
        transactions, "transaction_of",
        "    return Transaction(what, fence(keys, view, me), [Put(key, value)], lost_peer)",
        "    guards = [] if what == 'progress' else fence(keys, view, me)\n"
        "    return Transaction(what, guards, [Put(key, value)], lost_peer)",
        lambda: recovering(faults=2, kinds=("late", "kill")),
        "a late 'progress' of generation 2 counts in 3"),
    "a plan can be written twice": (
        coordinator.Coordinator, "_execute",
        'guards.append(self._unwritten(view, keys.plan(number)))', "pass",
        lambda: recovering(faults=2, kinds=("late", "crash")),
        "the plan of a generation is written twice"),
    "a lost node is taken for a spare": (
        replacing, "situation_of", "free = spares(view)",
        "free = [*(one for one in view.nodes.values() if old.slot_of(one.incarnation) in lost.nodes), *spares(view)]",
        lambda: training(faults=1, kinds=("crash",)),
        "a slot is given to {'n1.1'}, known to be lost"),
    "a boundary that somebody has passed": (
        draining, "boundary", "return max(view", "return min(view",
        lambda: training(faults=1, kinds=("drain",), target=2, ordered=False),
        "a worker has passed the boundary"),
    "a replacement without state is believed": (
        losses, "believed", "if not holders or not all(", "if True or not all(",
        lambda: joining(faults=1, kinds=("part",)),
        "n1 ends the last worker that holds the state"),
    "who was a replacement in an earlier generation is believed": (
        replacing, "bare_ranks", "for slot, ranks in generation.bare.items() if not done and slot not in view.resumed",
        "for slot, ranks in ()",
        lambda: joining_again(faults=1, kinds=("part",)),
        "n1 ends the last worker that holds the state"),
    "who is given up for what it said takes its place again": (
        machine, "_reconcile", "for o in absentees(view)",
        "for s, o in enumerate(generation.slots if generation else ()) if s not in view.failures",
        lambda: joining(faults=1, kinds=("part",), ordered=False),
        "it can go round for ever without a failure"),
    "what a spare once saw is told when it gets a slot": (
        machine, "_age", "> EVIDENCE_S and", "> 1e9 and",
        lambda: training(faults=2, kinds=(model.ALARM, "crash")),
        "told as a loss: a false alarm of long ago"),
    "a node whose workers have ended is believed against the last that holds state": (
        losses, "believed", " or _all_ended(generation, failures.get(other), other)", "",
        lambda: ahead(faults=2, kinds=("cut", "kill")),
        "{'n0.1'} hold the state, and all lose their slots"),
    "what a record was is compared with, not what is stored": (
        view, "_unread", "view = replace(view, generation_revision=revision)", "pass",
        lambda: training(faults=2, kinds=("garble", "kill")),
        "a decision of generation 0 in 1"),
    "nobody mends what the job cannot do without": (
        mending, "repairs", 'if "generation" in view.damaged and', "if False and",
        lambda: training(faults=2, kinds=("remove", "lapse")),
        "generation 2 is restored as another"),
    "a node that has told its end meanwhile is said to be lost": (
        coordinator.Coordinator, "_execute",
        "guards.append(self._unwritten(view, keys.exited(view.number, slot)))", "pass",
        lambda: training(faults=2, kinds=("part", "late")),
        "failed, though all have exited with code 0"),
    "a generation that was removed is forgotten": (
        view, "_read", "if view.generation is not None and view.job is not None:", "if False:",
        lambda: training(faults=2, kinds=("remove", "kill")),
        "the job stands still, though ['n0', 'n1', 'n2'] live"),
    "what cannot be read is not written again": (
        machine, "_written_again", "issued=state.issued & {RECLAIM}, ", "",
        lambda: training(faults=2, kinds=("garble", "kill")),
        "the job stands still, though ['n0', 'n1', 'n2'] live"),
    "who hears a peer goes on without etcd": (
        machine, "pausing", "if not holds:", "if False:",
        lambda: given_away(4, 2),
        "two owners train one rank: [0, 1, 0, 1]"),
    "a single node goes on without etcd": (
        machine, "pausing", "if not holds:", "if False:",
        lambda: cut_off(2, 1, faults=1, kinds=("cut",)),
        "two owners train one rank: [0, 0]"),
    "an etcd that does not answer is taken for one that is away": (
        tenure, "_seen", "if event.sight in PROVEN:", "if True:",
        lambda: cut_off(2, 1, faults=1, kinds=("cut",)),
        "two owners train one rank: [0, 0]"),
    "a node that is lost before its script has ended is no failure": (
        membership, "_lost_after_release", '"failed", why)),', '"succeeded", why)),',
        lambda: training(faults=1, kinds=("crash",)),
        "succeeded, but only [0] have exited"),
    "nobody notices that a drained node is lost": (
        draining, "broken_handovers", "if slot not in view.taken and not is_alive(view, owner)", "if False",
        lambda: draining_until("handover", faults=1),
        "the job stands still, though ['n1', 'n2'] live"),
    "a drained node is forgotten by one that cannot reach it": (
        steps, "slot_left", "return next(", "return None and next(",
        lambda: handing_over_alone(faults=1, kinds=("part",), ordered=False),
        "n0 ends the last worker that holds the state"),
    "the job ends when one node is told to go": (
        draining, "all_told", "if slot not in lost]", "if slot not in lost and owner.node_id in view.drains]",
        lambda: training(faults=2, kinds=("signal", "crash")),
        "the job ends, though nobody has told"),
    "the last checkpoint is waited for for ever": (
        membership, "_told_to_go", "is_saved = saves and draining.all_parked(view)", "is_saved = False",
        lambda: training(faults=3, kinds=("signal",), target=9),
        "nobody is left to train, and the job has not ended"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_search_finds_a_mistake(
    mutant: tuple[Any, str, str, str, Callable[[], World], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, old, new, start, wrong = mutant
    module = owner if isinstance(owner, ModuleType) else inspect.getmodule(owner)
    monkeypatch.setattr(owner, name, patched(getattr(owner, name), old, new, vars(module)))
    found = explore(start(), 20_000)
    print(found, found.trace)
    assert found.violation.startswith(f"Violation: {wrong}"), f"not found in {found}"


def test_a_trace_can_be_replayed() -> None:
    from tests.model.explore import replay

    trace: list[Action] = [("kill", 1, 0)]
    world = replay(training(faults=1), trace)
    assert model.KEYS.prefix and world.faults == 0
