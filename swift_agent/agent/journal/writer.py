"""Writes down what an agent's cores were asked and what they answered, for `swiftctl replay`.

One file per incarnation, `JOB.NODE.INCARNATION.jsonl`, readable by its owner only. The agent's loop and its coordinator
only put references into a queue; a thread of its own turns them into lines, so that neither waits for a disk. A journal
that cannot be written (disk full, slower than the job) ends with one warning; the job goes on without it.
Must never hold up the agent, nor write a secret.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from swift_agent.agent.journal.format import (
    FORMAT,
    NUM_VIEWS_KEPT,
    decision_plain,
    event_line,
    line_of,
    state_plain,
    view_changes,
)
from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import state as state_module
from swift_agent.version import __version__
from swift_rendezvous.codec import to_plain
from swift_rendezvous.node.coordinator import Planner
from swift_rendezvous.roster.decision import Decision, Rules
from swift_rendezvous.roster.records import GenerationRecord, NodeRecord, PlanRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.threads import NoThread, only_logged, start, thread

log = logging.getLogger(__name__)

# Of a disk that hangs; a view is some kilobytes, most entries are a tick.
MAX_QUEUED = 20_000
CLOSE_TIMEOUT_S = 2.0

Entry = Callable[[], list[dict[str, Any]]]


def open_journal(directory: str | None, job_id: str, me: NodeRecord, rules: Rules) -> Journal | None:
    """The journal of one incarnation, or None if none is wanted or it cannot be opened (which is said)."""
    if directory is None:
        return None
    path = os.path.join(directory, f"{job_id}.{me.node_id}.{me.incarnation}.jsonl")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("no journal is written: %s", error)
        return None
    header = {
        "journal": FORMAT, "version": __version__, "job": job_id, "node": me.node_id, "incarnation": me.incarnation,
        "rules": to_plain(rules), "time_s": time.time(), "now_s": time.monotonic(),
    }  # fmt: skip
    try:
        return Journal(fd, path, header)
    except NoThread as error:
        log.warning("no journal is written: %s", error)
        os.close(fd)
        os.unlink(path)
        return None


class Journal:
    """Made by `open_journal`. All methods may be called from any thread, never wait (but `close`) and never raise; to
    make one raises NoThread."""

    def __init__(self, fd: int, path: str, header: Mapping[str, Any]) -> None:
        self._fd, self.path = fd, path
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._ended = False
        # The writer's own: the last views that were introduced, the newest last, which has this number.
        self._views, self._number = deque([View()], maxlen=NUM_VIEWS_KEPT), 0
        self._put(lambda: [dict(header)])
        self._thread = thread("swift-journal", self._run, only_logged)
        start(self._thread)

    def begin(self, state: state_module.AgentState) -> None:
        """The state before the first event."""
        self._put(lambda: [{"state": state_plain(state)}])

    def event(self, event: msg.Event, now_s: float, commands: tuple[cmd.Command, ...]) -> None:
        self._put(lambda: self._event(event, now_s, commands))

    def decision(self, view: View, now_s: float, waiting_since_s: float | None, decision: Decision) -> None:
        """See `coordinator.Witness`, which this is."""
        self._put(lambda: self._decided(view, {"now_s": now_s, "waiting_since_s": waiting_since_s}, decision))

    def missing(
        self, view: View, now_s: float, absent_since_s: Mapping[str, float], unbroken_s: float, decision: Decision
    ) -> None:
        # JSON has no infinity, which stands for a store that was never away.
        unbroken = unbroken_s if math.isfinite(unbroken_s) else None
        asked = {"now_s": now_s, "absent_since_s": dict(absent_since_s), "unbroken_s": unbroken}
        self._put(lambda: self._decided(view, asked, decision))

    def planner(self, planner: Planner) -> Planner:
        """*planner*, with every plan written down. To be called on the last decision or its view."""

        def plan(generation: GenerationRecord, view: View) -> PlanRecord:
            made = planner(generation, view)
            # The coordinator plans a generation in place from its view, all others together with their decision.
            of = "view" if generation.asks else "decision"
            self._put(lambda: [{"plan": to_plain(made), "of": of}])
            return made

        return plan

    def close(self) -> None:
        """Write what is queued; what a hanging disk has not taken after a while is left out."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, entry: Entry) -> None:
        if self._ended:
            return
        if self._queue.qsize() >= MAX_QUEUED:
            self._end(f"the disk is slower than the job: {MAX_QUEUED} entries are waiting")
            return
        self._queue.put(entry)

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            log.warning("the journal %s ends here: %s", self.path, why)

    # ---- the writer's thread ----

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                if self._ended:
                    continue
                for line in entry():
                    self._write(line_of(line))
        except Exception as error:  # no defect in here may reach the job
            self._end(str(error))
        finally:
            self._ended = True
            os.close(self._fd)

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._fd, line) :]

    def _event(self, event: msg.Event, now_s: float, commands: tuple[cmd.Command, ...]) -> list[dict[str, Any]]:
        lines, number = self._introduce(event.view) if isinstance(event, msg.ViewChanged) else ([], None)
        return [*lines, event_line(event, now_s, commands, number)]

    def _decided(self, view: View, asked: Mapping[str, Any], decision: Decision) -> list[dict[str, Any]]:
        lines, number = self._introduce(view)
        return [*lines, {"decision": decision_plain(decision), "view": number, **asked}]

    def _introduce(self, view: View) -> tuple[list[dict[str, Any]], int]:
        """The number of *view*, and the line that introduces it unless it was introduced lately. The loop and the
        coordinator look at the same views, not always in the same order."""
        for before, known in enumerate(reversed(self._views)):
            if known is view:
                return [], self._number - before
        changes = view_changes(self._views[-1], view)
        self._views.append(view)
        self._number += 1
        return [{"view": self._number, "changes": changes}], self._number
