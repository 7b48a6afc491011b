"""Turns the result of a job into what the caller of `swift-run` sees: nothing, `ChildFailedError` or `JobStopped`.

It must never decide how a job ends: that is in the records by then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from swift_agent.errors import JobStopped
from swift_agent.launch.config import AgentConfig
from swift_agent.wire.root_cause import line_of
from swift_rendezvous.roster.records import AS_LONG_AS_IT_ADVANCES, ResultRecord, WorkerExit
from swift_rendezvous.roster.setbacks import MOST, PER_HOUR, WINDOW

log = logging.getLogger(__name__)

# Of `swift-run`, by the cause; the last two are EX_UNAVAILABLE and EX_TEMPFAIL of sysexits.h. None is
# what a shell makes of a signal (128 and more), so that a container that was killed is told from one that has ended.
EXIT_CODES = {"succeeded": 0, "script": 1, "usage": 2, "operator": 3, "infrastructure": 69, "preempted": 75}


def exit_code(ns: argparse.Namespace, cause: str) -> int:
    """Of `swift-run` with these options."""
    return int(ns.drained_exit_code) if cause == "drained" else EXIT_CODES[cause]


def raise_outcome(result: ResultRecord, config: AgentConfig) -> Literal["succeeded", "drained"]:
    """Return the cause if this node's part ended well; otherwise raise. The root cause is the earliest failure, on
    whatever node it was. A node that was drained has ended well, but the job has not ended."""
    if result.cause == "drained" and config.drained_exit_code:
        raise JobStopped(f"job '{config.job_id}' goes on without this node: {result.why}", "drained")
    if result.state == "succeeded":
        return "drained" if result.cause == "drained" else "succeeded"
    if result.state == "failed" and result.exits:
        failures = {exit_.rank: _failure(exit_) for exit_ in result.exits}
        if result.advice:
            _append(failures[result.exits[0].rank], f"\n\n{result.why}\n{result.advice}")
        failed = ChildFailedError(name=config.training_script, failures=failures)
        failed.exits = result.exits  # type: ignore[attr-defined]  # for `write_result`
        raise failed
    cause = "script" if result.state == "failed" else result.cause
    raise JobStopped(f"job '{config.job_id}' {result.state}: {result.why}", cause)


def write_result(ns: argparse.Namespace, cause: str, why: str, failed: ChildFailedError | None = None) -> None:
    """Into the file of `--result`, if there is one, as JSON: for whom no exit code reaches. *failed*: the workers."""
    if not ns.result:
        return
    failures = [] if failed is None else _failures_of(failed)
    if failures:
        why = f"rank {failures[0]['rank']}: {failures[0]['message']}"
    found = {"exit_code": exit_code(ns, cause), "cause": cause, "why": why, "job": ns.rdzv_id, "failures": failures}
    try:
        # For its owner only: a traceback may say more than others should read.
        fd = os.open(f"{ns.result}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w") as stream:
            stream.write(json.dumps(found) + "\n")
        os.replace(f"{ns.result}.new", ns.result)
    except OSError as error:
        log.warning("--result %s cannot be written: %s", ns.result, error)


def _failures_of(failed: ChildFailedError) -> list[dict[str, Any]]:
    """The first one first. *message*: the line that names the exception, or the last one; *details*: a traceback, or
    what the worker wrote last to its standard error."""
    exits: tuple[WorkerExit, ...] = getattr(failed, "exits", ())
    if not exits:  # of torch's own launcher
        return [
            {"rank": rank, "pid": one.pid, "exit_code": one.exitcode, "message": str(one.message)}
            for rank, one in sorted(failed.failures.items(), key=lambda item: item[1].timestamp)
        ]
    return [
        {
            "rank": one.rank, "local_rank": one.local_rank, "host": one.host, "pid": one.pid, "time_s": one.timestamp_s,
            "exit_code": one.exit_code, "signal": _signal_name(one.exit_code), "message": _line_of(one),
            "details": one.message, "generation": one.generation,
        }
        for one in exits
    ]  # fmt: skip


def _line_of(exit_: WorkerExit) -> str:
    """The line of a traceback that says it, or what the kernel said."""
    first = exit_.message.partition("\n")[0]
    if first.startswith("the kernel"):
        return first
    return line_of(exit_.message) or _signal_name(exit_.exit_code) or f"exited with code {exit_.exit_code}"


def _signal_name(exit_code: int) -> str | None:
    return signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else None


def _append(failure: ProcessFailure, text: str) -> None:
    """To what torch's summary shows of it: its message, or the traceback in what the worker has recorded."""
    message: Any = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo") or {}
        shown = extra.get("py_callstack") or message.get("message", "")
        failure.message = {**message, "extraInfo": {**extra, "py_callstack": f"{shown}{text}"}}  # type: ignore[assignment]
    else:
        failure.message = f"{message}{text}"


def limit_of(config: AgentConfig) -> str:
    """What `--max-restarts` means to a script that is recovered in place; one line, said at the start."""
    number = config.max_restarts
    if number == AS_LONG_AS_IT_ADVANCES:
        return (
            "a lost worker is replaced in place, as often as it takes. A rank that does not advance ends the job: "
            f"{MOST} failures within {WINDOW} iterations, or the same exception twice at the same place; or more "
            f"than {PER_HOUR} failures in an hour. --max-restarts N counts the failures of a node instead, whatever "
            "lies in between"
        )
    end = "ends the job, unless a spare node takes over" if config.spares else "ends the job"
    if number == 0:
        return f"--max-restarts 0: the first worker that fails {end}. Without the option it would be replaced in place"
    window = f", within {config.restarts_window_s:g} s" if config.restarts_window_s else ""
    return (
        f"--max-restarts {number}{window}: so many times the workers of a node that have failed are replaced in place; "
        f"the next failure {end}. A lost node does not count. Without the option only those without progress count"
    )


def _failure(exit_: WorkerExit) -> ProcessFailure:
    """As torch's launcher has it where the worker was one of this machine, and has recorded how it failed."""
    if exit_.error_file and exit_.message:
        try:
            failure = ProcessFailure(exit_.local_rank, exit_.pid, exit_.exit_code, exit_.error_file)
        except Exception as error:  # torch reads it less patiently than we do
            log.debug("%s is not what torch writes: %s", exit_.error_file, error)
        else:
            if failure.error_file == exit_.error_file:
                return failure
    failure = ProcessFailure(exit_.local_rank, exit_.pid, exit_.exit_code, error_file="<N/A>")
    failure.timestamp = exit_.timestamp_s
    where = f"host {exit_.host}"
    failure.message = f"{exit_.message}\n({where})" if exit_.message else f"{failure.message} ({where})"
    return failure
