"""What the commands of `swiftctl` share: the options that name etcd, a store for a while, tables.

Must never print a password, and must never let an error of etcd end in a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from swift_rendezvous.codec import RecordError
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValue, KeyValueStore

Command = Callable[..., None]
Item = TypeVar("Item")

# Columns, where no terminal has any.
_WIDE = 4000
# Before that no bar is shown.
_MOMENT_S = 0.5

_OPTIONS = [
    click.option("--rdzv-endpoint", metavar="HOST:PORT[,...]", help="The etcd servers; default: $SWIFT_ETCD_ENDPOINTS"),
    click.option("--etcd-user", metavar="NAME", help="User name; the password is in a file or $SWIFT_ETCD_PASSWORD."),
    click.option("--etcd-password-file", metavar="FILE", help="File that holds the password."),
    click.option("--etcd-cacert", metavar="FILE", help="Certificates to check the servers' against (TLS)."),
    click.option("--etcd-cert", metavar="FILE", help="Our certificate (TLS)."),
    click.option("--etcd-key", metavar="FILE", help="Its private key."),
]


def progress(steps: Sequence[Item]) -> Iterator[Item]:
    """*steps*, with a bar on standard error meanwhile, if that is a terminal and they take longer than a moment."""
    console, begin_s = Console(stderr=True), time.monotonic()
    if not console.is_terminal:
        yield from steps
        return
    with Progress(console=console, transient=True, disable=False) as shown:
        task = shown.add_task("", total=len(steps), visible=False)
        for step in steps:
            yield step
            shown.update(task, advance=1, visible=time.monotonic() - begin_s > _MOMENT_S)


def finite(context: click.Context, parameter: click.Parameter, given: float | None) -> float | None:
    """Of an option that is a number: float() takes "nan" and "inf" for some, too."""
    if given is not None and not math.isfinite(given):
        raise click.BadParameter(f"{given} is no number that can be worked with")
    return given


def etcd_options(command: Command) -> Command:
    """Give *command* the options that name etcd; it gets an `EtcdConfig`, or None, as its first argument."""

    @functools.wraps(command)
    def wrapper(
        rdzv_endpoint: str | None,
        etcd_user: str | None,
        etcd_password_file: str | None,
        etcd_cacert: str | None,
        etcd_cert: str | None,
        etcd_key: str | None,
        **others: Any,
    ) -> None:
        try:
            config = EtcdConfig.from_environment(
                endpoints=rdzv_endpoint,
                user=etcd_user,
                password_file=etcd_password_file,
                ca_cert=etcd_cacert,
                cert=etcd_cert,
                key=etcd_key,
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        command(config, **others)

    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper


def needs_etcd(command: Command) -> Command:
    """`etcd_options` for a command that can do nothing without etcd."""

    @functools.wraps(command)
    def wrapper(config: EtcdConfig | None, **others: Any) -> None:
        if config is None:
            raise click.UsageError("no etcd named; type --rdzv-endpoint HOST:2379, or set SWIFT_ETCD_ENDPOINTS")
        command(config, **others)

    return etcd_options(wrapper)


@contextlib.contextmanager
def opened(config: EtcdConfig) -> Iterator[KeyValueStore]:
    """A store for the time of the block; what etcd or a record does not allow ends the command with exit code 1."""
    from swift_rendezvous.store.etcd import EtcdStore  # here: --help and the other commands do without grpc

    store = EtcdStore(config)
    try:
        yield store
    except (RendezvousError, RecordError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        store.close()


def records_of(store: KeyValueStore, config: EtcdConfig, job: str) -> list[KeyValue]:
    """All keys of *job*; the command ends with exit code 1 if there are none."""
    entries, _ = store.get_prefix(Keys(job).prefix)
    if not entries:
        raise no_job(config, job)
    return entries


def no_job(config: EtcdConfig, job: str) -> click.ClickException:
    return click.ClickException(
        f"no job {job!r} at {', '.join(config.endpoints)}: it has not started, or it has ended and was cleared; "
        "`swiftctl status` lists all"
    )


def output() -> Console:
    """What is piped is not cut to the width of a terminal that is not there: `grep` finds whole lines."""
    made = Console()
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


# What comes out of etcd is shown as text, never read as rich's markup: hence `Text` everywhere.
def table(*columns: str) -> Table:
    """As `ps` prints: no lines, a heading."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def add_row(to: Table, cells: Iterable[object]) -> None:
    to.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))


def time_text(seconds: float) -> str:
    """Of a prediction."""
    for unit, length_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
