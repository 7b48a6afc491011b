"""The command line of `swift-run`, built from the parser of the installed torch.

Every option is read from `torch.distributed.run.get_args_parser()` at the moment of use, so that the two command lines
cannot drift apart; ours are added behind them. click draws the help, the completion and the error messages. The words
are taken apart by torch's own argparse parser, because only it gives torchrun's meaning to abbreviations, `--`,
`PET_*` variables and everything that follows the script.

This module must never act on an option, and must not decide whether a value makes sense: `config` does that.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import click
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser as get_torchs_parser

from swift_agent.launch import slurm

SWIFT_BACKEND = "swift-etcd"

# What differs under swift-run, said where the reader looks for it.
_NOTES = {
    "nnodes": f"With {SWIFT_BACKEND} a script that calls swift_agent.init() loses no iteration when the size changes.",
    "standalone": f"Under swift-run, and unless another --rdzv-backend than {SWIFT_BACKEND} is asked for, it is a "
    "private etcd server that ends with the job.",
    "max_restarts": f"Default: 0; with {SWIFT_BACKEND}, for a script that calls swift_agent.init(): a lost worker is "
    "replaced as often as it takes, as long as its rank advances.",
    "rdzv_backend": f"{SWIFT_BACKEND} replaces lost workers and leaves the others running; with any other backend "
    "swift-run is torchrun.",
    "rdzv_endpoint": f"With {SWIFT_BACKEND}: host:port[,host:port...] of the etcd servers, default "
    "$SWIFT_ETCD_ENDPOINTS; one node needs none.",
    "master_addr": f"With {SWIFT_BACKEND}: where workers meet, if that is an address of the node of rank 0.",
    "master_port": f"With {SWIFT_BACKEND}: any free port by default.",
    "node_rank": f"With {SWIFT_BACKEND}: the order of the first nodes; 0 for the one at --master-addr.",
}


# Options that a step of Slurm answers, and torch's defaults.
_FROM_SLURM: dict[str, Any] = {"nnodes": "1:1", "rdzv_id": "none", "node_rank": 0}


class _Parser(argparse.ArgumentParser):
    """torch's parser with our options behind its own; mistakes and `--help` go to click."""

    def __init__(self, torch_parser: argparse.ArgumentParser, ctx: click.Context | None) -> None:
        """*ctx*: None for one that is used by itself, and does what argparse does."""
        super().__init__(
            prog="swift-run", parents=[torch_parser], add_help=False, allow_abbrev=torch_parser.allow_abbrev
        )
        self._ctx = ctx
        self.ours: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        if self._ctx is None:
            super().error(message)
        raise click.UsageError(message, self._ctx)

    def print_help(self, file: Any = None) -> None:
        if self._ctx is None:
            super().print_help(file)
            return
        click.echo(self._ctx.get_help(), file=file, color=self._ctx.color)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if self._ctx is None:
            super().exit(status, message)
        if message:
            click.echo(message, err=True, nl=False)
        self._ctx.exit(status)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # An abbreviation that torchrun understands must not become ambiguous because of an option of ours.
        found: list[Any] = super()._get_option_tuples(option_string)
        return [match for match in found if match[0] not in self.ours] or found


def _add_ours(parser: _Parser) -> None:
    def add(flag: str, metavar: str, default: Any, help: str, kind: Any = str) -> None:
        parser.ours.append(
            parser.add_argument(flag, action=env, metavar=metavar, default=default, type=kind, help=help)
        )

    add("--spares", "N", 0, "Number of nodes beyond --nnodes that wait, warm, to take the place of a lost one.", int)
    add("--replacement-timeout", "S", 300.0, "Seconds that the job waits for a node to take a vacant place.", float)
    add("--preempt-signal", "NAMES", "SIGTERM,SIGUSR1,SIGUSR2", "These tell a node to go; the job goes on. Or none.")
    add("--preempt-grace", "S", 15.0, "Seconds that it then waits for a spare to take its place.", float)
    add("--drained-exit-code", "CODE", 0, "With it the node ends that was drained by order, and not by a signal.", int)
    add("--max-restarts-window", "S", None, "A restart of --max-restarts counts for so long. Default: for ever.", float)
    add("--lease-ttl", "S", 5, "Seconds after which a node that etcd hears nothing of is taken for lost.", int)
    add("--on-etcd-loss", "WHAT", "pause", "If another node may have got the places of this one: pause, or train.")
    add("--heartbeat", "S", 0.1, "Seconds between two signs of life; a dead machine is noticed after 5 to 7.", float)
    add("--preload", "A,B", "", "Modules to import ahead in the warm workers, besides torch.")
    add("--standbys", "N", 1, "Number of warm worker processes on an active node; a spare keeps --nproc-per-node.", int)
    add("--stop-deadline", "S", 10.0, "Seconds that a worker has to stop for a recovery, else it is replaced.", float)
    add("--recovery", "WAY", "exact", "What becomes of a half-done update: exact, immediate-rollback, lossy-forward.")
    add("--metrics-port", "PORT", None, "Metrics and probes over HTTP there; 0 for any free port. Default: none.", int)
    add("--metrics-addr", "ADDR", None, "The node's address that they are at, for any program. Default: 127.0.0.1.")
    add("--log-names", "NAME", None, "In --log-dir, links of such a name to files of workers, as ${rank}-${host}.")
    parser.ours.append(
        parser.add_argument("--allow-injection", action=check_env, help="Faults may be ordered by swiftctl inject.")
    )
    add("--result", "FILE", None, "How it ended is written there, as JSON: the exit code, its cause and why.")
    add("--node-id", "NAME", None, "Name of this node, unique in the job. Default: $SWIFT_NODE_ID, else host-pid.")
    add("--job-secret-file", "FILE", None, "File that holds the job's secret, the same on all its nodes.")
    add("--journal", "DIR", None, "Write every event and decision of the agent into a file there. Or $SWIFT_JOURNAL.")
    add("--message-log", "DIR", None, "Directory on a disk of this node for logs of messages. Or $SWIFT_MESSAGE_LOG.")
    add("--message-log-limit", "GB", None, "What they may take on this node. Default: half of what is free.", float)
    add("--log-groups", "0-1,2", "", "Nodes between which no messages are logged: they go back together (0-1,2-3).")
    add("--log-budget", "SIZE", "", "Groups are chosen for it: 2TiB (of each node, between checkpoints), or 20%%.")
    add("--strategy", "WAY", "auto", "How lost state comes back: auto, replica, log, log+parallel, checkpoint.")
    add("--helpers", "N", None, "At most so many help to repeat what is lost; with auto: if that is sooner.", int)
    add("--parallel-sum", "HOW", None, "How gradients of helpers are added: ordered (the default), unordered.")
    add("--profile", "FILE", None, "What the job was measured to cost is written there (see swiftctl plan).")
    add("--log-store", "URL", None, "They are copied there: a shared directory, s3://, hdfs://. Or $SWIFT_LOG_STORE.")
    add("--etcd-user", "NAME", None, "User name at etcd; the password comes from a file or $SWIFT_ETCD_PASSWORD.")
    add("--etcd-password-file", "FILE", None, "File that holds the password.")
    add("--etcd-cacert", "FILE", None, "Certificates to check the etcd servers' against (TLS).")
    add("--etcd-cert", "FILE", None, "Our certificate for etcd (TLS).")
    add("--etcd-key", "FILE", None, "Its private key.")


def get_args_parser() -> argparse.ArgumentParser:
    """The parser of this command line, as torch's function of that name has torchrun's. It stands for itself: a mistake
    is printed as argparse does it, and raises `SystemExit(2)`."""
    return build_parser(None)


def with_our_options(ns: argparse.Namespace) -> argparse.Namespace:
    """*ns*, with defaults for those of our options that it lacks: one that another parser has made."""
    parser = build_parser(None)
    defaults = vars(parser.parse_args(["script"]))  # it turns the text of a variable into a number
    ours = {action.dest: defaults[action.dest] for action in parser.ours}
    return argparse.Namespace(**{**ours, **vars(ns)})


def build_parser(ctx: click.Context | None) -> _Parser:
    """The parser for the environment of this moment (`PET_*` variables are read here, as torch does).

    Raises `click.UsageError` when a `PET_*` variable of a switch holds no number.
    """
    try:
        parser = _Parser(get_torchs_parser(), ctx)
    except ValueError as error:
        culprits = [f"{k}={v}" for k, v in os.environ.items() if k.startswith("PET_") and repr(v) in str(error)]
        raise click.UsageError(f"{', '.join(culprits) or error}: a switch takes 0 or 1.", ctx) from None
    if "PET_RDZV_BACKEND" not in os.environ:
        parser.set_defaults(rdzv_backend=SWIFT_BACKEND)
    for name in ("max_restarts", *_FROM_SLURM):
        # Of those of `_FROM_SLURM` only the command asks Slurm.
        if f"PET_{name.upper()}" not in os.environ and (name == "max_restarts" or ctx is not None):
            parser.set_defaults(**{name: None})
    _add_ours(parser)
    return parser


class LaunchCommand(click.Command):
    """A click command whose parameters are those of torch's parser and ours, looked up when they are needed."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        torch_options, our_options, arguments = _parameters(build_parser(ctx))
        help_option = self.get_help_option(ctx)
        return [*torch_options, *([help_option] if help_option else []), *our_options, *arguments]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion: the line is not finished, click guesses what it can
            ctx.allow_interspersed_args = False
            return super().parse_args(ctx, args)
        ctx.params = vars(build_parser(ctx).parse_args(args))
        if ctx.params["max_restarts"] is None and ctx.params["rdzv_backend"] != SWIFT_BACKEND:
            ctx.params["max_restarts"] = 0  # torch's own
        _fill_in(ctx.params, os.environ)
        return []

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] TRAINING_SCRIPT [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        torch_options, our_options, _ = _parameters(build_parser(ctx))
        help_option = self.get_help_option(ctx)
        for title, options in (
            ("torchrun options", [*torch_options, *([help_option] if help_option else [])]),
            ("swift-agent options", our_options),
        ):
            records = [record for option in options if (record := option.get_help_record(ctx))]
            with formatter.section(title):
                formatter.write_dl(records)


def _fill_in(params: dict[str, Any], environ: Mapping[str, str]) -> None:
    """What was not said: by the step of Slurm that this is, else by torch's defaults."""
    step = slurm.step_of(environ)
    if step is not None and params["rdzv_backend"] == SWIFT_BACKEND and not params["standalone"]:
        if params["nnodes"] is None:
            params["nnodes"] = str(step.num_nodes - max(params["spares"], 0))
        if params["rdzv_id"] is None:
            params["rdzv_id"] = step.name
        if params["node_rank"] is None:
            params["node_rank"] = step.node_number
    for name, default in _FROM_SLURM.items():
        if params[name] is None:
            params[name] = default


def _parameters(parser: _Parser) -> tuple[list[click.Option], list[click.Option], list[click.Argument]]:
    """torch's options, ours, and the positional arguments of *parser*, as click's, in order."""
    torch_options: list[click.Option] = []
    our_options: list[click.Option] = []
    arguments: list[click.Argument] = []
    for action in _actions(parser):
        if not action.option_strings:
            many = action.nargs == argparse.REMAINDER
            arguments.append(click.Argument([action.dest], nargs=-1 if many else 1, required=not many))
        elif action in parser.ours:
            our_options.append(_option(action, parser))
        else:
            torch_options.append(_option(action, parser))
    return torch_options, our_options, arguments


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    # argparse has no public way to list its actions.
    return (action for action in parser._actions if not isinstance(action, argparse._HelpAction))


def _option(action: argparse.Action, parser: _Parser) -> click.Option:
    switch = action.nargs == 0
    kind: Any = {int: click.INT, float: click.FLOAT}.get(action.type, click.STRING)  # type: ignore[call-overload]
    if action.choices is not None:
        kind = click.Choice([str(choice) for choice in action.choices])
    help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
    if note := _NOTES.get(action.dest):
        help_text = f"{help_text} {note}"
    return click.Option(
        [*action.option_strings, action.dest],
        is_flag=switch,
        type=None if switch else kind,
        metavar=action.metavar if isinstance(action.metavar, str) else None,
        default=action.default,
        show_default=not switch and action.default not in (None, "", []),
        envvar=f"PET_{action.dest.upper()}" if isinstance(action, env | check_env) else None,
        show_envvar=True,
        help=help_text,
    )


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse *args* (default: `sys.argv[1:]`) as torch's function of that name does.

    Returns the namespace of `torch.distributed.run.parse_args` plus our options. A mistake is printed with the usage
    to stderr and raises `SystemExit(2)`; `--help` raises `SystemExit(0)`. Nothing else happens.
    """
    command = LaunchCommand("swift-run", context_settings={"help_option_names": ["-h", "--help"]})
    try:
        context = command.make_context("swift-run", list(sys.argv[1:] if args is None else args))
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.UsageError as mistake:
        mistake.show()
        raise SystemExit(mistake.exit_code) from None
    return argparse.Namespace(**context.params)
