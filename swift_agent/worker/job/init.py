"""`swift_agent.init()`: from a process of `swift-run` (or torchrun, or nothing) to a `Job`.

Under an agent the worker says hello first, so that even a death inside this function is recovered in place, and waits
to be told what it is: one of all that begin together, or a replacement that sets itself up alone. It must never talk to
etcd: what a worker has to know comes over its agent's socket.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from swift_agent.errors import UsageError
from swift_agent.wire import messages as msg
from swift_agent.wire.channel import ENV_SOCKET, connect
from swift_agent.wire.environment import WorkerEnvironment, read_worker_env
from swift_agent.wire.root_cause import place_of
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.groups import process_groups
from swift_agent.worker.groups.errors import GroupsAborted, RebuildFailed
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.job import second_init, set_up
from swift_agent.worker.job.job import Job
from swift_agent.worker.job.objects import Objects
from swift_agent.worker.job.set_up import SetUp
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.peer_errors import is_communication_error, is_own
from swift_agent.worker.loop.protected import Protected
from swift_agent.worker.loop.unprotected import Unprotected
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.seeds import RngMode, Seeds

CONNECT_TIMEOUT = timedelta(minutes=10)

_job: Job | None = None


def init(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    rng: RngMode = "iteration",
    seed: int | None = None,
) -> Job:
    """Join the job; instead of `torch.distributed.init_process_group(backend)`.

    *backend*: "gloo", "nccl" or torch's "cpu:gloo,cuda:nccl"; by default nccl where CUDA is available, else gloo.
    *timeout*: of collectives, as in torch. *rng*: with "iteration", all generators (Python, NumPy, torch CPU and
    CUDA) are seeded at each iteration from (*seed*, rank, iteration), so that a replacement draws what its
    predecessor would have drawn; with "user" they are left alone, and a replacement takes over the state of the rank
    it copies. *seed* defaults to `torch.initial_seed()` when training begins, that is to the script's
    `torch.manual_seed`. If the script has not called that before, torch is seeded here, from the run and the rank: a
    replacement then draws in its set-up what its predecessor has drawn.

    Afterwards the default process group exists; a later `init_process_group`, of a library for one, has nothing to do,
    and raises `UsageError` if it asks for another one. So does this if called twice or after `init_process_group`.
    """
    global _job
    if _job is not None:
        raise UsageError("swift_agent.init() was called before in this process; it gives one Job, pass that on.")
    if dist.is_initialized():
        raise UsageError("a process group exists already: call swift_agent.init() instead of init_process_group().")
    if rng not in ("iteration", "user"):
        raise UsageError(f"swift_agent.init(rng={rng!r}): 'iteration' or 'user'.")
    device = _device()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if ENV_SOCKET in os.environ:
        _job = _with_agent(read_worker_env(os.environ), backend, timeout, device, rng, seed)
    else:
        _job = _without_agent(backend, timeout, device, rng, seed)
    second_init.allow_again()
    return _job


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _without_agent(
    backend: str, timeout: timedelta | None, device: torch.device, rng: RngMode, seed: int | None
) -> Job:
    """Under torchrun as any script; started as `python train.py`, a job of one rank."""
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    rank = dist.get_rank()
    place = Place(rank, Seeds(rng, seed, rank), threading.RLock())
    return Job(rank, local_rank, dist.get_world_size(), device, place, Unprotected(place), None)


def _with_agent(
    environment: WorkerEnvironment, backend: str, timeout: timedelta | None, device: torch.device,
    rng: RngMode, seed: int | None,
) -> Job:  # fmt: skip
    rank, number = environment.rank, environment.number
    set_up.seed(f"{environment.run_id} {environment.run}", rank)
    standing = MyStanding(environment.directory, number)
    supervisor = Supervisor(connect(environment.socket_path), rank, standing, environment)
    groups = process_groups.install()
    place = Place(rank, Seeds(rng, seed, rank), supervisor.fence)
    started_s = None if environment.started_s is None else time.time() - environment.started_s
    protected = Protected(place, supervisor, groups, device, started_s, standing)
    hello = msg.Hello(number, environment.generation)
    supervisor.start(hello, place.report, groups.abort, place.next_iteration)
    _create_groups(protected, place, supervisor, groups, backend, timeout)
    job = Job(rank, number, environment.world_size, device, place, protected, supervisor)
    _install_hooks(job, supervisor)
    watch = SetUp(
        rank=rank, is_replacement=job.is_replacement, is_over=lambda: job._begun, note=supervisor.note,
        unfit=job._unfit, later=Objects(place, protected).make,
    )  # fmt: skip
    watch.watch()
    job._set_up = watch
    return job


def _create_groups(
    protected: Protected, place: Place, supervisor: Supervisor, groups: ProcessGroups, backend: str,
    timeout: timedelta | None,
) -> None:  # fmt: skip
    """Create the default group: with all others if all begin, alone if this worker replaces another."""
    created = False
    while True:
        go = supervisor.peek_go()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = go.store_host, str(go.store_port)
        solo = go.plan.kind == "copy"
        if solo:
            # Its set-up needs nobody, and nobody its set-up. It enters the generation when its loop begins.
            with supervisor.changed:
                place.status = "empty"
            protected.standing.replaces(go.plan.iteration)
            if created:
                protected.dry_runs.enter()
            else:
                groups.init_default_group(
                    backend, go.session_store, go.generation, place.rank, go.world_size, timeout=timeout, solo=True
                )
            groups.solo = True
            return
        go = supervisor.wait_go()
        if go.plan.kind == "copy":
            raise AssertionError("a plan to begin together was followed by one to copy, with nobody holding state")
        try:
            if created:
                groups.rebuild(go.session_store, go.generation, CONNECT_TIMEOUT, go.token)
            else:
                created = True
                groups.init_default_group(
                    backend,
                    go.session_store,
                    go.generation,
                    place.rank,
                    go.world_size,
                    timeout=timeout,
                    connect_timeout=CONNECT_TIMEOUT,
                    store_token=go.token,
                )
            with supervisor.changed:
                if not supervisor.interrupted:
                    place.status = "setup"
                    return
        except (GroupsAborted, RebuildFailed) as error:
            hears = supervisor.reconnect if isinstance(error, RebuildFailed) else supervisor.confirm
            if not hears(error):
                raise


def _install_hooks(job: Job, supervisor: Supervisor) -> None:
    """The end of the script, however it comes, must be told apart: done, failed, or cut by a peer's failure."""
    original_hook, original_exit, original_destroy = sys.excepthook, sys.exit, dist.destroy_process_group

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            if not is_own(error) and (
                supervisor.interrupted or (is_communication_error(error) and supervisor.confirm(error))
            ):
                original_hook(kind, error, trace)
                supervisor.give_up(why_unfit(error, trace))
            job._fail()
            _record(error)
        original_hook(kind, error, trace)

    def exit_(status: Any = None, /) -> None:
        if status not in (None, 0):
            job._fail()
        original_exit(status)

    def destroy(group: Any = None) -> None:
        # The groups are needed until all ranks are at their end.
        if group is None or group is dist.group.WORLD:
            job.close()
        original_destroy(group)

    sys.excepthook, sys.exit = on_exception, exit_  # type: ignore[assignment]
    builtins.exit = builtins.quit = exit_  # type: ignore[assignment]  # those of `site` raise SystemExit by themselves
    second_init.replace("destroy_process_group", destroy)
    job._close_at_exit()


def why_unfit(error: BaseException, trace: TracebackType | None) -> str:
    """The script does not go on: an error came out of it after a peer had failed."""
    place = place_of("".join(traceback.format_exception(type(error), error, trace))) or type(error).__name__
    if is_communication_error(error):
        return f"a collective outside an iteration was cut ({place}); decorate the code with @job.resilient"
    return (
        f"the script raised {place}, outside an iteration and after a peer had failed: what it had from a collective "
        "may have been cut; decorate code with collectives with @job.resilient"
    )


def _record(error: BaseException) -> None:
    """Leave the traceback where the agent looks for the root cause, in torch's format."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    trace = error.__traceback__
    try:
        raise error  # torch writes the traceback of what is being handled, and a hook for exceptions handles none
    except BaseException:
        error.__traceback__ = trace
        get_error_handler().record_exception(error)
