"""Decides which of its peers a node calls lost, from what it hears and does not hear. Pure.

Silence of a peer, or the end of its connection, makes a suspect of it; a suspect's *kernel* is probed before it is
called lost. A node that has heard no peer at all meanwhile may be cut off itself: it calls no peer lost before it
hears again, and gives them time to be found again. What happens comes in as calls, with the time where it matters;
what is to be done comes out as values. `liveness` has the sockets and threads.

    watched --silence, end of file, reset--> suspected --no answer to a probe--> lost
       ^------------------- its kernel answers --'

This module must never read a clock, open a socket or start a thread, nor decide what follows from a loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from swift_rendezvous.roster.records import NodeRecord

NUM_WATCHED = 2
MAX_PATIENCE_S = 2.0
RETURN_S = 1.5  # a network that is back finds its hosts again: a lost request for an address is repeated after 1 s
AT_ONCE_S = 0.2  # what TCP has to send again, because the line was cut, comes later than that


@dataclass(frozen=True)
class Limits:
    """When silence becomes a loss; all follows from the time between two heartbeats. Seconds."""

    heartbeat_s: float = 0.1

    @property
    def silence_s(self) -> float:
        """Without a sign of life for this long, a peer is suspected."""
        return 4 * self.heartbeat_s

    @property
    def probe_s(self) -> float:
        """The kernel of a suspect has this long to answer, over all probes."""
        return 2 * self.heartbeat_s

    @property
    def alone_s(self) -> float:
        """If no other is heard for this long after the last word of a peer, it may be this node that is cut off."""
        return 2 * self.heartbeat_s

    @property
    def doubt_s(self) -> float:
        """If nothing is heard for this long, the store is asked. What a cut that is over by then has swallowed is
        sent again before any peer is suspected."""
        return 1.5 * self.heartbeat_s

    @property
    def detection_s(self) -> tuple[float, float]:
        """The least and the most time from the end of a link to the verdict."""
        least = self.silence_s - self.heartbeat_s + self.probe_s
        return least, least + 2 * self.heartbeat_s


def ring_targets(me: str, incarnations: Iterable[str], num_watched: int = NUM_WATCHED) -> list[str]:
    """The *num_watched* successors of *me* in the ring of all incarnations."""
    ring = sorted({*incarnations, me})
    start = ring.index(me)
    return [ring[(start + step) % len(ring)] for step in range(1, min(num_watched, len(ring) - 1) + 1)]


def targets(me: str, incarnations: Iterable[str], with_slots: Collection[str]) -> list[str]:
    """Whom *me* watches: its successors among all, and if it has a slot among those with one. Of a slot that is merely
    silent only they tell who train with it, so spares in between must not be all that watch it."""
    found = ring_targets(me, incarnations)
    if me in with_slots:
        found += [one for one in ring_targets(me, with_slots) if one not in found]
    return found


@dataclass(frozen=True)
class Silence:
    """How long one peer may still be silent. *check_s*: when it is looked at. *patience_s*: how long it was left alone
    the last time that its kernel was probed."""

    heard_s: float
    check_s: float
    patience_s: float = 0.0

    @classmethod
    def since(cls, now_s: float, limits: Limits) -> Silence:
        """That of a peer whose connection was just made."""
        return cls(now_s, now_s + limits.silence_s)

    def broken(self, now_s: float) -> Silence:
        """The peer was heard."""
        return replace(self, heard_s=now_s, patience_s=0.0)

    def checked(self, now_s: float, limits: Limits) -> tuple[Silence, float | None]:
        """The peer is looked at; for how many seconds it was silent if that makes a suspect of it."""
        if now_s < self.check_s:
            return self, None
        due_s = self.heard_s + limits.silence_s
        if now_s < due_s:  # not by the difference, which rounding may leave below the limit for ever
            return replace(self, check_s=due_s), None
        # If its kernel answers it is asked again, less and less often.
        patience_s = min(max(limits.silence_s, 2 * self.patience_s), MAX_PATIENCE_S)
        return Silence(self.heard_s, now_s + limits.probe_s + patience_s, patience_s), now_s - self.heard_s


@dataclass(frozen=True)
class Line:
    """What this node knows of its own way to all others.

    *life_s*: when anything at all was heard last. *asked_s*: when the store was asked first, in the silence that lasts
    if it is a later one. *back_s*: when something was heard again after nothing had been. *no_ask_until_s*: there was
    no thread to ask in.
    """

    life_s: float
    asked_s: float = -RETURN_S
    back_s: float = -RETURN_S
    no_ask_until_s: float = 0.0

    @property
    def is_asking(self) -> bool:
        """The store was asked in the silence that lasts."""
        return self.asked_s > self.life_s

    def asked(self, now_s: float) -> Line:
        return self if self.is_asking else replace(self, asked_s=now_s)

    def heard(self, now_s: float, limits: Limits, was_there: bool = False, unasked: bool = False) -> Line:
        """A peer, or the store, gives a sign of life. *was_there*: and would have done so before. *unasked*: it is a
        peer that speaks by itself."""
        # What was asked answers at once, unless the line was cut; else all that speak unasked were merely silent. A
        # peer that speaks first, while the store still owes its answer, may be what a shorter cut had swallowed: the
        # next heartbeat has TCP send that again sooner.
        if not self.is_asking:
            since_s, longest_s = self.life_s, limits.silence_s
        elif unasked:
            since_s, longest_s = self.life_s, limits.alone_s
        else:
            since_s, longest_s = self.asked_s, AT_ONCE_S
        is_back = not was_there and now_s - since_s > longest_s
        return replace(self, life_s=now_s, back_s=now_s if is_back else self.back_s)


@dataclass(frozen=True)
class Suspect:
    """Why one peer may be lost. *silent_since_s*: when it was heard last. *was_closed*: its kernel has ended a
    connection. If it refuses the next one as well the process is gone; a refusal alone may come from a firewall."""

    incarnation: str
    evidence: str
    silent_since_s: float
    was_closed: bool = False


class Answer(NamedTuple):
    """What the kernel of a suspect says to a probe. *says*: None if it keeps a connection open for us, or could not be
    asked. *refuses*: no process listens there any more; a way that is closed says nothing of the process at its end."""

    says: str | None
    refuses: bool

    @property
    def is_final(self) -> bool:
        """Asking again would change nothing. A refusal is an answer, so that a death that the kernel has told
        waits for no other answer."""
        return self.says is None or self.refuses


LIVES = Answer(None, False)


@dataclass(frozen=True)
class Loss:
    """The verdict. *is_dead*: the kernel of the peer has closed the connection and refuses another."""

    incarnation: str
    evidence: str
    is_dead: bool


Step = Literal["probe", "ask", "pause", "end"]


@dataclass
class Inquiry:
    """How far a suspect was looked into. *answer*: the last one to a probe; the prober writes it here.
    *until_s*: until then the way to the suspect may still be found again."""

    node: NodeRecord
    suspect: Suspect
    answer: Answer = LIVES
    stage: Literal["begun", "early", "asked", "paused", "probing"] = "begun"
    until_s: float = 0.0


class Suspicion:
    """What one node makes of its peers. Not thread-safe: a lock of its owner guards it.

    *can_ask*: there is a store to ask, which is no peer, so that this node can tell whether it is the one that is cut
    off. Without that a silence of all counts like any other.
    """

    def __init__(self, limits: Limits, now_s: float, can_ask: bool) -> None:
        self.known: dict[str, NodeRecord] = {}
        self.line = Line(now_s)
        self.has_ended = False
        self._limits, self._can_ask = limits, can_ask
        self._with_slots: Collection[str] = ()
        self._targets: list[str] | None = None  # see `targets`; None: to be worked out
        self._dialled: set[str] = set()  # dialling or dialled
        self._probed: set[str] = set()
        self._reported: set[str] = set()
        self._departed: set[str] = set()

    # ---- which nodes are in the job, and which to watch ----

    def on_nodes(self, nodes: Iterable[NodeRecord], now_s: float, with_slots: Collection[str] = ()) -> None:
        """Which nodes are in the job now, and by incarnation those that have a slot."""
        if len(self.known) < 2:  # there was no peer to be heard
            self.line = replace(self.line, life_s=now_s)
        self.known = {node.incarnation: node for node in nodes}
        self._with_slots = self.known.keys() & with_slots
        self._targets = None

    def to_dial(self, me: str) -> list[NodeRecord]:
        """Those that *me* watches and has no connection to; they count as dialled from now on."""
        if self._targets is None:  # not with every heartbeat: it sorts all nodes
            self._targets = targets(me, self.known, self._with_slots)
        passed_over = self._dialled | self._reported | self._departed
        wanted = [self.known[incarnation] for incarnation in self._targets if incarnation not in passed_over]
        self._dialled.update(node.incarnation for node in wanted)
        return wanted

    def on_hung_up(self, incarnation: str) -> None:
        """The connection that was dialled is gone, or was never made: it may be dialled again."""
        self._dialled.discard(incarnation)

    def on_goodbye(self, incarnation: str) -> None:
        """A peer leaves. Its record may outlive its listener by a moment: not to be found there is no loss."""
        self._departed.add(incarnation)

    def on_end(self) -> None:
        """This node leaves: no peer is suspected or lost from now on."""
        self.has_ended = True

    # ---- this node's own line ----

    def on_sign(self, now_s: float, was_there: bool = False, unasked: bool = False) -> None:
        """A sign of life; see `Line.heard`."""
        self.line = self.line.heard(now_s, self._limits, was_there, unasked)

    def doubt_due_s(self, is_watching: bool) -> float | None:
        """When the store is to be asked if all stay silent; None: never. *is_watching*: there are peers to be heard."""
        if not (self._can_ask and is_watching) or self.line.is_asking:
            return None
        return max(self.line.life_s + self._limits.doubt_s, self.line.no_ask_until_s)

    def doubts(self, now_s: float, is_watching: bool) -> bool:
        """Nothing at all is heard: the store has to be asked, to know if the line is there. Counts as asked."""
        due_s = self.doubt_due_s(is_watching)
        if due_s is None or now_s < due_s:
            return False
        self.line = self.line.asked(now_s)
        return True

    def on_not_asked(self, before: Line, now_s: float) -> None:
        """There was no thread to ask in. *before*: the line before `doubts`."""
        until_s = now_s + self._limits.heartbeat_s
        self.line = replace(self.line, asked_s=before.asked_s, no_ask_until_s=until_s)

    # ---- suspects ----

    def look_into(self, suspect: Suspect) -> Inquiry | None:
        """Begin with a suspect; None: there is nothing to look into, or a thread is at it."""
        node = self.known.get(suspect.incarnation)
        passed_over = self._reported | self._departed | self._probed
        if node is None or self.has_ended or suspect.incarnation in passed_over:
            return None
        self._probed.add(suspect.incarnation)
        return Inquiry(node, suspect)

    def on_not_looked_into(self, incarnation: str) -> None:
        """There was no thread to look into it."""
        self._probed.discard(incarnation)

    def next_step(self, inquiry: Inquiry, now_s: float) -> Step:
        """What is to be done next: `probe` the suspect's kernel, `ask` the store, which is no peer, whether the line
        is there, `pause` before that is asked again, or `end`: then `judge`.

        An answer counts if anything was heard before its probe, later than shortly after the suspect's last word: a
        node that is cut off is told nothing.
        """
        sign_s = inquiry.suspect.silent_since_s + self._limits.alone_s
        match inquiry.stage:
            case "begun" if not self._can_ask:
                return self._begin_probing(inquiry)
            case "begun" if now_s < sign_s:
                inquiry.stage = "early"
                return "probe"
            case "early" | "probing" if inquiry.answer.is_final:
                return "end"
            case "probing":
                return "end" if now_s > inquiry.until_s else "probe"
            case "begun" | "early":
                self.line = self.line.asked(now_s)
        if self.line.life_s > sign_s:
            return self._begin_probing(inquiry)
        if self.has_ended or inquiry.suspect.incarnation not in self.known:
            inquiry.answer = LIVES  # it does not matter any more
            return "end"
        inquiry.stage = "paused" if inquiry.stage == "asked" else "asked"
        return "ask" if inquiry.stage == "asked" else "pause"

    def _begin_probing(self, inquiry: Inquiry) -> Step:
        inquiry.stage, inquiry.until_s = "probing", self.line.back_s + RETURN_S
        return "probe"

    def judge(self, inquiry: Inquiry) -> Loss | None:
        """The verdict on a suspect that was looked into; once per lost incarnation, unless `reconsider` is called."""
        suspect, answer = inquiry.suspect, inquiry.answer
        self._probed.discard(suspect.incarnation)
        # It may have left, or been taken out of the job, while it was asked.
        is_in_job = suspect.incarnation in self.known and suspect.incarnation not in self._departed
        if answer.says is None or not is_in_job or self.has_ended:
            return None
        self._reported.add(suspect.incarnation)
        evidence = f"{suspect.evidence}; its port answers: {answer.says}"
        return Loss(suspect.incarnation, evidence, answer.refuses and suspect.was_closed)

    def reconsider(self, incarnation: str) -> None:
        """The loss that was reported could not be acted on in time: look again whether it is one."""
        self._reported.discard(incarnation)
