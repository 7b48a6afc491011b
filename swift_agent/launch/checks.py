"""What is checked of a command line before anything starts: each mistake as one sentence with its remedy.

A check adds to *mistakes* and returns something that the next ones can go on with, so that all are told at once. It
must never open a connection, make a file, start a process or import a module of the user's, and must never repeat what
may be etcd's password.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import math
import os
import re
import shutil
import signal
from collections.abc import Mapping
from typing import Literal

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size

from swift_agent.errors import SwiftError
from swift_agent.launch import slurm
from swift_agent.torch_private import launcher as torch_launcher
from swift_logging_store.stores.contract import StoreUnknown
from swift_logging_store.stores.open import check_url
from swift_recovery.strategy.budget import parse_budget
from swift_rendezvous.node.suspicion import Limits
from swift_rendezvous.store.etcd_config import EtcdConfig

EntryKind = Literal["script", "module", "command", "function"]

# The least that a lease can be renewed in time for: it is refreshed every third of its time to live.
MIN_LEASE_TTL_S = 2

# More often than that is noise on the network, less often is slower than the lease.
HEARTBEATS_S = (0.02, 5.0)

# `--strategy`.
STRATEGIES = ("auto", "replica", "log", "log+parallel", "checkpoint")

# `--preempt-signal`, for: each signal ends the job.
NO_NOTICE = "none"

# The end of a worker; a fault of the process itself.
_NO_NOTICES = {signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

# `--parallel-sum`.
SUMS = ("ordered", "unordered")


class ConfigError(SwiftError, ValueError):
    """The command line or the environment is wrong. *mistakes* holds one line for each; nothing has been started."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"swift-run cannot start: {count} in its options or environment.", *mistakes]))


def _num_nodes(ns: argparse.Namespace, mistakes: list[str]) -> tuple[int, int]:
    """The least and the most."""
    text: str = ns.nnodes
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        mistakes.append(f"--nnodes {text}: not a number of nodes; type for example --nnodes 4")
        return 1, 1
    low, high = numbers[0], numbers[-1]
    if low < 1:
        mistakes.append(f"--nnodes {text}: a job needs at least one node; type --nnodes 1 or more")
    elif low > high:
        mistakes.append(f"--nnodes {text}: the minimum is above the maximum; type --nnodes {low}")
    if ns.standalone and high > 1:
        mistakes.append(f"--nnodes {text}: --standalone is for one node; leave it out, or type --nnodes 1")
    return max(low, 1), max(low, high, 1)


def _num_workers(ns: argparse.Namespace, mistakes: list[str]) -> int:
    text: str = ns.nproc_per_node
    try:
        nproc = int(determine_local_world_size(text))
    except ValueError as error:
        mistakes.append(f"--nproc-per-node {text}: {error}; type a number, auto, cpu or gpu")
        return 1
    if nproc < 1:
        mistakes.append(f"--nproc-per-node {text}: a node needs at least one worker; type --nproc-per-node 1 or more")
    return max(nproc, 1)


def _check_numbers(ns: argparse.Namespace, mistakes: list[str]) -> None:
    for flag, value, least in (
        ("--spares", ns.spares, 0),
        ("--max-restarts", ns.max_restarts or 0, 0),
        ("--standbys", ns.standbys, 0),
        ("--replacement-timeout", ns.replacement_timeout, 0),
        ("--lease-ttl", ns.lease_ttl, MIN_LEASE_TTL_S),
    ):
        if not value >= least:  # also true for NaN
            mistakes.append(f"{flag} {value}: must be {least} or more; type {flag} {least} or more")
    if not 0 <= ns.preempt_grace < math.inf:
        mistakes.append(f"--preempt-grace {ns.preempt_grace}: must be 0 or more; type for example --preempt-grace 15")
    window = ns.max_restarts_window
    if window is not None and not 0 < window < math.inf:
        mistakes.append(f"--max-restarts-window {window}: must be above 0; type for example --max-restarts-window 3600")
    elif window is not None and not ns.max_restarts:
        mistakes.append(f"--max-restarts-window {window}: of how many? type --max-restarts N, 1 or more, as well")
    _check_preempt_signal(ns.preempt_signal, mistakes)
    _check_heartbeat(ns, mistakes)
    for flag, port, example in (("--master-port", ns.master_port, 29500), ("--metrics-port", ns.metrics_port, 9108)):
        if port is not None and not 0 <= port < 1 << 16:
            mistakes.append(f"{flag} {port}: not a port; type for example {flag} {example}")
    if ns.metrics_addr and ns.metrics_port is None:
        mistakes.append(f"--metrics-addr {ns.metrics_addr}: at which port? type --metrics-port 9108, too")
    limit = ns.message_log_limit
    if limit is not None and not 0 < limit < math.inf:
        mistakes.append(f"--message-log-limit {limit}: must be above 0 GB; type for example --message-log-limit 50")
    if not 0 < ns.stop_deadline < math.inf:
        mistakes.append(f"--stop-deadline {ns.stop_deadline}: must be above 0; type for example --stop-deadline 10")


def _node_of_slurm(ns: argparse.Namespace, environ: Mapping[str, str], mistakes: list[str]) -> str:
    """The name of this node in the step of Slurm that this is; '' outside of one."""
    step = slurm.step_of(environ)
    if step is None or ns.standalone:
        return ""
    if step.num_tasks > step.num_nodes and not (ns.node_id or environ.get("SWIFT_NODE_ID")):
        mistakes.append(
            f"this step of Slurm has {step.num_tasks} tasks on {step.num_nodes} nodes, and swift-run is started once "
            "for each node, which starts --nproc-per-node workers; type srun --ntasks-per-node=1"
        )
    if ns.spares >= step.num_nodes and ns.nnodes == str(step.num_nodes - ns.spares):
        mistakes.append(
            f"--spares {ns.spares}: this step of Slurm has {step.num_nodes} nodes, and spares are some of them; type "
            f"--spares {step.num_nodes - 1}, or fewer"
        )
    return step.node


def _check_preempt_signal(text: str, mistakes: list[str]) -> None:
    for name in text.split(",") if text != NO_NOTICE else ():
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals):
            mistakes.append(f"--preempt-signal {text}: there is no signal {name!r}; type names such as SIGTERM,SIGUSR1")
        elif number in (signal.SIGKILL, signal.SIGSTOP):
            mistakes.append(f"--preempt-signal {text}: nothing can catch {name.strip()}; leave it out")
        elif number in _NO_NOTICES:
            mistakes.append(f"--preempt-signal {text}: {name.strip()} has another meaning here; leave it out")


def _log_groups(
    text: str, num_nodes: int, max_nodes: int, mistakes: list[str]
) -> tuple[tuple[int, ...], ...]:
    """Those of several nodes, of a text like `0-1,2,3-5`."""
    if not text:
        return ()
    groups = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            mistakes.append(f"--log-groups {text}: {part!r} is no node or range of nodes; type for example 0-1,2-3")
            return ()
        if last >= num_nodes:
            mistakes.append(f"--log-groups {text}: there is no node {last}; --nnodes {num_nodes} are 0-{num_nodes - 1}")
            return ()
        groups.append(tuple(range(first, last + 1)))
    if max_nodes > num_nodes:
        mistakes.append(
            f"--log-groups {text}: nodes of a job that changes its size have no fixed numbers; leave it out, or type "
            f"--nnodes {num_nodes}"
        )
    nodes = [node for group in groups for node in group]
    if twice := sorted({node for node in nodes if nodes.count(node) > 1}):
        mistakes.append(f"--log-groups {text}: node {twice[0]} is in two groups; name each node once")
    if num_nodes > 1 and any(len(group) == num_nodes for group in groups):
        mistakes.append(f"--log-groups {text}: all nodes in one group log nothing; type --strategy checkpoint for that")
    return tuple(group for group in groups if len(group) > 1)


def _check_strategy(ns: argparse.Namespace, is_elastic: bool, mistakes: list[str]) -> None:
    if ns.strategy not in STRATEGIES:
        mistakes.append(f"--strategy {ns.strategy}: there is no such way; type one of {', '.join(STRATEGIES)}")
    for flag, path in (("--profile", ns.profile), ("--result", ns.result)):
        if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
            mistakes.append(f"{flag} {path}: no file can be written there; name one in a directory that exists")
    _check_helpers(ns, mistakes)
    if ns.log_groups and ns.strategy in ("replica", "checkpoint"):
        mistakes.append(
            f"--log-groups {ns.log_groups} --strategy {ns.strategy}: nothing is logged; leave one of them out"
        )
    budget = ns.log_budget
    if not budget:
        return
    try:
        parse_budget(budget)
    except ValueError as error:
        mistakes.append(f"--log-budget {error}")
    if ns.log_groups:
        mistakes.append(f"--log-budget {budget} --log-groups {ns.log_groups}: groups are chosen, or named; type one")
    if ns.strategy not in ("auto", "log", "log+parallel"):
        mistakes.append(f"--log-budget {budget} --strategy {ns.strategy}: nothing is logged; leave one of them out")
    if is_elastic:
        mistakes.append(f"--log-budget {budget}: a job that changes its size has no fixed groups; leave it out")


def _check_helpers(ns: argparse.Namespace, mistakes: list[str]) -> None:
    num, added, way = ns.helpers, ns.parallel_sum, ns.strategy
    may_help = way == "log+parallel" or (way == "auto" and num is not None)
    if num is not None and num < 1 and way == "log+parallel":
        mistakes.append(f"--helpers {num}: must be 1 or more; type --strategy log if nobody is to help")
    elif num is not None and num < 1:
        mistakes.append(f"--helpers {num}: must be 1 or more; leave it out")
    elif num is not None and not may_help:
        mistakes.append(f"--helpers {num}: nobody helps with --strategy {way}; type --strategy log+parallel")
    if added not in (None, *SUMS):
        mistakes.append(f"--parallel-sum {added}: there is no such way; type one of {', '.join(SUMS)}")
    elif added is not None and way == "auto" and not may_help:
        mistakes.append(f"--parallel-sum {added}: nobody may help; type for example --helpers 2 as well")
    elif added is not None and not may_help:
        mistakes.append(f"--parallel-sum {added}: nobody helps with --strategy {way}; type --strategy log+parallel")


def _check_heartbeat(ns: argparse.Namespace, mistakes: list[str]) -> None:
    shortest_s, longest_s = HEARTBEATS_S
    if not shortest_s <= ns.heartbeat <= longest_s:
        limits = f"must be {shortest_s:g} to {longest_s:g} s"
        mistakes.append(f"--heartbeat {ns.heartbeat}: {limits}; type for example --heartbeat 0.1")
        return
    noticed_s = Limits(ns.heartbeat).detection_s[1]
    if MIN_LEASE_TTL_S <= ns.lease_ttl <= noticed_s:
        mistakes.append(
            f"--heartbeat {ns.heartbeat} --lease-ttl {ns.lease_ttl}: silence is noticed in up to {noticed_s:g} s, "
            f"when the lease has ended; type --lease-ttl {math.floor(noticed_s) + 1}, or a shorter --heartbeat"
        )


def _join_timeouts_s(ns: argparse.Namespace, mistakes: list[str]) -> tuple[float, float]:
    """How long the first nodes wait for the others, and for more than the least of a range: options and defaults of
    torch's own rendezvous."""
    try:
        conf = torch_launcher.parse_rendezvous_config(ns.rdzv_conf)
    except ValueError as error:
        mistakes.append(f"--rdzv-conf {ns.rdzv_conf}: {error}; type for example --rdzv-conf join_timeout=600")
        return 0.0, 0.0
    found = []
    for name, default in (("join_timeout", "600"), ("last_call_timeout", "30")):
        text = conf.get(name, default)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            mistakes.append(f"--rdzv-conf {name}={text}: must be above 0 s; type for example {name}={default}")
        found.append(seconds)
    return found[0], found[1]


def _check_streams(ns: argparse.Namespace, mistakes: list[str]) -> None:
    for flag, value in (("--redirects", ns.redirects), ("--tee", ns.tee)):
        try:
            Std.from_str(value)
        except ValueError:
            mistakes.append(f"{flag} {value}: not a set of streams; type 0, 1, 2 or 3, or RANK:N[,RANK:N...]")
    if ns.local_ranks_filter and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", ns.local_ranks_filter):
        mistakes.append(f"--local-ranks-filter {ns.local_ranks_filter}: not a list of ranks; type for example 0,1")
    try:
        get_logging_handler(ns.event_log_handler)
    except KeyError:
        mistakes.append(
            f"--event-log-handler {ns.event_log_handler}: no such handler of torch's events; type null or console"
        )
    _directory("--log-dir", ns.log_dir, mistakes)


def _directory(flag: str, directory: str | None, mistakes: list[str]) -> str | None:
    """One that is there, or that can be made."""
    if directory is None:
        return None
    above = directory
    while not os.path.exists(above) and os.path.dirname(above) != above:
        above = os.path.dirname(above) or os.curdir
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        mistakes.append(f"{flag} {directory}: {above} is no directory that can be written to; name another one")
    return os.path.abspath(directory)


def _store(flag: str, url: str | None, mistakes: list[str]) -> str | None:
    """One that is known; whether its servers are there is not asked."""
    if url is None:
        return None
    try:
        check_url(url)
    except StoreUnknown as error:
        mistakes.append(f"{flag} {error}")
        return None
    if "://" not in url:
        return _directory(flag, url, mistakes)
    if url.startswith("file://"):
        _directory(flag, url.removeprefix("file://"), mistakes)
    return url


def _entry_kind(ns: argparse.Namespace, mistakes: list[str]) -> EntryKind:
    if ns.run_path:
        return "function"
    if ns.no_python and ns.module:
        mistakes.append("--no-python --module: a module needs Python; leave one of them out")
    if ns.no_python:
        return "command"
    return "module" if ns.module else "script"


def _check_entry(kind: EntryKind, target: str, environ: Mapping[str, str], mistakes: list[str]) -> None:
    if kind == "command":
        if shutil.which(target, path=environ.get("PATH")) is None:
            mistakes.append(f"{target}: no such program on PATH, or not executable; give its path")
    elif kind == "module":
        # Another interpreter may see other modules: then only it can tell.
        if "PYTHON_EXEC" not in environ and not _module_exists(target):
            mistakes.append(f"--module {target}: no such module on the path of this Python or in {os.getcwd()}")
    elif os.path.isdir(target) and not os.path.isfile(os.path.join(target, "__main__.py")):
        mistakes.append(f"{target}: a directory without __main__.py; name the training script in it")
    elif not os.path.exists(target):
        mistakes.append(f"{target}: no such file in {os.getcwd()}; give the path of the training script")


def _module_exists(name: str) -> bool:
    """Whether the top package of *name* can be found, without importing anything of the user's."""
    top = name.partition(".")[0]
    if not top:
        return False
    try:
        # `python -m` also looks into the current directory, which a console script does not.
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) is not None:
            return True
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _preload(text: str, mistakes: list[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            mistakes.append(f"--preload {name}: not the name of a module; type for example --preload numpy,pandas")
    return names


def _check_name(flag: str, name: str, mistakes: list[str]) -> None:
    # Names become parts of keys, where a slash would reach into another job, and of file names.
    if not name or "/" in name or not name.isprintable() or name.isspace():
        mistakes.append(f"{flag} {name!r}: must have a visible character and no '/'; type for example {flag} run-7")


def _etcd(ns: argparse.Namespace, nnodes: int, environ: Mapping[str, str], mistakes: list[str]) -> EtcdConfig | None:
    """How to reach etcd; None if the job is to have a private server."""
    if ns.standalone:
        return None
    if ns.etcd_user and ":" in ns.etcd_user:
        mistakes.append(
            "--etcd-user NAME:...: a password on the command line is seen by every user of the machine; "
            "put it into a file and type --etcd-password-file FILE"
        )
        return None
    try:
        config = EtcdConfig.from_environment(
            environ,
            endpoints=ns.rdzv_endpoint or None,
            user=ns.etcd_user,
            password_file=ns.etcd_password_file,
            ca_cert=ns.etcd_cacert,
            cert=ns.etcd_cert,
            key=ns.etcd_key,
        )
    except ValueError as error:
        mistakes.extend(str(error).splitlines())
        return None
    if config is None:
        if nnodes + max(ns.spares, 0) > 1:
            mistakes.append(_no_endpoint(ns, nnodes, environ))
        elif any((ns.etcd_user, ns.etcd_password_file, ns.etcd_cacert, ns.etcd_cert, ns.etcd_key)):
            mistakes.append("--etcd-*: for which servers? type --rdzv-endpoint HOST:2379, or leave them out")
    return config


def _no_endpoint(ns: argparse.Namespace, nnodes: int, environ: Mapping[str, str]) -> str:
    counts = [(nnodes, "node"), (ns.spares, "spare")]
    nodes = " and ".join(f"{number} {what}{'s' if number > 1 else ''}" for number, what in counts if number > 0)
    text = f"{nodes} need an etcd to meet at; type --rdzv-endpoint HOST:2379, or set SWIFT_ETCD_ENDPOINTS"
    if slurm.step_of(environ) is not None:
        text += "; deploy/slurm/train.sbatch starts one on the nodes of the job"
    elif ns.master_port is not None or ns.node_rank != 0:
        text += " (at --master-addr and --master-port workers meet, later)"
    return text
