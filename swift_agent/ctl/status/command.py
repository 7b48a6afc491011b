"""`swiftctl status`: who is in a job, who is missing, what happened; once, or after each change.

On a terminal `--watch` is a screen that is drawn again while it waits, and leaves the terminal as it was. Must never
write into etcd.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from swift_agent.ctl.common import needs_etcd, no_job, opened, output
from swift_agent.ctl.reports import jobs
from swift_agent.ctl.status.draw import picture
from swift_agent.ctl.status.live import Screen, heard
from swift_rendezvous.roster.keys import ROOT, Keys
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Compacted, KeyValue, KeyValueStore

REFRESHES_PER_S = 4
Entries = dict[str, KeyValue]


@click.command()
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Show it again after each change, until Ctrl-C or the end of JOB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for JOB, or a list; a line per change.")
@needs_etcd
def status(config: EtcdConfig, job: str | None, watch: bool, as_json: bool) -> None:
    """Show who is in JOB, who is missing and what happened; without JOB, all jobs.

    Exit codes: 0 shown (also when a watched job has ended, whatever its result), 1 no such job or etcd does not answer,
    2 a wrong command line.
    """
    with opened(config) as store:
        if watch:
            _watch(store, config, job, as_json)
            return
        entries, _ = store.get_prefix(Keys(job).prefix if job else ROOT)
        if job and not entries:
            raise no_job(config, job)
        found = _look(job, entries)
    if as_json:
        click.echo(json.dumps(found))
    else:
        output().print(picture(found))


def _look(job: str | None, entries: list[KeyValue]) -> Any:
    return jobs.summarize(job, entries) if job else jobs.summarize_all(entries)


def _watch(store: KeyValueStore, config: EtcdConfig, job: str | None, as_json: bool) -> None:
    """Show it after each change. Ctrl-C is how one leaves: no error."""
    console = output()
    try:
        if as_json:
            _follow(store, config, job, _changes(job, lambda found: click.echo(json.dumps(found))))
        elif job and console.is_terminal and not console.is_dumb_terminal:
            _live(store, config, job, console)
        else:
            with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
                show = _changes(job, lambda found: live.update(picture(found), refresh=True))
                _follow(store, config, job, show)
    except KeyboardInterrupt:
        return


def _live(store: KeyValueStore, config: EtcdConfig, job: str, console: Console) -> None:
    """On a screen of its own; what was last seen stays behind on the usual one."""
    screen, last = Screen(), list[Any]()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that the terminal has not

    def show(entries: Entries) -> None:
        # Records that are gone leave the last picture.
        if not entries:
            return
        before = screen.heard
        screen.heard = heard(job, entries.values(), before, time.monotonic())
        last[:] = [screen.heard.summary]
        if before is None or screen.heard.phase != before.phase:
            live.refresh()  # a phase may be over before the next picture is due

    live = Live(screen, console=console, screen=True, refresh_per_second=REFRESHES_PER_S, vertical_overflow="crop")
    try:
        with _signals_end_it(), live:
            _follow(store, config, job, show)
    finally:
        if last:
            console.print(picture(last[0]))


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """As Ctrl-C: who is told to end, or whose terminal is gone, puts the terminal in order first."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(store: KeyValueStore, config: EtcdConfig, job: str | None, show: Callable[[Entries], None]) -> None:
    """One listing, then the watch that goes on from its revision; listed again if the history was compacted."""
    prefix = Keys(job).prefix if job else ROOT
    seen = False
    while True:
        listing, revision = store.get_prefix(prefix)
        entries = {entry.key: entry for entry in listing}
        if job and not entries and not seen:
            raise no_job(config, job)
        seen = True
        try:
            with store.watch_prefix(prefix, revision + 1) as watch:
                show(entries)
                while not (job and jobs.has_ended(job, entries)):
                    entries = jobs.follow(entries, next(watch))
                    show(entries)
                return
        except Compacted:
            continue


def _changes(job: str | None, show: Callable[[Any], None]) -> Callable[[Entries], None]:
    """*show* what looks otherwise than what was shown; records that are gone leave the last picture."""
    shown: list[Any] = []

    def look(entries: Entries) -> None:
        if job and not entries:
            return
        found = _look(job, list(entries.values()))
        if [found] != shown:
            show(found)
        shown[:] = [found]

    return look
