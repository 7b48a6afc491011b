"""`swift-run`: torchrun's command line; the job goes on when a node is lost.

    swift-run --nnodes 2 --nproc-per-node 8 --rdzv-endpoint etcd1:2379,etcd2:2379 train.py --lr 0.1

With the rendezvous backend swift-etcd, the default, the agent of `swift_agent.agent.main` runs the job; with any other
one torch's own launcher does, unchanged. This module must never hold policy of its own: it parses, chooses and reports.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args as torchs_config_from_args
from torch.distributed.run import (
    determine_local_world_size,
    get_rdzv_endpoint,
    get_use_env,
    parse_min_max_nnodes,
    run_script_path,
)

from swift_agent.agent.processes.linux import want_of_descriptors
from swift_agent.errors import JobStopped
from swift_agent.launch import secret
from swift_agent.launch.checks import NO_NOTICE, ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import SWIFT_BACKEND, LaunchCommand, get_args_parser, parse_args, with_our_options
from swift_agent.launch.outcome import exit_code, write_result
from swift_agent.launch.signals import CaughtSignals, Signalled
from swift_rendezvous.errors import RendezvousError

# What torch.distributed.run has, with the same meaning.
__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """As torch's function of that name; a --max-restarts that was not given is torchrun's."""
    found: tuple[LaunchConfig, Callable[..., Any] | str, list[str]] = torchs_config_from_args(
        argparse.Namespace(**{**vars(args), "max_restarts": args.max_restarts or 0})
    )
    return found


def run(args: argparse.Namespace, *, all_children_are_ours: bool = False) -> None:
    """Run the job that *args* (of `parse_args`, or of torch's function of that name) describes, and return when it has
    succeeded.

    Follows `torch.distributed.run.run`. Raises `ConfigError` before anything is started, torch's `ChildFailedError`
    when the workers failed, its `SignalException` when a signal ended the job or this node's part in it,
    `swift_agent.errors.JobStopped` when the job could not go on for want of a node, and
    `swift_rendezvous.errors.RendezvousError` when etcd refuses or another job has this id. Children of the caller, its
    signal handlers and its being a subreaper or not are left as they are. *all_children_are_ours*: the caller has none,
    so that every orphan of a worker can be waited for.
    """
    if args.rdzv_backend != SWIFT_BACKEND:
        with secret.hidden():
            _torchrun(args)
        return
    ns = with_our_options(args)
    short = want_of_descriptors()
    if short:
        raise ConfigError([short])
    notices = "" if ns.preempt_signal == NO_NOTICE else ns.preempt_signal
    with CaughtSignals(ns.signals_to_handle, notices) as signals:
        config = AgentConfig.from_args(ns)
        args.rdzv_id = config.job_id  # as torch's function does with --standalone: for the file of --result
        from swift_agent.agent.main import launch_agent  # late: a wrong command line is refused before grpc is loaded

        # As torch's launcher of that name: what forwards the signals reads it here, and workers see it.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.launch.signals_to_handle
        with secret.hidden():
            args.ended = launch_agent(config, signals, all_children_are_ours)  # for the file of --result, too


def _torchrun(ns: argparse.Namespace) -> None:
    import torch.distributed.run

    # By default torch's agents share one TCPStore over all restarts, with no prefix per round. Restarted workers may
    # then read the addresses of dead peers before they are overwritten, and the restart dies in "Connection refused"
    # more often than not. A store of its own for each round cures that; a user's setting is respected.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    torch.distributed.run.run(ns)  # type: ignore[no-untyped-call]


@record
def main(args: list[str] | None = None) -> None:
    """Run `swift-run` with *args* (default: `sys.argv[1:]`); the counterpart of `torch.distributed.run.main`.

    Returns None when the job succeeded. Raises as `run` does; a mistake that the parser finds is printed and raises
    `SystemExit(2)`.
    """
    run(parse_args(args))


def _launch(**options: Any) -> None:
    # As under torchrun: 1 with the summary of a ChildFailedError, 2 for a wrong command line.
    ns, why, cause = argparse.Namespace(**options), "", "script"
    try:
        # Where nobody has named a file for the failure, torch would only complain of that.
        launch = partial(run, all_children_are_ours=True)
        (record(launch) if os.environ.get("TORCHELASTIC_ERROR_FILE") else launch)(ns)
        cause = getattr(ns, "ended", "succeeded")  # of torch's own launcher there is no other
    except ConfigError as error:
        cause, why = "usage", str(error)
    except (JobStopped, Signalled) as error:
        cause, why = error.cause, str(error)
    except RendezvousError as error:
        cause, why = "infrastructure", str(error)
    except ChildFailedError as error:
        write_result(ns, cause, why, error)
        # Without the frames of this launcher, which say nothing of the failure.
        click.echo(f"{type(error).__module__}.{type(error).__qualname__}: {error}", err=True)
        raise click.exceptions.Exit(exit_code(ns, cause)) from None
    except BaseException as error:
        write_result(ns, cause, f"{type(error).__name__}: {error}")
        raise
    write_result(ns, cause, why)
    if why:
        click.ClickException(why).show()
        raise click.exceptions.Exit(exit_code(ns, cause))


cli = LaunchCommand(
    "swift-run",
    callback=_launch,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a training script on this node, as torchrun does, in a job that survives the loss of other nodes.",
    epilog="What follows TRAINING_SCRIPT is passed to it untouched. Options may be shortened as under torchrun.",
)


if __name__ == "__main__":
    cli()
