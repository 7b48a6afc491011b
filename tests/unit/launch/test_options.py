"""The command line is torchrun's: same namespaces from the same words and variables, plus our options."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import sys
from unittest import mock

import click.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchs_run
from torch.distributed.run import get_args_parser

from swift_agent import run as run_module
from swift_agent.launch import options
from swift_agent.launch.options import parse_args
from swift_agent.run import cli

TORCH_ACTIONS = [a for a in get_args_parser()._actions if not isinstance(a, argparse._HelpAction)]
TORCH_OPTIONS = [a for a in TORCH_ACTIONS if a.option_strings]
TORCH_NAMES = {a.dest for a in TORCH_ACTIONS}
OURS = {
    "spares": 0,
    "replacement_timeout": 300.0,
    "preempt_signal": "SIGTERM,SIGUSR1,SIGUSR2",
    "preempt_grace": 15.0,
    "drained_exit_code": 0,
    "max_restarts_window": None,
    "allow_injection": False,
    "metrics_port": None,
    "metrics_addr": None,
    "log_names": None,
    "result": None,
    "lease_ttl": 5,
    "on_etcd_loss": "pause",
    "heartbeat": 0.1,
    "preload": "",
    "standbys": 1,
    "stop_deadline": 10.0,
    "recovery": "exact",
    "log_groups": "",
    "log_budget": "",
    "strategy": "auto",
    "helpers": None,
    "parallel_sum": None,
    "profile": None,
    "node_id": None,
    "journal": None,
    "message_log": None,
    "message_log_limit": None,
    "log_store": None,
    "job_secret_file": None,
    "etcd_user": None,
    "etcd_password_file": None,
    "etcd_cacert": None,
    "etcd_cert": None,
    "etcd_key": None,
}


def clean(environ: dict[str, str]) -> contextlib.AbstractContextManager[object]:
    """The environment of this process without PET_* variables but those of *environ*."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return mock.patch.dict(os.environ, {**kept, **environ}, clear=True)


def outcome(parse: object, args: list[str]) -> dict[str, str] | int | str:
    """The namespace as text (so that 1 and "1" differ), or the exit code, or the name of the exception."""
    assert callable(parse)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return {name: repr(value) for name, value in vars(parse(args)).items() if name in TORCH_NAMES}
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code


def torchrun(args: list[str]) -> argparse.Namespace:
    parser = get_args_parser()
    if "PET_RDZV_BACKEND" not in os.environ:
        parser.set_defaults(rdzv_backend="swift-etcd")  # this default and the next are meant to differ
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)
    ns = parser.parse_args(args)
    if ns.rdzv_backend != "swift-etcd" and ns.max_restarts is None:
        ns.max_restarts = 0
    return ns


VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "-1", "0.5", "1:4", "auto", "spawn", "fork", "node", "c10d", "static", "host:29400"]
    ),
    st.sampled_from(["", "a,b", "a,,b", "k=v,l=w", "0:1,1:2", "-x", "--", "--nnodes", "a b", "ü"]),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    args: list[str] = []
    for action in draw(st.lists(st.sampled_from(TORCH_OPTIONS), max_size=6)):
        flag = draw(st.sampled_from(list(action.option_strings)))
        if flag.startswith("--") and draw(st.integers(0, 3)) == 0:  # shortened, perhaps to something ambiguous
            flag = flag[: draw(st.integers(3, len(flag)))]
        if action.nargs == 0:
            args.append(flag)
        elif flag.startswith("--") and draw(st.booleans()):
            args.append(f"{flag}={draw(VALUES)}")
        elif not flag.startswith("--") and draw(st.booleans()):
            args.append(f"{flag}{draw(VALUES)}")
        else:
            args += [flag, draw(VALUES)]
    rest = st.sampled_from(["other.py", "--", "--help", "--spares", "--nnodes", "-m", "7", "--lr=0.1", "-h"])
    args += draw(st.sampled_from([[], ["--"]]))
    # An option of ours in front of the script is the one thing that torchrun would not understand.
    return args + draw(st.sampled_from([[], ["train.py", *draw(st.lists(rest, max_size=4))]]))


ENVIRONMENTS = st.dictionaries(
    st.sampled_from([f"PET_{action.dest.upper()}" for action in TORCH_OPTIONS if action.nargs != 0]), VALUES, max_size=4
)
SWITCHES = st.dictionaries(
    st.sampled_from([f"PET_{action.dest.upper()}" for action in TORCH_OPTIONS if action.nargs == 0]),
    st.sampled_from(["0", "1", "2"]),
    max_size=2,
)


@settings(max_examples=400)
@given(args=command_lines(), variables=ENVIRONMENTS, switches=SWITCHES)
def test_same_namespace_as_torchrun(args: list[str], variables: dict[str, str], switches: dict[str, str]) -> None:
    with clean({**variables, **switches}):
        assert outcome(parse_args, args) == outcome(torchrun, args)


@pytest.mark.parametrize("action", TORCH_OPTIONS, ids=lambda a: a.dest)
def test_each_option_in_each_spelling_and_variable(action: argparse.Action) -> None:
    value = {int: "3", float: "2.5"}.get(action.type, "1")  # type: ignore[call-overload]
    if action.choices:
        value = list(action.choices)[-1]
    with clean({}):
        for flag in action.option_strings:
            args = [flag, "train.py"] if action.nargs == 0 else [flag, value, "train.py"]
            found = outcome(parse_args, args)
            assert found == outcome(torchrun, args)
            if action.dest == "print_completion":  # ends, as --help does
                continue
            assert isinstance(found, dict)
            assert found[action.dest] != outcome(parse_args, ["train.py"])[action.dest] or action.default == value
    with clean({f"PET_{action.dest.upper()}": value}):
        assert outcome(parse_args, ["train.py"]) == outcome(torchrun, ["train.py"])


def test_no_name_of_ours_is_one_of_torchs() -> None:
    assert not TORCH_NAMES & set(OURS)


def test_defaults() -> None:
    with clean({}):
        ns = parse_args(["train.py"])
    assert {name: value for name, value in vars(ns).items() if name not in TORCH_NAMES} == OURS
    assert ns.rdzv_backend == "swift-etcd" and ns.max_restarts is None
    with clean({"PET_MAX_RESTARTS": "0"}):
        assert parse_args(["train.py"]).max_restarts == 0


@pytest.mark.parametrize("backend", ["static", "c10d", "etcd", "etcd-v2", "some-plug-in"])
def test_other_backends_can_be_chosen(backend: str) -> None:
    with clean({}):
        assert parse_args(["--rdzv-backend", backend, "train.py"]).rdzv_backend == backend
    with clean({"PET_RDZV_BACKEND": backend}):
        assert parse_args(["train.py"]).rdzv_backend == backend
        assert parse_args(["--rdzv-backend=swift-etcd", "train.py"]).rdzv_backend == "swift-etcd"


def test_our_options_from_words_and_variables() -> None:
    with clean({"PET_SPARES": "2", "PET_LEASE_TTL": "9", "PET_ETCD_USER": "ann"}):
        ns = parse_args(["--lease-ttl", "7", "--preload=a,b", "--stop-deadline", "1.5", "train.py", "--spares", "5"])
    assert (ns.spares, ns.lease_ttl, ns.etcd_user) == (2, 7, "ann")
    assert (ns.preload, ns.stop_deadline) == ("a,b", 1.5)
    assert ns.training_script_args == ["--spares", "5"]


def test_an_abbreviation_of_torchs_stays_one() -> None:
    with clean({}):
        assert parse_args(["--stan", "train.py"]).standalone  # although --standbys begins likewise
        assert parse_args(["--standb", "3", "train.py"]).standbys == 3


def test_what_follows_the_script_is_untouched() -> None:
    rest = ["--help", "-h", "--spares", "x", "--nnodes", "--bogus=1", "-m", "", "a b"]
    with clean({}):
        ns = parse_args(["--nnodes", "2", "train.py", *rest])
    assert (ns.nnodes, ns.training_script, ns.training_script_args) == ("2", "train.py", rest)


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        (["--bogus", "train.py"], {}, "--bogus"),
        ([], {}, "training_script"),
        (["--spares", "many", "train.py"], {}, "invalid int value: 'many'"),
        (["train.py"], {"PET_SPARES": "many"}, "invalid int value: 'many'"),
        (["--start-method", "teleport", "train.py"], {}, "teleport"),
        (["train.py"], {"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes: a switch takes 0 or 1"),
    ],
)
def test_a_mistake_is_a_usage_error(args: list[str], environ: dict[str, str], said: str) -> None:
    with clean(environ):
        result = click.testing.CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("Usage: ")
    assert "Traceback" not in result.output


def test_help_lists_every_option_and_ours_in_a_group_at_the_end() -> None:
    with clean({}):
        for flag in ("-h", "--help"):
            result = click.testing.CliRunner().invoke(cli, [flag])
            assert result.exit_code == 0
        with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(io.StringIO()) as printed:
            parse_args(["--help"])
    assert end.value.code == 0
    theirs, title, ours = result.output.partition("swift-agent options:")
    assert title and "torchrun options:" in theirs
    assert all(flag in theirs for action in TORCH_OPTIONS for flag in action.option_strings)
    assert all(f"PET_{action.dest.upper()}" in theirs for action in TORCH_OPTIONS if type(action).__name__ == "env")
    assert all(f"--{name.replace('_', '-')}" in ours for name in OURS)
    assert "--node-id" in printed.getvalue()


def test_completion_offers_both_groups() -> None:
    environ = {"_SWIFT_RUN_COMPLETE": "bash_complete", "COMP_WORDS": "swift-run --nnodes 2 --s", "COMP_CWORD": "3"}
    with clean({}):
        result = click.testing.CliRunner().invoke(cli, prog_name="swift-run", env=environ)
    offered = {line.rpartition(",")[2] for line in result.output.splitlines()}
    assert {"--standalone", "--start-method", "--spares", "--stop-deadline"} <= offered
    assert "--nnodes" not in offered


def test_public_names_are_called_as_torchs() -> None:
    """Also by the names of their arguments."""
    names = [name for name, found in vars(torchs_run).items()
             if inspect.isfunction(found) and found.__module__ == torchs_run.__name__ and not name.startswith("_")]
    assert {"main", "run", "parse_args", "get_args_parser", "config_from_args", "parse_min_max_nnodes"} <= set(names)
    for name in names:
        theirs = inspect.signature(getattr(torchs_run, name)).parameters
        ours = inspect.signature(getattr(run_module, name)).parameters
        assert list(ours)[: len(theirs)] == list(theirs), name
        more = list(ours.values())[len(theirs) :]
        assert all(one.default is not inspect.Parameter.empty for one in more), name


def test_an_option_of_a_newer_torch_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer() -> argparse.ArgumentParser:
        parser = get_args_parser()
        parser.add_argument("--brand-new", "--brand_new", type=int, choices=[1, 2], default=1, help="100 %% new")
        parser.add_argument("--hosts", nargs="+")
        parser.add_argument("-v", "--verbose", action="count", default=0)
        parser.add_argument("--tag", action="append")
        parser.add_argument("--no-color", dest="color", action="store_false")
        return parser

    monkeypatch.setattr(options, "get_torchs_parser", newer)
    args = ["--brand_new", "2", "-vv", "--tag", "a", "--tag=b", "--no-color", "--hosts", "h1", "h2", "--spares", "1"]
    with clean({"PET_RDZV_BACKEND": "c10d"}):
        ours = vars(parse_args([*args, "train.py", "-v"]))
        theirs = vars(newer().parse_args([*args[:-2], "--role", "default", "train.py", "-v"]))
        shown = click.testing.CliRunner().invoke(cli, ["--help"]).output
    assert {name: value for name, value in ours.items() if name not in OURS} == theirs
    assert ours["hosts"] == ["h1", "h2"] and ours["brand_new"] == 2
    assert "--brand-new, --brand_new [1|2]" in shown and "100 % new" in shown and "--no-color" in shown


def test_the_parser_stands_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """What torch.distributed.run has beside main is here, too, and means the same."""
    with clean({}):
        parser = run_module.get_args_parser()
        ns = parser.parse_args(["--nproc-per-node", "2", "--spares", "1", "train.py", "--lr", "1"])
        assert vars(ns) == vars(parse_args(["--nproc-per-node", "2", "--spares", "1", "train.py", "--lr", "1"]))
        with pytest.raises(SystemExit) as end:
            parser.parse_args(["--no-such-option", "train.py"])
        assert end.value.code == 2 and "swift-run: error" in capsys.readouterr().err
        config, command, args = run_module.config_from_args(ns)
    assert (config.nproc_per_node, config.rdzv_backend, command) == (2, "swift-etcd", sys.executable)
    assert args == ["-u", "train.py", "--lr", "1"]
    assert run_module.parse_min_max_nnodes("2:20") == (2, 20)
    with pytest.raises(RuntimeError):
        run_module.parse_min_max_nnodes("2:20:30")
    public = {name for name, value in vars(torchs_run).items()
              if not name.startswith("_") and getattr(value, "__module__", "") == torchs_run.__name__}
    assert public <= set(run_module.__all__)


def test_a_namespace_of_torchs_parser_has_our_defaults() -> None:
    with clean({"PET_SPARES": "3"}):
        ns = options.with_our_options(torchs_run.parse_args(["--rdzv-backend", "swift-etcd", "train.py"]))
    assert (ns.spares, ns.lease_ttl, ns.training_script) == (3, 5, "train.py")
