"""For all tests: nothing of ours may outlive the test that started it; free ports.

A fixture of a wider scope keeps its processes: they were there before the test. A process whose parent was killed is
nobody's child any more and is recognised by a token that it inherits in its environment.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# A test that forks (a loader with processes) does so in a process that has had clients of etcd. By default gRPC then
# waits in the fork until its threads stand still, in C and without a limit. No fork here uses it. Read by its import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from tests import tiers
from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import EtcdCluster
from tests.support.leftovers import TESTS_PREFIX, files_in, mark_children, our_processes, our_threads
from tests.support.network import Network, why_not
from tests.support.ports import free_ports

GRACE_S = 3.0

mark_children()
# What is killed leaves its temporary directories behind, torch's launcher leaves them always: all in one place, removed
# at the end. Its name is short, because sockets are made in there. pytest keeps its own where it always does.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(
    prefix=TESTS_PREFIX, dir=os.environ["PYTEST_DEBUG_TEMPROOT"]
)


def _remove_temporary_files(directory: str = os.environ["TMPDIR"], owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(directory, ignore_errors=True)


atexit.register(_remove_temporary_files)  # also where it comes to no test
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts its background jobs with SIGINT ignored. What the tests start would inherit that, and Ctrl-C with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """All others of the tests train on CPUs, on machines with a GPU too, where `swift.init()` would take NCCL."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With two processes of pytest (make test) one has what starts jobs that compute, in its order and never two at a
    time. The other has the rest, file by file: first the jobs that wait, then what waits for servers, which takes only
    the time that jobs leave it. Strangers' scripts are a sixth of all: whichever is free takes an eighth of them. The
    one with the jobs helps with the rest when it has no more."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTheirNeeds(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/strangers/"):  # what is lost in a script comes last in its name
                return f"strangers {zlib.crc32(nodeid.rpartition('-')[0].encode()) % 8}"
            return nodeid.partition("::")[0] if nodeid.startswith((*tiers.WAITING, *tiers.NO_JOBS)) else "jobs"

    config.option.loadscopereorder = False  # as they were collected, jobs first
    return ByTheirNeeds(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and item.nodeid.startswith(tiers.NO_JOBS):
        os.setpriority(os.PRIO_PROCESS, 0, 10)  # not 19: it would have to wait for seconds while a job starts


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """It makes little garbage, and takes half as long where nobody looks for it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(session.config.option, "numprocesses", None):
        gc.disable()  # until `pytest_collection_finish`, which does not come where others collect


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") or tiers.is_full(item.nodeid):
            item.add_marker("full")
        if item.get_closest_marker("gpu") and config.option.markexpr != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))
    if not any("::" in arg for arg in config.args) and (wrong := tiers.unknown(item.nodeid for item in items)):
        raise pytest.UsageError("tests/tiers.py names what is no test: " + ", ".join(wrong))


def pytest_collection_finish() -> None:
    """As the standby server does for its workers. The tests, and what they import, are half a million objects: what
    walks over all of them, as collections of garbage and some checks of the product do, would be fifty times as slow.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    _remove_temporary_files()


@pytest.fixture(autouse=True)
def no_leftover_processes() -> Iterator[None]:
    """Fail the test whose processes are alive shortly after its end, and kill them."""
    before = our_processes()
    yield
    left = [process for process in our_processes().values() if process not in before.values()]
    if not left:
        return
    _, alive = psutil.wait_procs(left, timeout=GRACE_S)
    described = []
    for process in alive:
        try:
            described.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    assert not described, "processes left behind:\n" + "\n".join(described)


@pytest.fixture(autouse=True)
def no_leftover_threads() -> Iterator[None]:
    """Fail the test whose threads run shortly after its end. They cannot be ended."""
    before = our_threads()
    yield
    left = our_threads() - before
    deadline_s = time.monotonic() + GRACE_S
    for thread in left:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    alive = sorted(thread.name for thread in left if thread.is_alive())
    assert not alive, f"threads left behind: {', '.join(alive)}"


@pytest.fixture(scope="session", autouse=True)
def no_leftover_files() -> Iterator[None]:
    """Nothing is made outside of the tests' own directory, not even by servers that do not ask where to."""
    root = os.environ["PYTEST_DEBUG_TEMPROOT"]
    before = files_in(root)
    yield
    left = files_in(root) - before
    assert not left, f"left behind in {root}: {', '.join(sorted(left))}"


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """What agents are forked from that may be."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def make_network() -> Iterator[Callable[[int], Network]]:
    """A function that makes a network of namespaces; they are gone after the test."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made: list[Network] = []

    def make(num_hosts: int) -> Network:
        made.append(Network(num_hosts))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd server of its own for the test."""
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three etcd servers of its own for the test."""
    with EtcdCluster(tmp_path, 3) as cluster:
        yield cluster


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port at which nobody listens, never the same twice in a test."""
    return lambda: free_ports(1)[0]
