"""`swiftctl timeline`: what a job went through, as a text, as JSON, or as one page to look at.

Reads etcd's records of a running job, or journals, also of a job that has ended. Writes one file, if it is told to:
whole, or not at all. Must never write into etcd.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path

import click

from swift_agent.agent.journal.reading import JournalError
from swift_agent.ctl.common import etcd_options, opened, records_of
from swift_agent.ctl.timeline import from_etcd, from_journals, model, text
from swift_agent.ctl.timeline.assemble import Known, assemble
from swift_agent.ctl.timeline.page import page
from swift_agent.ctl.timeline.traces import traces
from swift_agent.version import __version__
from swift_rendezvous.store.etcd_config import EtcdConfig

# For a collector to take them.
SEND_TIMEOUT_S = 10.0


@click.command()
@click.argument("job", required=False)
@click.option(
    "--journal", "journals", multiple=True, type=click.Path(exists=True, readable=True), metavar="PATH",
    help="Read this journal, or all in this directory, in place of etcd; may be given more than once. With several "
    "jobs in a directory JOB says which.",
)  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write a page to look at.")
@click.option("--otlp", metavar="FILE|URL", help="Write a trace of OpenTelemetry for each incident: into a file, or to "
              "a collector, such as http://127.0.0.1:4318/v1/traces.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--gpu-hour-cost", type=click.FloatRange(min=0), metavar="MONEY", help="What one GPU costs in an hour.")
@etcd_options
def timeline(
    config: EtcdConfig | None, job: str | None, journals: tuple[str, ...], html: str | None, otlp: str | None,
    as_json: bool, gpu_hour_cost: float | None,
) -> None:  # fmt: skip
    """Show what JOB went through: failures, recoveries and their phases, the speed around them, and what they cost.

    Exit codes: 0 shown, 1 no such job, not a journal, or etcd does not answer, 2 a wrong command line.
    """
    if journals:
        known = _of_journals(journals, job)
    elif job is None:
        raise click.UsageError("name a JOB, or --journal PATH")
    elif config is None:
        raise click.UsageError(
            "no etcd named; type --rdzv-endpoint HOST:2379, or set SWIFT_ETCD_ENDPOINTS; or, to read journals, "
            "--journal PATH"
        )
    else:
        with opened(config) as store:
            known = from_etcd.read(job, records_of(store, config, job), time.time())
    found = assemble(known)
    if html is not None:
        write_page(found, html, gpu_hour_cost)
    if otlp is not None:
        write_traces(found, otlp)
    if as_json:
        click.echo(json.dumps(model.to_json(found)))
        return
    if html is not None:
        click.echo(f"the timeline of job {found.job} is in {html}")
    if otlp is not None:
        click.echo(f"{len(found.incidents)} traces of job {found.job} are in {otlp}")
    if html is None and otlp is None:
        for line in text.lines(found, gpu_hour_cost):
            click.echo(line)


def write_traces(found: model.Timeline, where: str) -> None:
    """Into a file, or to a collector (OTLP over HTTP). Raises `ClickException` if it does not take them."""
    content = json.dumps(traces(found, __version__)).encode()
    try:
        if where.startswith(("http://", "https://")):
            request = urllib.request.Request(where, content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=SEND_TIMEOUT_S):
                pass
        else:
            Path(where).write_bytes(content + b"\n")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise click.ClickException(f"--otlp {where}: the traces are not there: {why}") from None


def write_page(found: model.Timeline, path: str, gpu_hour_cost: float | None = None) -> None:
    """Write the page of *found*. Raises `ClickException` if it cannot be written; an older file is then as it was."""
    content = page(found, written_s=time.time(), version=__version__, gpu_hour_cost=gpu_hour_cost)
    directory = os.path.dirname(os.path.abspath(path))
    try:
        fd, part = tempfile.mkstemp(prefix=".timeline-", suffix=".html", dir=directory)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(part, 0o666 & ~umask)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        raise click.ClickException(f"--html {path}: cannot be written: {error.strerror or error}") from None


def _of_journals(paths: tuple[str, ...], job: str | None) -> Known:
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise click.ClickException(f"{', '.join(paths)}: there is no journal here (JOB.NODE.INCARNATION.jsonl)")
    found, mistakes = [], []
    for file in files:
        try:
            with open(file, "rb") as lines:
                journal = from_journals.read_lines(lines)
        except (OSError, JournalError) as error:
            mistakes.append(f"{file}: {error}")
            continue
        if job is None or journal.job == job:
            found.append(journal)
    if mistakes:
        raise click.ClickException("; ".join(mistakes))
    if not found:
        raise click.ClickException(f"{', '.join(paths)}: no journal here is of job {job!r}")
    try:
        return from_journals.read(found)
    except JournalError as error:
        raise click.ClickException(f"{error}; name one: swiftctl timeline JOB --journal ...") from None
