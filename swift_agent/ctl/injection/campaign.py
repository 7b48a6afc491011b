"""`swiftctl campaign`: one fault after another, drawn from a seed, each once the job trains again; and a report of what
each of them has cost. Must never order the next one before the job has recovered from the last.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from swift_agent.ctl.common import needs_etcd, no_job, opened, output, records_of
from swift_agent.ctl.injection.draws import DEFAULT_KINDS, draws, fault_of
from swift_agent.ctl.injection.inject import new_id, order
from swift_agent.ctl.reports import jobs
from swift_agent.wire.injected import KINDS, Kind
from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, ResultRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValueStore

POLL_S = 0.1


@dataclass(frozen=True)
class Incident:
    """*generation*: that came of it, 0: none did. *recovered_s*: as the job tells it; *iteration*: with which it went
    on. *state*: `recovered`, `unnoticed` (nothing was lost), `refused`, `unanswered`, or `not recovered`."""

    number: int
    kind: str
    target: str
    moment: str
    state: str
    what: str = ""
    generation: int = 0
    recovered_s: float | None = None
    iteration: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict)


def _writable(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Told before the job is struck: afterwards the report would be lost."""
    if given is not None and (Path(given).is_dir() or not Path(given).parent.is_dir()):
        raise click.BadParameter(f"no file can be written at {given}; name one in a directory that exists")
    return given


@click.command()
@click.argument("job")
@click.option("--faults", "number", type=click.IntRange(min=1), default=10, show_default=True, metavar="N")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same faults.")
@click.option("--kinds", default=",".join(DEFAULT_KINDS), show_default=True, metavar="A,B", help="Of swiftctl inject.")
@click.option("--pause", "pause_s", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
              help="The job trains for up to so long between two faults.")
@click.option("--for", "for_s", type=float, default=2.0, show_default=True, metavar="S", help="As for swiftctl inject.")
@click.option("--bound", "bound_s", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="SECONDS",
              help="After so long without a recovery the campaign ends.")
@click.option("--until-end", is_flag=True, help="Wait for the end of the job, and report how it ended.")
@click.option("--report", callback=_writable, metavar="FILE", help="Write the report there, as JSON.")
@needs_etcd
def campaign(
    config: EtcdConfig, job: str, number: int, seed: int, kinds: str, pause_s: float, for_s: float, bound_s: float,
    until_end: bool, report: str | None,
) -> None:  # fmt: skip
    """Strike JOB with N faults, drawn from a seed, one after the other, and report each: what it was, how long the
    recovery took, with which iteration the job went on.

    Exit codes: 0 the job has recovered from all, and with --until-end has succeeded; 1 it has not, or nobody takes
    orders (swift-run --allow-injection), or etcd does not answer; 2 a wrong command line.
    """
    named = tuple(name.strip() for name in kinds.split(",") if name.strip())
    unknown = [name for name in named if name not in KINDS]
    if unknown or not named:
        raise click.UsageError(f"--kinds {kinds}: {', '.join(unknown) or 'none'}: type some of {','.join(KINDS)}")
    incidents: list[Incident] = []
    with opened(config) as store:
        keys = Keys(job)
        if jobs.view_of(job, records_of(store, config, job)).job is None:
            raise no_job(config, job)
        run = _Campaign(store, keys, bound_s, for_s)
        of_kinds: tuple[Kind, ...] = tuple(name for name in KINDS if name in named)
        for index, draw in enumerate(draws(seed, number, of_kinds), 1):
            time.sleep(draw.pause * pause_s)
            incident = run.strike(index, draw)
            incidents.append(incident)
            click.echo(_line(incident))
            if incident.state in ("not recovered", "unanswered", "job ended"):
                break
        result = run.wait_for_end() if until_end else run.result()
    failed = [one for one in incidents if one.state not in ("recovered", "unnoticed", "refused")]
    _show(incidents, result)
    if report:
        found = {
            "job": job, "seed": seed, "incidents": [asdict(one) for one in incidents],
            "result": None if result is None else {"state": result.state, "why": result.why},
        }  # fmt: skip
        Path(report).write_text(json.dumps(found, indent=2) + "\n")
    if failed or (until_end and (result is None or result.state != "succeeded")):
        raise click.exceptions.Exit(1)


class _Campaign:
    def __init__(self, store: KeyValueStore, keys: Keys, bound_s: float, for_s: float) -> None:
        self._store, self._keys, self._bound_s, self._for_s = store, keys, bound_s, for_s

    def strike(self, number: int, draw: Any) -> Incident:
        view = self._trains()
        fault = None if view is None else fault_of(draw, view, new_id(), self._for_s)
        if view is None or fault is None:
            ended = self.result()
            state = "job ended" if ended is not None else "not recovered"
            return Incident(number, draw.kind, "", "", state, ended.why if ended else "the job does not train")
        answer = order(self._store, self._keys, fault, self._bound_s)
        made = Incident(number, fault.kind, fault.target, fault.moment, answer["state"], answer["what"])
        if answer["state"] != "done":
            return made
        return self._followed(made, view, quiet_s=self._for_s + 3.0)

    def _followed(self, made: Incident, before: View, quiet_s: float) -> Incident:
        """Until the job trains again; a fault of which nobody has noticed anything for *quiet_s* was none."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < self._bound_s:
            time.sleep(POLL_S)
            view = self._view()
            if view.job is None or view.result is not None:
                why = view.result.why if view.result is not None else "its records are gone"
                return Incident(made.number, made.kind, made.target, made.moment, "job ended", why)
            is_quiet = view.number == before.number and not view.failures and len(view.nodes) >= len(before.nodes)
            if is_quiet and time.monotonic() - began_s > quiet_s and made.kind != "kill-worker":
                return Incident(made.number, made.kind, made.target, made.moment, "unnoticed", "nothing was lost")
            if view.number > before.number and view.recovered >= view.number:
                return self._recovered(made, view)
        return Incident(
            made.number, made.kind, made.target, made.moment, "not recovered", f"within {self._bound_s:g} s"
        )

    def _recovered(self, made: Incident, view: View) -> Incident:
        found = self._store.get(self._keys.recovery(view.number))
        try:
            event = decode(EventRecord, found.value) if found is not None else None
        except RecordError:
            event = None
        details = event.details if event is not None else {}
        phases = {name: float(seconds) for name, seconds in dict(details.get("phases_s", {})).items()}
        return Incident(
            made.number, made.kind, made.target, made.moment, "recovered", event.why if event is not None else "",
            view.number, phases.get("total"), details.get("iteration"), phases,
        )  # fmt: skip

    def _trains(self) -> View | None:
        """As soon as nothing is being recovered."""
        deadline_s = time.monotonic() + self._bound_s
        while time.monotonic() < deadline_s:
            view = self._view()
            if view.job is None or view.result is not None:
                return None
            here = {node.incarnation for node in view.nodes.values()}
            generation = view.generation
            if (
                generation is not None and not view.failures and view.tracked
                and (generation.number == 1 or view.recovered >= generation.number)
                and all(owner.incarnation in here for owner in generation.slots)
            ):  # fmt: skip
                return view
            time.sleep(POLL_S)
        return None

    def _view(self) -> View:
        entries, _ = self._store.get_prefix(self._keys.prefix)
        return jobs.view_of(self._keys.job_id, entries)

    def result(self) -> ResultRecord | None:
        return self._view().result

    def wait_for_end(self) -> ResultRecord | None:
        """The last node to leave removes the records: what was read before that counts."""
        known = None
        while True:
            view = self._view()
            known = view.result or known
            if view.job is None or known is not None:
                return known
            time.sleep(POLL_S)


def _line(incident: Incident) -> str:
    where = f"{incident.kind} of {incident.target}, {incident.moment}" if incident.target else incident.kind
    if incident.state == "recovered":
        took = f" in {incident.recovered_s:.3f} s" if incident.recovered_s is not None else ""
        return f"{incident.number}: {where}: recovered{took}, goes on at iteration {incident.iteration}"
    return f"{incident.number}: {where}: {incident.state}: {incident.what}"


def _show(incidents: list[Incident], result: ResultRecord | None) -> None:

    table = Table(box=None, pad_edge=False)
    for name in ("KIND", "FAULTS", "RECOVERED", "MEDIAN", "WORST"):
        table.add_column(name)
    for kind in dict.fromkeys(one.kind for one in incidents):
        of_kind = [one for one in incidents if one.kind == kind]
        times = sorted(one.recovered_s for one in of_kind if one.recovered_s is not None)
        median = f"{times[len(times) // 2]:.3f} s" if times else ""
        worst = f"{times[-1]:.3f} s" if times else ""
        table.add_row(kind, str(len(of_kind)), str(sum(one.state == "recovered" for one in of_kind)), median, worst)
    output().print(table)
    if result is not None:
        click.echo(f"the job has {result.state}: {result.why}")
