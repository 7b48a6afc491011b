"""Who is lost, of the peers that a node watches: what it heard, and when, decides; there is no clock and no socket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_rendezvous.node.suspicion import (
    AT_ONCE_S,
    LIVES,
    MAX_PATIENCE_S,
    RETURN_S,
    Answer,
    Inquiry,
    Limits,
    Line,
    Loss,
    Silence,
    Suspect,
    Suspicion,
    ring_targets,
    targets,
)
from tests.support.records import node

LIMITS = Limits()
NODES = [node(name) for name in "abcd"]
A, B, C, D = (one.incarnation for one in NODES)
REFUSED = Answer("Connection refused", True)
SILENT = Answer("nothing", False)
RESET = Answer("it hangs up", False)


def watching(can_ask: bool = False, now_s: float = 10.0) -> Suspicion:
    suspicion = Suspicion(LIMITS, now_s, can_ask)
    suspicion.on_nodes(NODES, now_s)
    assert [one.incarnation for one in suspicion.to_dial(A)] == [B, C]
    return suspicion


def begun(suspicion: Suspicion, suspect: Suspect) -> Inquiry:
    inquiry = suspicion.look_into(suspect)
    assert inquiry is not None
    return inquiry


def judged(suspicion: Suspicion, suspect: Suspect, answer: Answer) -> Loss | None:
    """The verdict where *answer* is what every probe hears."""
    inquiry, now_s = begun(suspicion, suspect), suspect.silent_since_s + LIMITS.silence_s
    while suspicion.next_step(inquiry, now_s) == "probe":
        inquiry.answer, now_s = answer, now_s + LIMITS.probe_s
    return suspicion.judge(inquiry)


# ---- one peer that is silent ----


@pytest.mark.parametrize(
    ("heard_s", "now_s", "check_s", "silent_s"),
    [
        (10.0, 10.39, 10.4, None),  # not due
        (10.2, 10.4, 10.6, None),  # heard meanwhile: due again
        (10.0, 10.4, 11.0, 0.4),  # suspected; if its kernel answers there is some patience
        (10.0, 13.0, 13.6, 3.0),  # this node could not run for a while
    ],
)
def test_when_silence_makes_a_suspect(heard_s: float, now_s: float, check_s: float, silent_s: float | None) -> None:
    silence, found = Silence.since(10.0, LIMITS).broken(heard_s).checked(now_s, LIMITS)
    assert silence.check_s == pytest.approx(check_s) and silence.heard_s == heard_s
    assert found == (None if silent_s is None else pytest.approx(silent_s))


def test_who_stays_silent_is_asked_less_and_less_often_and_at_once_again_after_a_word() -> None:
    silence, waits_s = Silence.since(10.0, LIMITS), []
    for _ in range(5):
        before_s = silence.check_s
        silence, silent_s = silence.checked(before_s, LIMITS)
        assert silent_s is not None
        waits_s.append(silence.check_s - before_s - LIMITS.probe_s)
    assert waits_s == pytest.approx([0.4, 0.8, 1.6, MAX_PATIENCE_S, MAX_PATIENCE_S])
    assert silence.broken(30.0).patience_s == 0.0


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=60), st.floats(0.02, 0.5))
def test_who_is_heard_in_time_is_never_suspected_and_who_is_not_is(gaps_s: list[float], heartbeat_s: float) -> None:
    """Heartbeats with any gaps, looked at a moment after that is due."""
    limits, moment_s, now_s = Limits(heartbeat_s), 1e-4, 100.0
    silence = Silence.since(now_s, limits)
    for gap_s in gaps_s:
        while silence.check_s + moment_s < now_s + gap_s:
            silence, silent_s = silence.checked(silence.check_s + moment_s, limits)
            if silent_s is not None:
                assert silent_s == pytest.approx(limits.silence_s, abs=2 * moment_s)
                assert gap_s > limits.silence_s
                return
        assert gap_s < limits.silence_s + 2 * moment_s
        now_s += gap_s
        silence = silence.broken(now_s)


# ---- this node's own line ----


@pytest.mark.parametrize(
    ("line", "now_s", "was_there", "is_back"),
    [
        (Line(10.0), 10.39, False, False),  # nobody was asked: as long as a peer may be silent
        (Line(10.0), 10.41, False, True),
        (Line(10.0), 10.5, True, False),  # it was probed, and would have answered before
        (Line(10.0, asked_s=10.15), 10.15 + AT_ONCE_S - 0.01, False, False),
        (Line(10.0, asked_s=10.15), 10.15 + AT_ONCE_S + 0.01, False, True),  # what TCP sends again comes later
        (Line(10.0, asked_s=10.15), 10.15 + AT_ONCE_S + 0.01, True, False),
        (Line(10.0, asked_s=9.0), 10.3, False, False),  # that was in an earlier silence
    ],
)
def test_whether_the_line_was_cut_and_is_back(line: Line, now_s: float, was_there: bool, is_back: bool) -> None:
    heard = line.heard(now_s, LIMITS, was_there)
    assert heard == replace(line, life_s=now_s, back_s=now_s if is_back else line.back_s)
    assert not heard.is_asking


@pytest.mark.parametrize(
    ("line", "now_s", "is_back"),
    [
        (Line(10.0, asked_s=10.15), 10.19, False),  # the answer of the store is only a moment behind
        (Line(10.0, asked_s=10.15), 10.26, True),
        (Line(10.0, asked_s=10.25), 10.26, True),  # this process could not run: asked late it knows no better
        (Line(10.0, asked_s=9.0), 10.3, False),
    ],
)
def test_a_peer_that_speaks_before_the_store_answers_may_have_been_cut_off(
    line: Line, now_s: float, is_back: bool
) -> None:
    heard = line.heard(now_s, LIMITS, unasked=True)
    assert heard == replace(line, life_s=now_s, back_s=now_s if is_back else line.back_s)


def test_who_was_cut_off_for_less_than_a_silence_waits_for_all_to_be_found_again() -> None:
    """The cable is out for 0.25 s; one peer is heard as it is back, the way to the other one is found a second later.
    """
    suspicion = watching(can_ask=True)
    suspicion.on_sign(10.0)
    assert suspicion.doubts(10.15, True)
    suspicion.on_sign(10.3, unasked=True)
    inquiry = begun(suspicion, Suspect(B, "silent", 10.0))
    assert suspicion.next_step(inquiry, 10.4) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 10.6) == "probe"
    inquiry.answer = LIVES
    assert suspicion.next_step(inquiry, 11.3) == "end" and suspicion.judge(inquiry) is None


def test_somebody_is_asked_once_in_a_silence_of_all() -> None:
    suspicion = watching(can_ask=True)
    due_s = 10.0 + LIMITS.doubt_s
    assert suspicion.doubt_due_s(is_watching=False) is None and not suspicion.doubts(due_s, is_watching=False)
    assert suspicion.doubt_due_s(is_watching=True) == pytest.approx(due_s)
    assert not suspicion.doubts(due_s - 0.01, is_watching=True)
    assert suspicion.doubts(due_s + 0.001, is_watching=True)
    assert suspicion.doubt_due_s(is_watching=True) is None and not suspicion.doubts(99.0, is_watching=True)
    suspicion.on_sign(20.0)
    assert suspicion.doubt_due_s(is_watching=True) == pytest.approx(20.0 + LIMITS.doubt_s)


def test_who_could_not_be_asked_for_want_of_a_thread_is_asked_a_heartbeat_later() -> None:
    suspicion = watching(can_ask=True)
    before = suspicion.line
    assert suspicion.doubts(10.2, is_watching=True)
    suspicion.on_not_asked(before, 10.2)
    assert suspicion.doubt_due_s(is_watching=True) == pytest.approx(10.2 + LIMITS.heartbeat_s)
    assert not suspicion.doubts(10.25, is_watching=True) and suspicion.doubts(10.31, is_watching=True)


def test_nobody_is_asked_where_there_is_nobody() -> None:
    suspicion = watching(can_ask=False)
    assert suspicion.doubt_due_s(is_watching=True) is None and not suspicion.doubts(99.0, is_watching=True)


def test_nobody_could_have_been_heard_before_there_were_two() -> None:
    suspicion = Suspicion(LIMITS, 10.0, can_ask=True)
    suspicion.on_nodes(NODES[:1], 20.0)
    assert suspicion.line.life_s == 20.0
    suspicion.on_nodes(NODES, 30.0)
    assert suspicion.line.life_s == 30.0
    suspicion.on_nodes(NODES, 40.0)
    assert suspicion.line.life_s == 30.0


# ---- whom to dial ----


def test_who_is_dialled_and_who_is_not() -> None:
    suspicion = watching()
    assert suspicion.to_dial(A) == []
    suspicion.on_hung_up(B)
    assert [one.incarnation for one in suspicion.to_dial(A)] == [B]
    suspicion.on_hung_up(B)
    suspicion.on_goodbye(B)
    assert suspicion.to_dial(A) == []
    suspicion.on_nodes([NODES[0], *NODES[2:]], 11.0)
    assert [one.incarnation for one in suspicion.to_dial(A)] == [D]


def test_who_was_reported_is_not_dialled_until_it_is_reconsidered() -> None:
    suspicion = watching()
    assert judged(suspicion, Suspect(B, "silent", 10.0), REFUSED)
    suspicion.on_hung_up(B)
    assert suspicion.to_dial(A) == []
    suspicion.reconsider(B)
    assert [one.incarnation for one in suspicion.to_dial(A)] == [B]


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=12), st.integers(0, 4))
def test_each_is_watched_by_as_many_as_it_watches(names: set[str], num: int) -> None:
    watched = [target for me in names for target in ring_targets(me, names, num)]
    assert all(watched.count(name) == min(num, len(names) - 1) for name in names)
    assert all(me not in ring_targets(me, names, num) for me in names)


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=12), st.data())
def test_who_has_a_slot_is_watched_by_others_that_have_one(names: set[str], data: st.DataObject) -> None:
    slots = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=2))
    for name in slots:
        watchers = [me for me in slots if name in targets(me, names, slots)]
        assert len(watchers) >= min(2, len(slots) - 1)
    for me in names:
        found = targets(me, names, slots)
        assert me not in found and len(found) == len(set(found)) <= 4
        assert set(ring_targets(me, names)) <= set(found)
        assert me in slots or found == ring_targets(me, names)
    assert targets(min(names), names, names) == ring_targets(min(names), names), "without spares it is one ring"


def test_who_gets_a_slot_watches_others_that_have_one() -> None:
    suspicion = watching()
    suspicion.on_nodes(NODES, 11.0, {A, NODES[3].incarnation})
    assert NODES[3].incarnation in [one.incarnation for one in suspicion.to_dial(A)]


# ---- suspects ----


@pytest.mark.parametrize(
    ("answer", "was_closed", "is_lost", "is_dead"),
    [
        (LIVES, False, False, False),
        (LIVES, True, False, False),  # a connection that was merely reset
        (REFUSED, True, True, True),
        (REFUSED, False, True, False),  # maybe a firewall
        (SILENT, False, True, False),
        (SILENT, True, True, False),
        (RESET, True, True, False),
    ],
)
def test_what_an_answer_means(answer: Answer, was_closed: bool, is_lost: bool, is_dead: bool) -> None:
    loss = judged(watching(), Suspect(B, "its agent was silent", 10.0, was_closed), answer)
    expected = Loss(B, f"its agent was silent; its port answers: {answer.says}", is_dead)
    assert loss == (expected if is_lost else None)


def test_a_loss_is_told_once_and_once_more_when_it_is_reconsidered() -> None:
    suspicion, suspect = watching(), Suspect(B, "silent", 10.0)
    assert judged(suspicion, suspect, SILENT) is not None
    assert suspicion.look_into(suspect) is None
    suspicion.reconsider(B)
    assert judged(suspicion, suspect, SILENT) is not None


def test_who_lives_may_be_suspected_again() -> None:
    suspicion, suspect = watching(), Suspect(B, "silent", 10.0)
    assert judged(suspicion, suspect, LIVES) is None
    assert judged(suspicion, suspect, SILENT) is not None


def test_one_looks_into_a_suspect_at_a_time() -> None:
    suspicion, suspect = watching(), Suspect(B, "silent", 10.0)
    begun(suspicion, suspect)
    assert suspicion.look_into(suspect) is None
    suspicion.on_not_looked_into(B)
    begun(suspicion, suspect)


def test_who_is_not_in_the_job_or_has_left_is_no_suspect_nor_is_anybody_once_this_node_leaves() -> None:
    suspicion = watching()
    assert suspicion.look_into(Suspect("a stranger", "silent", 10.0)) is None
    suspicion.on_goodbye(B)
    assert suspicion.look_into(Suspect(B, "closed", 10.0)) is None
    suspicion.on_end()
    assert suspicion.look_into(Suspect(C, "closed", 10.0)) is None


@pytest.mark.parametrize("what", ["left", "taken out", "this node leaves"])
def test_who_is_gone_when_the_answer_comes_is_not_lost(what: str) -> None:
    suspicion = watching()
    inquiry = begun(suspicion, Suspect(B, "closed", 10.0))
    inquiry.answer = REFUSED
    if what == "left":
        suspicion.on_goodbye(B)
    elif what == "taken out":
        suspicion.on_nodes([NODES[0], *NODES[2:]], 10.1)
    else:
        suspicion.on_end()
    assert suspicion.judge(inquiry) is None


# ---- looking into one, step by step, where somebody can be asked ----


def test_a_death_that_the_kernel_has_told_waits_for_nobody() -> None:
    suspicion = watching(can_ask=True)
    inquiry = begun(suspicion, Suspect(B, "closed", 10.0, was_closed=True))
    assert suspicion.next_step(inquiry, 10.01) == "probe"
    inquiry.answer = REFUSED
    assert suspicion.next_step(inquiry, 10.02) == "end"
    loss = suspicion.judge(inquiry)
    assert loss is not None and loss.is_dead


def test_who_has_heard_from_nobody_asks_until_it_is_answered_and_then_probes() -> None:
    suspicion = watching(can_ask=True)
    inquiry = begun(suspicion, Suspect(B, "silent", 10.0))
    assert [suspicion.next_step(inquiry, 10.4 + 0.05 * n) for n in range(4)] == ["ask", "pause", "ask", "pause"]
    assert suspicion.line.asked_s == 10.4
    suspicion.on_sign(12.0)  # much later than at once: this node was cut off
    assert suspicion.line.back_s == 12.0
    assert suspicion.next_step(inquiry, 12.0) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 12.0 + RETURN_S) == "probe"  # the others have time to be found again
    assert suspicion.next_step(inquiry, 12.0 + RETURN_S + 0.01) == "end"
    assert suspicion.judge(inquiry) is not None


def test_who_is_found_again_after_a_cut_is_not_lost() -> None:
    suspicion = watching(can_ask=True)
    inquiry = begun(suspicion, Suspect(B, "silent", 10.0))
    assert suspicion.next_step(inquiry, 10.4) == "ask"
    suspicion.on_sign(12.0)
    assert suspicion.next_step(inquiry, 12.0) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 12.2) == "probe"
    inquiry.answer = LIVES
    assert suspicion.next_step(inquiry, 12.3) == "end" and suspicion.judge(inquiry) is None


def test_another_that_was_heard_after_the_last_word_is_enough() -> None:
    suspicion = watching(can_ask=True)
    suspicion.on_sign(10.39)
    inquiry = begun(suspicion, Suspect(B, "silent", 10.0))
    assert suspicion.next_step(inquiry, 10.4) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 10.6) == "end"
    assert suspicion.judge(inquiry) is not None


def test_an_early_answer_that_is_none_does_not_count() -> None:
    suspicion = watching(can_ask=True)
    inquiry = begun(suspicion, Suspect(B, "reset", 10.0, was_closed=True))
    assert suspicion.next_step(inquiry, 10.1) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 10.3) == "ask"
    suspicion.on_sign(10.31)
    assert suspicion.next_step(inquiry, 10.31) == "probe"


@pytest.mark.parametrize("what", ["taken out", "this node leaves"])
def test_nobody_is_waited_for_where_it_does_not_matter_any_more(what: str) -> None:
    suspicion = watching(can_ask=True)
    inquiry = begun(suspicion, Suspect(B, "reset", 10.0))
    assert suspicion.next_step(inquiry, 10.1) == "probe"
    inquiry.answer = SILENT
    assert suspicion.next_step(inquiry, 10.3) == "ask"
    if what == "taken out":
        suspicion.on_nodes([NODES[0], *NODES[2:]], 10.3)
    else:
        suspicion.on_end()
    assert suspicion.next_step(inquiry, 10.4) == "end"
    assert inquiry.answer == LIVES and suspicion.judge(inquiry) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 3.0), st.booleans(), st.sampled_from([LIVES, REFUSED, SILENT, RESET])),
             max_size=40),
    st.booleans(),
)  # fmt: skip
def test_nobody_is_lost_by_who_heard_from_nobody_unless_a_kernel_refuses(
    happens: list[tuple[float, bool, Answer]], was_closed: bool
) -> None:
    """Any signs of life at any time, any answers to probes."""
    suspicion = watching(can_ask=True)
    inquiry, now_s, answers, heard = begun(suspicion, Suspect(B, "silent", 10.0, was_closed)), 10.0, [], False
    for pause_s, is_sign, answer in happens:
        now_s += pause_s
        if is_sign:
            suspicion.on_sign(now_s)
            heard = heard or now_s > 10.0 + LIMITS.alone_s
        match suspicion.next_step(inquiry, now_s):
            case "probe":
                inquiry.answer = answer
                answers.append(answer)
            case "end":
                loss = suspicion.judge(inquiry)
                assert (loss is not None) <= (heard or REFUSED in answers)
                assert (loss is not None) <= (LIVES not in answers)
                assert (loss is not None and loss.is_dead) <= (was_closed and answers[-1] == REFUSED)
                return
