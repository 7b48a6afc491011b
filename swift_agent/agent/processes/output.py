"""The files of the workers of one node: their output, what of it is shown, and the errors that they leave.

torch's `LogsSpecs` decides where files are. They are shown as by its `TailLog`, which always begins at the begin of a
file: here the words before a line change with the process that writes it. A disk that is full, or a directory that is
away, is no reason to end what trains: workers then go on without files. This module must never start a process.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from swift_agent.agent.processes.error_streams import KEPT, ErrorStreams
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.log_names import line_prefix, name_of
from swift_agent.wire.environment import Placement, share_of
from swift_agent.wire.root_cause import last_words
from swift_rendezvous.roster.records import WorkerExit
from swift_rendezvous.threads import only_logged, thread

log = logging.getLogger(__name__)

# Of a worker's error message, from its begin and from its end.
MESSAGE_CHARS = 8000
# Between two looks at a file that is shown; torch's.
LOOK_S = 0.1


class Tail:
    """Shows on *stream* the lines of *files*, by local rank, that are *wanted*."""

    def __init__(self, files: Mapping[int, str], stream: IO[str], wanted: Callable[[str], bool] = bool) -> None:
        self._files, self._stream, self._wanted = files, stream, wanted
        self._at: dict[int, int] = {}  # by local rank, as the next
        self._running: dict[int, tuple[str, threading.Thread, threading.Event]] = {}

    def show(self, prefixes: Mapping[int, str]) -> None:
        """From here on each line begins with that of *prefixes*. Raises RuntimeError if there is no thread for some:
        that is tried again by the next call."""
        for local_rank, path in self._files.items():
            prefix, stopping = prefixes[local_rank], threading.Event()
            if local_rank in self._running and self._running[local_rank][0] == prefix:
                continue
            self._stop(local_rank)
            args = local_rank, path, prefix, stopping
            new = thread(f"swift-tail-{local_rank}", self._follow, only_logged, *args)
            new.start()
            self._running[local_rank] = prefix, new, stopping

    def stop(self) -> None:
        """Returns when all that is in the files is shown."""
        for _, _, stopping in self._running.values():
            stopping.set()
        for local_rank in tuple(self._running):
            self._stop(local_rank)

    def _stop(self, local_rank: int) -> None:
        _, running, stopping = self._running.pop(local_rank, ("", None, threading.Event()))
        stopping.set()
        if running is not None:
            running.join()

    def _follow(self, local_rank: int, path: str, prefix: str, stopping: threading.Event) -> None:
        while not os.path.exists(path):
            if stopping.wait(LOOK_S):
                return
        with builtins.open(path, errors="replace") as lines:
            lines.seek(self._at.get(local_rank, 0))
            while True:
                is_last = stopping.is_set()
                if line := lines.readline():
                    if self._wanted(line):
                        self._stream.write(f"{prefix}{line}")
                elif is_last:
                    break
                else:
                    stopping.wait(LOOK_S)
            self._at[local_rank] = lines.tell()


class Output:
    """Of all workers of a node."""

    def __init__(self, config: AgentConfig, directory: str) -> None:
        """*directory*: for what passes between processes."""
        self._config, self._streams = config, ErrorStreams(directory)
        self._begins: dict[int, int] = {}  # by local rank: where what its process writes begins in its file
        self._dest: LogsDest | None = None
        self._dest_attempt = -1
        self._tails: list[Tail] = []
        self._filtered: list[IO[str]] = []
        self._prefixes: dict[int, str] = {}  # by local rank: what stands before the lines of its process
        self._helpers: dict[int, tuple[str, str]] = {}  # by number, their stdout and stderr

    def stdout(self, local_rank: int) -> str:
        """The file; '' is the agent's own output."""
        if share_of(local_rank):
            return self._helpers[local_rank][0]
        return self._opened().stdouts.get(local_rank, "")

    def stderr(self, local_rank: int) -> str:
        """The file, or the pipe, of the next worker of that rank; '' is the agent's own."""
        if share_of(local_rank):
            return self._helpers[local_rank][1]
        path = self._opened().stderrs.get(local_rank, "")
        if not path:
            return self._streams.path(local_rank)
        try:
            self._begins[local_rank] = os.path.getsize(path)
        except OSError:
            self._begins[local_rank] = 0
        return path

    def _opened(self) -> LogsDest:
        assert self._dest is not None
        return self._dest

    def open(self, place: Placement, envs: dict[int, dict[str, str]], living: Collection[int]) -> None:
        """Before workers start; *envs*: their environments, by local rank; *living*: the local ranks of those that run.

        Destinations are made once per attempt, as torchrun does; a replacement appends to the files of its rank."""
        config = self._config
        if self._dest is None or self._dest_attempt != place.restart_count:
            self.close()
            specs = config.launch.logs_specs
            assert isinstance(specs, LogsSpecs)
            self._dest_attempt = place.restart_count
            try:
                self._dest = specs.reify(envs)
                for path in {*self._dest.stdouts.values(), *self._dest.stderrs.values()} - {"", os.devnull}:
                    builtins.open(path, "a").close()
                self._make_tails()
            except OSError as error:
                # No reason to end what trains: a disk may be full, or a shared directory away.
                log.warning(
                    "no logs of workers can be written (%s): they go on without files; their output is that of this "
                    "agent, and tracebacks of workers that fail are not kept", error,
                )  # fmt: skip
                self.close()
                self._dest = _no_files(place.num_workers)
        self._show(place, living)
        for local_rank, path in self._opened().error_files.items():
            # reify sets it for the ranks of its first call only; a stale file must not explain a later death.
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = "" if path == os.devnull else path
            if path != os.devnull and os.path.exists(path) and local_rank not in living:
                try:
                    os.replace(path, path + ".previous")
                except OSError:
                    envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = ""

    def link(self, place: Placement, local_ranks: Collection[int]) -> None:
        """Names of the user's own for the files of these, which start (see `swift_agent.launch.log_names`)."""
        config, dest = self._config, self._opened()
        specs = config.launch.logs_specs
        if not config.log_names or specs is None:
            return
        for local_rank in local_ranks:
            name = name_of(config.log_names, self._words_for(place, local_rank))
            files = (dest.stdouts, "stdout.log"), (dest.stderrs, "stderr.log"), (dest.error_files, "error.json")
            for paths, ending in files:
                path = paths.get(local_rank, "")
                if path in ("", os.devnull):
                    continue
                link = os.path.join(specs.root_log_dir, f"{name}.{ending}")
                try:
                    # Relative: the directory may be moved. Renamed: another node may make the same one now.
                    made = f"{link}.{os.getpid()}"
                    os.symlink(os.path.relpath(path, specs.root_log_dir), made)
                    os.replace(made, link)
                except OSError as error:
                    log.warning("no link %s can be made (%s): the log is %s", link, error, path)

    def open_helper(self, place: Placement, number: int, env: dict[str, str]) -> None:
        """Before that helper starts. It runs the script once more: what it writes is in a file in `--log-dir`; without
        that its standard output is dropped, and what it says of errors is in the agent's own output."""
        specs, env["TORCHELASTIC_ERROR_FILE"] = self._config.launch.logs_specs, ""
        self._helpers[number] = os.devnull, ""
        if specs is None or specs.root_log_dir in ("", os.devnull):
            return
        name = f"{place.run_id}-generation-{place.generation}-rank-{place.rank(number)}-share-{share_of(number)}"
        path = os.path.join(specs.root_log_dir, "helpers", name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if self._config.keep_logs:
                builtins.open(f"{path}.log", "a").close()
                self._helpers[number] = f"{path}.log", f"{path}.log"
        except OSError as error:
            log.warning("no log of helper %s can be written (%s): it goes on without one", name, error)
        else:
            env["TORCHELASTIC_ERROR_FILE"] = f"{path}.json"

    def check(self, local_rank: int, env: dict[str, str]) -> None:
        """The directory may have gone since the files of the others were made: a rank then goes on without."""
        dest = self._opened()
        try:
            for path in (dest.stdouts.get(local_rank), dest.stderrs.get(local_rank)):
                if path:
                    builtins.open(path, "a").close()
        except OSError as error:
            log.warning(
                "no logs of local rank %d can be written any more (%s): its output is that of this agent, and its "
                "traceback is not kept if it fails", local_rank, error,
            )  # fmt: skip
            # reify's may be shared with the tails.
            self._dest = replace(
                dest, stdouts={**dest.stdouts, local_rank: ""}, stderrs={**dest.stderrs, local_rank: ""},
                error_files={**dest.error_files, local_rank: os.devnull},
            )  # fmt: skip
            env["TORCHELASTIC_ERROR_FILE"] = ""

    def _make_tails(self) -> None:
        launch, dest = self._config.launch, self._opened()
        self._tails = [Tail(dest.tee_stdouts, sys.stdout), Tail(dest.tee_stderrs, sys.stderr)]
        for needles, target, files in (
            (getattr(launch, "duplicate_stdout_filters", None), getattr(dest, "filtered_stdout", ""), dest.tee_stdouts),
            (getattr(launch, "duplicate_stderr_filters", None), getattr(dest, "filtered_stderr", ""), dest.tee_stderrs),
        ):
            if needles and target:
                stream = builtins.open(target, "w", errors="replace", buffering=1)  # noqa: SIM115 - closed in close_logs
                self._filtered.append(stream)
                self._tails.append(Tail(files, stream, _contains_any(needles)))

    def _show(self, place: Placement, living: Collection[int]) -> None:
        """Of those that start the lines begin with the words of *place* from here on: this node may have had another
        one in the same attempt."""
        for local_rank in range(place.num_workers):
            if local_rank not in living or local_rank not in self._prefixes:
                self._prefixes[local_rank] = self._prefix(place, local_rank)
        for tail in self._tails:
            tail.show(self._prefixes)

    def _prefix(self, place: Placement, local_rank: int) -> str:
        """torch's, where nobody has named another one."""
        template = self._config.launch.log_line_prefix_template
        return line_prefix(template or "[${role_name}${local_rank}]:", self._words_for(place, local_rank))

    def _words_for(self, place: Placement, local_rank: int) -> dict[str, str | int]:
        """Those of torch's prefixes of lines, and ours."""
        return {
            "role_name": place.role, "rank": place.rank(local_rank), "local_rank": local_rank,
            "host": socket.gethostname(), "node_id": self._config.node_id, "attempt": place.generation,
        }  # fmt: skip

    def explained(self, end: WorkerExit, error_file: str, evidence: str) -> WorkerExit:
        """*end*, of a worker that has recorded nothing of its failure, with what is known of it: *evidence*, a clause,
        and what it said last. That is also in *error_file*, as if the worker had recorded it."""
        said = last_words(self._last_of(end.local_rank), was_killed=end.exit_code < 0)
        if evidence:
            said = "\n".join(part for part in (evidence, said) if part)
        elif not said and end.exit_code > 0:
            said = f"exited with code {end.exit_code}, and wrote nothing to its standard error"
        if not said:
            return end
        extra = {"py_callstack": said, "timestamp": str(end.timestamp_s)}
        recorded = {"message": {"message": said.splitlines()[-1], "extraInfo": extra}}
        try:
            if error_file:
                with builtins.open(error_file, "w") as stream:
                    json.dump(recorded, stream)
        except OSError:
            error_file = ""
        return replace(end, message=_shortened(said), error_file=error_file)

    def _last_of(self, local_rank: int) -> str:
        """The end of its standard error, wherever that went."""
        path = self._opened().stderrs.get(local_rank, "") if self._dest is not None else ""
        if not path:
            return self._streams.last(local_rank)
        try:
            with builtins.open(path, "rb") as stream:
                # What its predecessor wrote there explains nothing.
                stream.seek(max(self._begins.get(local_rank, 0), os.fstat(stream.fileno()).st_size - KEPT))
                return stream.read(KEPT).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def close(self) -> None:
        """Of this attempt. The pipes stay: see `end`."""
        for tail in self._tails:
            tail.stop()
        for stream in self._filtered:
            stream.close()
        self._tails, self._filtered = [], []

    def end(self) -> None:
        self.close()
        self._streams.close()


def _contains_any(needles: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)


def _no_files(num_workers: int) -> LogsDest:
    """Output is not redirected, and nothing else is written."""
    inherited, nowhere = dict.fromkeys(range(num_workers), ""), dict.fromkeys(range(num_workers), os.devnull)
    return LogsDest(stdouts=inherited, stderrs=dict(inherited), error_files=nowhere)


def recorded_in(error_file: str) -> dict[str, Any]:
    """What a worker has left there, as torch has it; what torch has for none otherwise."""
    try:
        with open(error_file) as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"message": "<NONE>"}


def root_cause(error_file: str) -> tuple[str, int]:
    """Message with traceback, and time, that the worker left in its error file (torch's format); empty if it left
    none.
    """
    try:
        with open(error_file) as stream:
            data = json.load(stream)
        message = data["message"]
        if isinstance(message, str):
            return _shortened(message), int(time.time())
        extra = message.get("extraInfo", {})
        text = extra.get("py_callstack") or message.get("message", "")
        return _shortened(str(text)), int(extra.get("timestamp", time.time()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", int(time.time())


def _shortened(text: str) -> str:
    """The message becomes part of a record, and etcd takes 1.5 MiB for all workers of a node."""
    if len(text) <= 2 * MESSAGE_CHARS:
        return text
    return f"{text[:MESSAGE_CHARS]}\n[{len(text) - 2 * MESSAGE_CHARS} characters left out]\n{text[-MESSAGE_CHARS:]}"
