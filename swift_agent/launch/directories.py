"""The agent's temporary directories: for its socket, for logs of messages, and for its workers' output if the user has
named no directory.

An agent that is killed leaves them; the next one that starts on the machine removes them. Of a closed one only what a
failed worker has written of its failure stays. Must never touch a directory that the user has named, but for what
agents of this machine have made below it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from swift_agent.launch.checks import ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.wire.log_counters import LogCounters
from swift_agent.wire.standing import Standings
from swift_rendezvous.store.owned_directory import own, remove_orphans

PREFIX = "swift-agent-"
# What torch calls the directories that it makes for logs.
LOGS_PREFIX = "torchelastic_"
# The kernel limits the path of a socket to 107 bytes.
MAX_PATH_BYTES = 90
SHORT_PARENT = "/tmp"


class Directories:
    """Made: there, and owned by this process; `close` removes them. Raises `ConfigError` if one cannot be made; none is
    left then."""

    def __init__(self, config: AgentConfig) -> None:
        self._paths: list[Path] = []
        self._kept: frozenset[str] = frozenset()
        self._locks: list[int] = []
        try:
            self._make(config)
        except OSError as error:
            self.close()
            raise ConfigError([
                f"a directory of this agent cannot be made: {error}; free space there, or name another place with "
                "TMPDIR (for sockets and logs) or --message-log"
            ]) from error  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _make(self, config: AgentConfig) -> None:
        parents = {Path(tempfile.gettempdir()), Path(SHORT_PARENT)}
        for parent in parents:
            remove_orphans(parent, PREFIX)
        self.socket: str = _directory_for_socket()
        self._own(self.socket)
        self.standings = Standings(self.socket, config.nproc)
        self.log_counters = LogCounters(self.socket, config.nproc)
        logs = config.launch.logs_specs
        if not config.keep_logs and logs is not None:
            root = Path(logs.root_log_dir)
            if root.name.startswith(LOGS_PREFIX):
                remove_orphans(root.parent, LOGS_PREFIX)
            self._own(root)
        self.messages: str = self.socket
        """For logs of messages."""
        if config.message_log is not None:
            # Of this machine: locks of others may not be seen here, if the directory is a shared one after all.
            prefix = f"{PREFIX}{socket.gethostname()}-"
            os.makedirs(config.message_log, exist_ok=True)
            remove_orphans(Path(config.message_log), prefix)
            self.messages = tempfile.mkdtemp(prefix=prefix, dir=config.message_log)
            self._own(self.messages)

    def _own(self, path: str | Path) -> None:
        self._paths.append(Path(path))
        if self._paths[-1].is_dir():
            self._locks.append(own(self._paths[-1]))

    def keep(self, files: Iterable[str]) -> None:
        """`close` leaves these, as torch's launcher does: people are told where they are."""
        self._kept = frozenset(os.path.realpath(file) for file in files if os.path.isfile(file))

    def close(self) -> None:
        """May be called twice."""
        with contextlib.ExitStack() as stack:  # whatever happens in one of these, the others are done
            while self._locks:
                stack.callback(os.close, self._locks.pop())
            for path in self._paths:
                stack.callback(_remove, path, self._kept)


def _remove(path: Path, kept: Collection[str]) -> None:
    """All that is in *path*, but for the files *kept*."""
    within = os.path.join(os.path.realpath(path), "")
    if not any(file.startswith(within) for file in kept):
        shutil.rmtree(path, ignore_errors=True)
        return
    for place, directories, files in os.walk(os.path.realpath(path), topdown=False):
        with contextlib.suppress(OSError):
            for file in files:
                if os.path.join(place, file) not in kept:
                    os.unlink(os.path.join(place, file))
        for directory in directories:
            with contextlib.suppress(OSError):  # something is kept below it
                os.rmdir(os.path.join(place, directory))


def _directory_for_socket() -> str:
    directory = tempfile.mkdtemp(prefix=PREFIX)
    if len(os.fsencode(directory)) <= MAX_PATH_BYTES:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix=PREFIX, dir=SHORT_PARENT)
