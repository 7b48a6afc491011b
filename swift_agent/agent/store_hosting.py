"""The c10d stores that an agent hosts, one pair per generation: torch's own for scripts that call `init_process_group`,
and ours, with a token, for workers that call `swift_agent.init()`. Both listen on the job's interface only.

Must never decide which agent hosts, nor let a token into a record, or into a message to anything but a worker."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from dataclasses import replace

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swift_agent.launch.host import is_own, resolves_to_loopback
from swift_agent.wire.store_server import StoreServer
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.records import StoreRecord
from swift_rendezvous.threads import OnFailure, only_logged

log = logging.getLogger(__name__)

# Eleven are what torch's store opens at first.
_NUM_DESCRIPTORS = 24
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
# For stores that cannot be started: descriptors may be there again soon.
STORE_TIMEOUT_S = 20.0


class PortTaken(RuntimeError):
    """Nothing can listen where workers are to meet."""


class CannotHost(RuntimeError):
    """The stores could not be started for too long: another node has to host them."""


class GenerationStores:
    """Keeps the stores of the newest generation, and of the one before while its workers may still be leaving it.

    *master_addr*, *master_port*: where torch's store is to be, as far as that can be had on this machine. *on_failure*:
    see `swift_rendezvous.threads`.
    """

    def __init__(
        self, host: str, key: JobKey, on_failure: OnFailure = only_logged, master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:  # fmt: skip
        self._host, self._key, self._on_failure = host, key, on_failure
        self._master_addr, self._master_port = master_addr, master_port
        self._open: dict[int, tuple[StoreRecord, TCPStore | None, StoreServer]] = {}
        self._late: tuple[int, float] | None = None
        """The generation whose stores could not be started, and since when that is tried."""

    def host(self, generation: int, now_s: float) -> StoreRecord | None:
        """As `open`, but None where that cannot be: it is tried again then, while it `is_due`. All wait for it, so
        raises `CannotHost` after a while."""
        try:
            record = self.open(generation)
        except PortTaken:
            raise
        except (OSError, RuntimeError) as error:  # torch's own raises the latter
            self._try_on(generation, now_s, error)
            return None
        self._late = None
        return record

    def is_due(self, generation: int) -> bool:
        return self._late is not None and self._late[0] == generation

    def _try_on(self, generation: int, now_s: float, error: Exception) -> None:
        if self._late is None or self._late[0] != generation:
            log.warning("the stores of generation %d cannot be started (%s); trying on", generation, error)
            self._late = generation, now_s
        elif now_s - self._late[1] > STORE_TIMEOUT_S:
            self._late = None
            raise CannotHost(f"the stores of generation {generation} cannot be started: {error}") from error

    def open(self, generation: int) -> StoreRecord:
        """Start the stores of *generation*, so that no key of an older one can be read again. Those that run already
        are named again. Raises `PortTaken` if the first generation cannot have its port; a later one has another then,
        with a line: those that train shall not end for it. Raises OSError or RuntimeError where it cannot be otherwise.
        In each case none is open."""
        if generation in self._open:
            return self._open[generation][0]
        self.close_before(generation - 1)
        host, torch_store = self._torch_store(generation)
        record = StoreRecord(host, 0, nonce=secrets.token_hex(16))
        token = self.token(generation, record).encode()
        session_store = StoreServer(host, token=token, on_failure=self._on_failure)
        record = replace(record, port=torch_store.port, session_port=session_store.port)
        self._open[generation] = (record, torch_store, session_store)
        return record

    def _torch_store(self, generation: int) -> tuple[str, TCPStore]:
        host = self._host
        if self._master_addr is not None and is_own(self._master_addr):
            if resolves_to_loopback(self._master_addr) and not resolves_to_loopback(host):
                log.warning("--master-addr %s: loopback; workers meet at %s instead", self._master_addr, host)
            else:
                host = self._master_addr
        if self._master_port is None:
            return host, _listening_on(host, 0)
        # An older one has the port. Its workers are gone, or do not need it: those that stay have a store of ours.
        # It closes the port when nothing refers to it any more.
        self._open = {number: (kept[0], None, kept[2]) for number, kept in self._open.items()}
        try:
            return host, _listening_on(host, self._master_port)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            what = f"--master-port {self._master_port}: nothing can listen at {host}:{self._master_port}: "
            what += error.strerror or str(error)
            if generation == 1:
                raise PortTaken(f"{what}; type another port") from error
            log.warning("%s; workers meet at another port", what)
            return host, _listening_on(host, 0)

    def close_before(self, generation: int) -> None:
        """No worker is in an older one any more."""
        for number in [number for number in self._open if number < generation]:
            self._open.pop(number)[2].close()

    def token(self, generation: int, record: StoreRecord) -> str:
        """What a worker needs for the session store of *record*, on whichever node it is."""
        return self._key.store_token(generation, record.nonce)

    def close(self) -> None:
        for _, _, session_store in self._open.values():
            session_store.close()
        self._open.clear()


def _listening_on(host: str, port: int) -> TCPStore:
    """torch's store opens its own port on all interfaces, whatever host it is given; not one that it is handed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=4096)
    port = listener.getsockname()[1]
    try:
        _check_descriptors(listener)
    except OSError:
        listener.close()
        raise
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _check_descriptors(listener: socket.socket) -> None:
    """Raises OSError where torch's store would not get all the descriptors that it needs: with those of half its event
    loop libuv ends the whole process, and with a few more its own client waits for minutes."""
    held: list[int] = []
    try:
        for _ in range(_NUM_DESCRIPTORS):
            held.append(os.dup(listener.fileno()))
    finally:
        for descriptor in held:
            os.close(descriptor)
