"""What an agent and its standby server say to each other: one class for each message.

    agent --Standbys, Start, Preload--> server --Assignment--> standby: becomes the worker
          <--Ready, Started, Preloaded---

This module must never do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swift_agent.wire.vocabulary import Vocabulary


@dataclass(frozen=True)
class Assignment:
    """The worker that a standby becomes."""

    env: Mapping[str, str]
    stdout: str
    """A file to append to; '' is the agent's own output."""
    stderr: str
    cwd: str
    kind: str
    """"script" or "module"."""
    target: str
    args: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    """The processors that it runs on; (): all."""


# ---- to the server ----


@dataclass(frozen=True)
class Standbys:
    """Keep so many ready."""

    count: int


@dataclass(frozen=True)
class Preload:
    """Import these modules in place of the ones asked for before."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Make a standby that worker. *ticket*: the number of the order."""

    ticket: int
    assignment: Assignment


ToServer = Standbys | Preload | Start
TO_SERVER: Vocabulary[ToServer] = Vocabulary(Standbys, Preload, Start)

# ---- from the server ----


@dataclass(frozen=True)
class Ready:
    """Standbys can be forked. *failed*: what could not be imported, each with the reason."""

    failed: Mapping[str, str]


@dataclass(frozen=True)
class Preloaded:
    """All modules were tried. *unfit*: these must not be imported ahead. *spoiled*: this server can fork no more."""

    failed: Mapping[str, str]
    unfit: Mapping[str, str]
    spoiled: bool


@dataclass(frozen=True)
class Started:
    """That process becomes the worker of the order. There may be another for it, if this one dies before."""

    ticket: int
    pid: int


FromServer = Ready | Preloaded | Started
FROM_SERVER: Vocabulary[FromServer] = Vocabulary(Ready, Preloaded, Started)
TO_STANDBY: Vocabulary[Assignment] = Vocabulary(Assignment)
