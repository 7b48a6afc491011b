"""`python -m swift_agent.native build|info`: the only place where the native backend is compiled.

An agent or a worker must never come here: a job takes the library that is there, or does without.
"""

from __future__ import annotations

import time

import click

from swift_agent import native


@click.group(help="The native forwarding backend of the process groups (optional).")
def main() -> None:
    pass


@main.command()
@click.option("--force", is_flag=True, help="Compile even if it is there.")
def build(force: bool) -> None:
    """Compile it for this torch and this Python."""
    started_s = time.monotonic()
    try:
        path = native.build(force=force)
    except native.BuildError as error:
        raise click.ClickException(f"{error}\nswift-agent works without it: groups are exchanged in Python.") from error
    click.echo(f"{path} ({time.monotonic() - started_s:.0f} s)")


@main.command()
def info() -> None:
    """Say where it is and whether it loads."""
    path = native.library_path()
    if not path.is_file():
        click.echo(f"not built: {path}")
    else:
        state = "loads" if native.load() is not None else "switched off by SWIFT_NATIVE=0"
        click.echo(f"{path}: {state}")


if __name__ == "__main__":
    main(prog_name="python -m swift_agent.native")
