"""Turns the result of a job into what the caller of `swift-run` sees: nothing, `ChildFailedError` or `JobStopped`."""

from __future__ import annotations

import logging

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from swift_agent.config import AgentConfig
from swift_agent.errors import JobStopped
from swift_rendezvous.keys import ResultRecord, WorkerExit

log = logging.getLogger(__name__)


def raise_outcome(result: ResultRecord, config: AgentConfig) -> None:
    """Return if the job succeeded; otherwise raise. The root cause is the earliest failure, on whatever node it was."""
    if result.state == "succeeded":
        return
    if result.state == "failed" and result.exits:
        raise ChildFailedError(
            name=config.training_script, failures={exit_.rank: _failure(exit_) for exit_ in result.exits}
        )
    raise JobStopped(f"job '{config.job_id}' {result.state}: {result.why}")


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
