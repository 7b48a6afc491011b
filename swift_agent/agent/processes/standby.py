"""The agent's end of a standby server (`standby_server`): a process with torch imported, from which workers are forked.

Orders are answered by "started" with a process id; what is still open when the server dies is the agent's to start in
another way. Must never block, but for the start of a process.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_agent.agent.processes import orders
from swift_agent.wire.channel import ChannelClosed, WorkerChannel
from swift_agent.wire.environment import Placement
from swift_agent.wire.vocabulary import NotUnderstood, written

log = logging.getLogger(__name__)

# A fork takes milliseconds, and so does an order to a server that is ready; longer than that, and an import of the
# script's modules hangs. Until it is ready it imports torch: a process that is started cold would be no faster.
ANSWER_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 120.0
# The longest that a server which is stopped can keep the agent, when its socket is full.
SEND_TIMEOUT_S = 2.0
# So long it has to end by itself; it may be importing.
CLOSE_TIMEOUT_S = 0.2


@dataclass(frozen=True)
class Order:
    """One worker that was asked for."""

    place: Placement
    local_rank: int
    env: Mapping[str, str]
    ordered_s: float


def start_process(control: socket.socket) -> subprocess.Popen[bytes]:
    """The server's process, with its end of the control channel."""
    command = [
        sys.executable,
        "-P",
        "-u",
        "-m",
        "swift_agent.agent.processes.standby_server",
        str(control.fileno()),
        str(os.getpid()),
    ]
    # A module that asks at import whether there are GPUs must not touch CUDA with that: no fork could use it then.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return subprocess.Popen(command, pass_fds=[control.fileno()], stdin=subprocess.DEVNULL, env=environment)


class StandbyServer:
    """One process. *preloaded*: the modules that it was asked to import; *num_wanted*: how many standbys."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs)
        ours.settimeout(SEND_TIMEOUT_S)
        self._channel = WorkerChannel(ours)
        self._orders: dict[int, Order] = {}
        self._num_orders = 0
        self._ready_s: float | None = None
        self.preloaded: tuple[str, ...] = ()
        self.num_wanted = 0

    @property
    def is_ready(self) -> bool:
        """It has imported torch: a fork takes milliseconds."""
        return self._ready_s is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    # Each of these raises `ChannelClosed` if the server is dead.

    def want(self, count: int) -> None:
        """Keep *count* standbys ready."""
        self.num_wanted = count
        self._send(orders.Standbys(count))

    def preload(self, modules: Sequence[str]) -> None:
        self.preloaded = tuple(modules)
        self._send(orders.Preload(self.preloaded))

    def order(self, place: Placement, local_rank: int, env: Mapping[str, str], assignment: orders.Assignment) -> None:
        self._num_orders += 1
        self._send(orders.Start(self._num_orders, assignment))
        self._orders[self._num_orders] = Order(place, local_rank, env, time.monotonic())

    def _send(self, message: orders.ToServer) -> None:
        try:
            self._channel.send(written(message))
        except ChannelClosed:
            self.kill()  # it may be alive, and have got a part of it
            raise

    def receive(self) -> list[orders.FromServer]:
        """What it has said; for an event loop."""
        try:
            messages = [orders.FROM_SERVER.read(message) for message in self._channel.receive_ready()]
        except NotUnderstood as error:
            not_understood = ChannelClosed(f"the standby server is not understood: {error}")
            log.warning("%s", not_understood)
            raise not_understood from None
        if any(isinstance(message, orders.Ready) for message in messages):
            self._ready_s = time.monotonic()
        return messages

    # ---- orders ----

    def answered(self, ticket: int) -> Order | None:
        """The open order of that number, which then is closed. None: it was closed before."""
        return self._orders.pop(ticket, None)

    def reopen(self, ticket: int, order: Order) -> None:
        """The process that was started is dead already: the server finds that out, too, and starts another."""
        self._orders[ticket] = order

    def open_orders(self) -> list[Order]:
        return list(self._orders.values())

    def forget_orders(self) -> None:
        """What was ordered is not wanted any more: it is killed when it comes."""
        self._orders.clear()

    def is_overdue(self, now_s: float) -> bool:
        ready_s = self._ready_s
        if ready_s is None:
            return any(now_s - order.ordered_s > READY_TIMEOUT_S for order in self._orders.values())
        return any(now_s - max(order.ordered_s, ready_s) > ANSWER_TIMEOUT_S for order in self._orders.values())

    # ---- end ----

    def kill(self) -> None:
        """Its end is seen as the end of its channel. Standbys end with it, workers do not."""
        self._process.kill()

    def close(self) -> None:
        """It ends with its channel, and ends the import that it tries, whose group is not known here; if it is busy it
        tries none, and is killed."""
        self._channel.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
