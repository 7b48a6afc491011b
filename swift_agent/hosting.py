"""The c10d stores that an agent hosts, one pair per generation: torch's own for scripts that call `init_process_group`,
and ours, with a token, for workers that call `swift_agent.init()`. Both listen on the job's interface only.

Must never decide who hosts, and must never let a token into a record or a message to anybody but a worker."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swift_agent.generation_store import StoreServer
from swift_rendezvous.job_key import JobKey
from swift_rendezvous.keys import StoreRecord
from swift_rendezvous.threads import OnFailure, only_logged


class GenerationStores:
    """Keeps the stores of the newest generation, and of the one before while its workers may still be leaving it."""

    def __init__(self, host: str, key: JobKey, on_failure: OnFailure = only_logged) -> None:
        """*on_failure*: see `swift_rendezvous.threads`."""
        self._host, self._key, self._on_failure = host, key, on_failure
        self._open: dict[int, tuple[StoreRecord, TCPStore, StoreServer]] = {}

    def open(self, generation: int) -> StoreRecord:
        """Start the stores of *generation* on fresh ports, so that no key of an older one can be read again. Those that
        run already are named again. Raises OSError or RuntimeError where that cannot be; then none is open."""
        if generation in self._open:
            return self._open[generation][0]
        self.close_before(generation - 1)
        record = StoreRecord(self._host, 0, nonce=secrets.token_hex(16))
        token = self.token(generation, record).encode()
        session_store = StoreServer(self._host, token=token, on_failure=self._on_failure)
        try:
            torch_store = _listening_on(self._host)
        except BaseException:
            session_store.close()
            raise
        record = replace(record, port=torch_store.port, session_port=session_store.port)
        self._open[generation] = (record, torch_store, session_store)
        return record

    def close_before(self, generation: int) -> None:
        """No worker is in an older one any more."""
        for number in [number for number in self._open if number < generation]:
            self._open.pop(number)[2].close()

    def token(self, generation: int, record: StoreRecord) -> str:
        """What a worker needs for the session store of *record*, whoever hosts it."""
        return self._key.store_token(generation, record.nonce)

    def close(self) -> None:
        for _, _, session_store in self._open.values():
            session_store.close()
        self._open.clear()


def _listening_on(host: str) -> TCPStore:
    """torch's store opens its own port on all interfaces, whatever host it is given; not one that it is handed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=4096)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
