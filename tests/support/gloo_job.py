"""Real worker processes on loopback for tests of process groups: forked from one warm process, killed by pid.

A test calls `job.start("function", rank=...)` for a function of its own module; the function runs in a new process and
its return value (JSON) comes back from `worker.result()`. Workers and test speak over `job.control`, a store.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer

REPOSITORY = Path(__file__).resolve().parents[2]
NATIVE_DIR = REPOSITORY / ".cache" / "native"
HOST = "127.0.0.1"
TOKEN = b"token of this job"
LIMIT_S = 60.0
STACKS_AFTER_S = 10.0  # a worker that runs for so long writes its stacks into its log


class Worker:
    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self._output = pid, output
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout_s: float = LIMIT_S) -> None:
        """Until the process has ended."""
        assert select.select([self._pidfd], [], [], timeout_s)[0], f"worker {self.pid} runs on:\n{self.log()}"

    def has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def has_result(self) -> bool:
        return self._output.with_suffix(".json").exists()

    def result(self, timeout_s: float = LIMIT_S) -> Any:
        """What its function returned; fails with the worker's log if it did not."""
        self.wait(timeout_s)
        path = self._output.with_suffix(".json")
        assert path.exists(), f"worker {self.pid} died:\n{self.log()}"
        return json.loads(path.read_text())

    def log(self) -> str:
        return self._output.with_suffix(".log").read_text()[-3000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait(10)

    def close(self) -> None:
        self.kill()
        os.close(self._pidfd)


class Nursery:
    """One process with torch imported that forks the workers; lives as long as a test module."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *(
            str(REPOSITORY / room) for room in ("rendezvous", "recovery", "logging_store")
        )])  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gloo_job"], cwd=REPOSITORY, env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def fork(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Job:
    """The workers and stores of one test."""

    def __init__(self, nursery: Nursery, folder: Path, module: str, native: bool, world_size: int) -> None:
        self._nursery, self._folder, self._module = nursery, folder, module
        self._servers = [StoreServer(HOST)]
        self.control = StoreClient(HOST, self._servers[0].port)
        self.world_size = world_size
        self.workers: list[Worker] = []
        self._environment = {
            "SWIFT_NATIVE": "1" if native else "0",
            "SWIFT_NATIVE_DIR": str(NATIVE_DIR),
            "TEST_CONTROL": str(self._servers[0].port),
            "WORLD_SIZE": str(world_size),
        }

    def open_generation(self, generation: int) -> None:
        """Start the c10d store of a generation and tell the workers."""
        self._servers.append(StoreServer(HOST, token=TOKEN))
        self.control.set(f"store/{generation}", str(self._servers[-1].port))

    def start(self, function: str, rank: int, **arguments: Any) -> Worker:
        output = self._folder / f"{len(self.workers)}-{function}-{rank}"
        environment = {**self._environment, "RANK": str(rank)}
        order = {"module": self._module, "function": function, "arguments": arguments, "output": str(output)}
        worker = Worker(self._nursery.fork({**order, "environment": environment}), output)
        self.workers.append(worker)
        return worker

    def start_all(self, function: str, **arguments: Any) -> list[Worker]:
        return [self.start(function, rank, **arguments) for rank in range(self.world_size)]

    def wait_for(self, *keys: str, timeout_s: float = 30) -> None:
        """Until workers have `tell`-ed all of these keys."""
        try:
            self.control.wait(list(keys), timedelta(seconds=timeout_s))
        except Exception as error:
            logs = "\n".join(worker.log() for worker in self.workers)
            raise AssertionError(f"no worker has told {keys}: {error}\n{logs}") from error

    def abort(self, generation: int) -> float:
        """Tell the workers that a generation has failed; returns the wall-clock time."""
        now_s = time.time()
        self.control.set(f"abort/{generation}", str(now_s))
        return now_s

    def results(self, workers: list[Worker]) -> list[Any]:
        """What their functions returned, in order; fails with the logs of all that did not, the first to die first."""
        waiting, died = list(workers), []
        deadline_s = time.monotonic() + LIMIT_S
        while waiting and time.monotonic() < deadline_s:
            for worker in list(waiting):
                if worker.has_ended():
                    waiting.remove(worker)
                    died += [] if worker.has_result() else [worker]
            time.sleep(0.005)
        logs = [f"--- worker {one.pid}, {how}\n{one.log()}" for how, some in (("died", died), ("runs on", waiting))
                for one in some]  # fmt: skip
        assert not logs, "\n".join(logs)
        return [worker.result() for worker in workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for server in self._servers:
            server.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def native_library() -> None:
    """Build the native backend once; a test that needs it fails with the compiler's message if it cannot be built."""
    environment = {**os.environ, "SWIFT_NATIVE_DIR": str(NATIVE_DIR), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "swift_agent.native", "build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the native backend cannot be built:\n{done.stdout}{done.stderr}"


@pytest.fixture
def make_job(
    nursery: Nursery, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str, int], Job]]:
    """make_job("native" | "python", world_size)"""
    made: list[Job] = []

    def make(mechanism: str, world_size: int = 3) -> Job:
        if mechanism == "native":
            request.getfixturevalue("native_library")
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Job(nursery, folder, str(request.path), mechanism == "native", world_size))
        return made[-1]

    yield make
    for job in made:
        job.close()


# ------------------------------------------------------------------------------------------------ inside a worker


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def control() -> StoreClient:
    """A new client: one that blocks is of no use to another thread."""
    return StoreClient(HOST, int(os.environ["TEST_CONTROL"]), timeout=timedelta(seconds=LIMIT_S))


def tell(key: str, value: str = "1") -> None:
    control().set(key, value)


def hear(key: str) -> str:
    return str(control().get(key).decode())


def store_of(generation: int) -> tuple[str, int]:
    """Address of a generation's store, once the test has opened it."""
    return HOST, int(hear(f"store/{generation}"))


def watch(groups: Any, generation: int) -> None:
    """Abort the groups when the test says that this generation has failed, as an agent's message would."""

    def run() -> None:
        hear(f"abort/{generation}")
        groups.abort(f"generation {generation} has failed", generation)

    threading.Thread(target=run, daemon=True).start()


def _serve() -> None:
    import gc

    import torch
    import torch._dynamo
    import torch.distributed.device_mesh
    import torch.nn.parallel
    import torch.testing._internal.distributed.fake_pg

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    torch.set_num_threads(1)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        _run(order)


def _run(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    output = Path(order["output"])
    log = os.open(output.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    code = 1
    try:
        faulthandler.dump_traceback_later(STACKS_AFTER_S)
        spec = importlib.util.spec_from_file_location("worker_module", order["module"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, order["function"])(**order["arguments"])
        partial = output.with_suffix(".part")
        partial.write_text(json.dumps(result))
        partial.rename(output.with_suffix(".json"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
