"""`swiftctl replay`: what today's cores say to what an agent's journal holds.

Reads one file. It must never write, nor ask etcd: journals are read where no job is.
"""

from __future__ import annotations

import json
from typing import Any

import click

from swift_agent.agent.journal.reading import JournalError
from swift_agent.agent.journal.replay import Replay
from swift_agent.agent.journal.replay import replay as replay_lines

DIFFERS = 3


@click.command()
@click.argument("journal", type=click.Path(exists=True, dir_okay=False, readable=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(journal: str, as_json: bool) -> None:
    """Feed JOURNAL, written by `swift-run --journal`, to the cores of this version and show the first difference.

    Exit codes: 0 the same, 1 no journal of this format, 2 a wrong command line, 3 something is decided differently.
    """
    try:
        with open(journal, "rb") as lines:
            found = replay_lines(lines)
    except (OSError, JournalError) as error:
        raise click.ClickException(f"{journal}: {error}") from None
    if as_json:
        click.echo(json.dumps(_to_json(found)))
    else:
        _show(found)
    if found.difference is not None:
        raise SystemExit(DIFFERS)


def _to_json(found: Replay) -> dict[str, Any]:
    difference = found.difference
    return {
        "verdict": "same" if difference is None else "differs",
        **{name: found.header.get(name) for name in ("job", "node", "incarnation", "version")},
        "num_events": found.num_events,
        "num_decisions": found.num_decisions,
        "num_plans": found.num_plans,
        "cut_at": found.cut_at,
        "difference": difference
        and {
            "line": difference.line, "what": difference.what, "asked": difference.asked,
            "then": difference.then, "today": difference.today,
        },
    }  # fmt: skip


def _show(found: Replay) -> None:
    header, difference = found.header, found.difference
    click.echo(
        f"job {header.get('job')}, node {header.get('node')}, incarnation {header.get('incarnation')}, "
        f"written by swift-agent {header.get('version')}"
    )
    if found.cut_at is not None:
        click.echo(f"the journal ends in the middle of line {found.cut_at}; it was read up to there")
    click.echo(
        f"compared {found.num_events} events, {found.num_decisions} decisions, {found.num_plans} plans: "
        + ("same" if difference is None else "the last one differs")
    )
    if difference is None:
        return
    click.echo(f"line {difference.line}, {difference.what}: {json.dumps(difference.asked)}")
    for line in difference.diff():
        click.echo(line)
