"""Mistakes of users: one clear error each, at once, and nothing left behind."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_rendezvous.store import private_etcd
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import EtcdCluster
from tests.support.job import SOURCE_ROOTS

TRACKED = """
import torch, swift_agent as swift
job = swift.init()
net = torch.nn.Linear(2, 2)
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def run_swift(tmp_path: Path, forks: ForkServer) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """*as_typed*: the command is started as a user does; else it is forked from a process that has its imports."""

    def run(
        *args: str, script: str | None = None, as_typed: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        words = list(args)
        if script is not None:
            (tmp_path / "script.py").write_text(script)
            words.append(str(tmp_path / "script.py"))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS),
            "OMP_NUM_THREADS": "1",
            **environment,
            "TMPDIR": str(tmp_path),
        }
        command = ["-m", "swift_agent.run", *words]
        if not as_typed:
            return forks.run(command, env, Path.cwd(), 60)
        return subprocess.run(
            [sys.executable, *command],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    yield run
    left = [path for path in tmp_path.iterdir() if path.name.startswith(("swift-agent", "swift-etcd"))]
    for logs in tmp_path.glob("torchelastic_*"):
        # Of a worker that has failed the error file stays, as under torchrun: the error names it.
        files = [path for path in logs.rglob("*") if path.is_file()]
        left += [path for path in files if path.name != "error.json"] if files else [logs]
    assert not left, f"left behind: {left}"


@pytest.fixture
def etcd() -> Iterator[str]:
    with PrivateEtcd() as server:
        yield server.endpoint


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--spares", "-1"), "--spares"),
        (("--nnodes", "2:1"), "--nnodes 2:1"),
        (("--nnodes", "two"), "--nnodes two"),
        (("--nnodes", "2"), "--rdzv-endpoint"),
        (("--max-restarts", "-1"), "--max-restarts"),
        (("--nproc-per-node", "many"), "--nproc-per-node"),
        (("--nnodes", "2", "--rdzv-endpoint", "host:port"), "host:port"),
    ],
)
def test_options(
    args: tuple[str, ...], message: str, run_swift: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_swift(*args, script="print('started')")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "started" not in done.stdout


def test_all_mistakes_at_once(run_swift: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_swift("--spares", "-1", "--nnodes", "2:1", "/no/such/script.py")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("--spares", "--nnodes 2:1", "/no/such/script.py"))


def test_script_missing(run_swift: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_swift("/no/such/script.py", as_typed=True)
    assert done.returncode == 2 and "/no/such/script.py" in done.stderr and "Traceback" not in done.stderr


def test_unreachable_etcd(
    run_swift: Callable[..., subprocess.CompletedProcess[str]], free_port: Callable[[], int]
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    began_s = time.monotonic()
    done = run_swift("--nnodes", "2", "--rdzv-endpoint", endpoint, script="print('started')")
    assert done.returncode == 69 and endpoint in done.stderr
    assert "Traceback" not in done.stderr and "started" not in done.stdout
    assert time.monotonic() - began_s < 30


def test_wrong_password(run_swift: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("not-the-password")
    secret.chmod(0o600)
    with EtcdCluster(tmp_path) as cluster:
        cluster.enable_login("trainer", "the-password", "/swift/")
        login = (
            "--nnodes",
            "1",
            "--rdzv-endpoint",
            cluster.endpoints[0],
            "--etcd-user",
            "trainer",
            "--etcd-password-file",
            str(secret),
        )
        done = run_swift(*login, script="print('started')")
        assert done.returncode == 69 and "Traceback" not in done.stderr and "started" not in done.stdout
        assert "trainer" in done.stderr and "not-the-password" not in done.stderr
        secret.write_text("the-password\n")
        done = run_swift(*login, script="print('started')")
        assert done.returncode == 0 and "started" in done.stdout, done.stderr


def test_two_jobs_with_one_id(
    run_swift: Callable[..., subprocess.CompletedProcess[str]], forks: ForkServer, etcd: str, tmp_path: Path
) -> None:
    """The second is refused; the first goes on and leaves no key."""
    script = tmp_path / "long.py"
    script.write_text(
        "import pathlib, sys, time\nprint('up', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
    )
    done_flag = tmp_path / "done"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "TMPDIR": str(tmp_path)}
    job = ["--rdzv-endpoint", etcd, "--rdzv-id", "same"]
    reading, writing = os.pipe()
    with open(os.devnull, "wb") as null, open(writing, "wb"):
        command = ["-m", "swift_agent.run", *job, str(script), str(done_flag)]
        first = forks.start(command, env, Path.cwd(), writing, null.fileno())
    with open(reading) as output:
        try:
            assert output.readline().strip() == "up"
            second = run_swift(*job, "--nproc-per-node", "3", script="print('started')")
            assert second.returncode == 69 and "same" in second.stderr and "--rdzv-id" in second.stderr
            assert "Traceback" not in second.stderr and "started" not in second.stdout
        finally:
            done_flag.touch()
            assert first.wait(30) == 0
    assert _keys(etcd) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("swift.init()", "called before in this process"),
        (
            "job.track(model=model, optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1))",
            "no tracked model",
        ),
        ("job.track(model=model, optimizer=opt, scheduler=3)", "without state_dict"),
        (
            """
job.track(model=model, optimizer=opt)
@job.iteration
def train(t):
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
for t in job.iterations(2):
    train(t)
    job.track(model=model)
""",
            "after the first iteration",
        ),
        (
            """
job.track(model=model, optimizer=opt)
job.iteration(lambda: None)()
""",
            "outside job.batches",
        ),
        (
            """
job.track(model=model, optimizer=opt)
def train(t):
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.step()
job.run(train, iterations=2)
""",
            "second step",
        ),
        ("for batch in job.batches([1]): pass", "nothing is tracked"),
    ],
)
def test_api_misuse(body: str, message: str, run_swift: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    one = ("--standalone", "--nproc-per-node", "1", "--start-method", "forkserver")
    done = run_swift(*one, script=TRACKED + body)
    assert done.returncode == 1
    assert message in done.stderr, done.stderr[-3000:]


def test_process_group_made_before(run_swift: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_swift(
        "--standalone",
        script="import torch.distributed as dist, swift_agent as swift\n"
        "dist.init_process_group('gloo')\nswift.init()\n",
        as_typed=True,
    )
    assert done.returncode == 1 and "instead of init_process_group" in done.stderr


@pytest.mark.parametrize("kind", ["http", "silent"])
def test_the_port_of_etcd_is_used_by_something_else(
    kind: str, run_swift: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if kind == "http":
            server = http.server.HTTPServer(listener.getsockname(), http.server.BaseHTTPRequestHandler, False)
            server.socket.close()
            server.socket = listener
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run_swift("--nnodes", "2", "--rdzv-endpoint", endpoint, script="print('started')")
        if kind == "http":
            server.shutdown()
    assert done.returncode == 69 and endpoint in done.stderr and "etcd" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "started" not in done.stdout


def test_the_port_of_a_static_rendezvous_is_used_by_something_else(
    run_swift: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """`--master-port` belongs to torch's own launcher: its error comes through."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        where = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", port)
        # torch's launcher leaves its temporary log directory behind when it fails; not one that it is given.
        logs = ("--log-dir", str(tmp_path / "logs"))
        done = run_swift(*where, *logs, "--nproc-per-node", "1", script="print('started')")
    assert done.returncode != 0 and "started" not in done.stdout
    assert "EADDRINUSE" in done.stderr or "already in use" in done.stderr


def test_a_private_etcd_whose_port_was_taken_tries_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and etcd's start anybody may take it."""
    taken: list[socket.socket] = []
    original = private_etcd._free_ports

    def snatched(count: int) -> list[int]:
        ports = original(count)
        if not taken:
            taken.append(socket.create_server(("127.0.0.1", ports[0])))
        return ports

    monkeypatch.setattr(private_etcd, "_free_ports", snatched)
    with tempfile.TemporaryDirectory() as directory, PrivateEtcd(directory=directory) as server:
        assert taken and server.endpoint != f"127.0.0.1:{taken[0].getsockname()[1]}"
        assert _keys(server.endpoint) == []
    taken[0].close()


def _keys(endpoint: str) -> list[str]:
    from swift_rendezvous.store.etcd_config import EtcdConfig

    config = EtcdConfig.from_environment({}, endpoints=endpoint)
    assert config is not None
    with EtcdStore(config) as store:
        return [entry.key for entry in store.get_prefix("/swift/")[0]]


def limited(number: int) -> list[str]:
    """What a command begins with that may open no more files than that, and cannot change it."""
    code = "import os, resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, 2 * (int(sys.argv[1]),)); "
    code += "os.execv(sys.argv[2], sys.argv[2:])"
    return [sys.executable, "-c", code, str(number)]


def test_too_few_descriptors_are_told_before_anything_starts(tmp_path: Path) -> None:
    """gRPC would abort the process."""
    script = tmp_path / "script.py"
    script.write_text("")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "TMPDIR": str(tmp_path)}
    command = [*limited(40), sys.executable, "-m", "swift_agent.run", "--standalone", str(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "the hard limit of open files is 40" in ended.stderr and "ulimit -n 65536" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


CONNECTS_WITH = """
import os, resource, sys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import StoreUnavailable
config = EtcdConfig.from_environment({}, endpoints="127.0.0.1:1")
store = EtcdStore(config)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + int(sys.argv[1]), hard))
for _ in range(2):
    try:
        store.get("a")
    except StoreUnavailable as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""


def test_a_process_without_descriptors_cannot_reach_etcd_but_lives() -> None:
    """And reaches it when there are some again."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    command = [sys.executable, "-c", CONNECTS_WITH, "1"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.split("etcd did not answer Range")[1:]
    assert "not asked: Too many open files in this process (limit" in first and "connection refused" in second
