"""Private parts of torchrun's launcher: NUMA binding of a worker's command, `--rdzv-conf`, the server of timers.

It must never give an option a meaning of its own: that of the installed torch counts. And it must never let the server
of timers end the agent, in whose process it runs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

# Of numactl, which torch has put before the command of a worker.
BOUND = "--physcpubind="


def bind_command_to_numa_node(command: list[str], local_rank: int, options: Any) -> list[str]:
    """The command of a worker with torch's `--numa-binding` applied, as its own launcher does; without *options* as it
    is."""
    if options is None:
        return command
    from torch.numa import binding

    bind: Callable[..., tuple[str, ...]] = binding._maybe_wrap_command_args_with_numa_binding
    index = "device_index" if "device_index" in inspect.signature(bind).parameters else "gpu_index"  # before torch 2.14
    return list(bind(tuple(command), numa_options=options, **{index: local_rank}))


def numa_cpus(local_rank: int, options: Any) -> tuple[int, ...]:
    """The processors that the same binds a worker to, for a process that is there already; () for none."""
    for word in bind_command_to_numa_node([], local_rank, options):
        if word.startswith(BOUND):
            ranges = [part.partition("-")[::2] for part in word.removeprefix(BOUND).split(",")]
            return tuple(cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1))
    return ()


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """`--rdzv-conf` as `torch.distributed.run` reads it. Raises ValueError."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return _parse_rendezvous_config(text)


class FileTimers(FileTimerServer):
    """torch's server of timers, which kills a worker that lets one run out. torch's kills its own process as well."""

    def stop(self) -> None:
        self._stop_signaled = True  # first: it must not begin to read while a writer is there
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                # Its thread waits for a first writer, in the opening of the pipe.
                stack.callback(os.close, os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK))
            super().stop()

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))
