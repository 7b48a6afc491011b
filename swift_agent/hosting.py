"""The c10d stores that an agent hosts, one pair per generation: torch's own for scripts that call `init_process_group`,
and ours, with a token, for workers that call `swift_agent.init()`. Must never decide who hosts."""

from __future__ import annotations

import secrets

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swift_agent.generation_store import StoreServer
from swift_rendezvous.keys import StoreRecord


class GenerationStores:
    """Keeps the stores of the newest generation and of the one before, which its workers may still be leaving."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._open: dict[int, tuple[StoreRecord, TCPStore, StoreServer]] = {}

    def open(self, generation: int) -> StoreRecord:
        """Start the stores of *generation* on fresh ports, so that no key of an older one can be read again. Those that
        run already are named again."""
        if generation in self._open:
            return self._open[generation][0]
        for number in [number for number in self._open if number < generation - 1]:
            self._open.pop(number)[2].close()
        token = secrets.token_hex(16)
        torch_store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        session_store = StoreServer(self._host, token=token.encode())
        record = StoreRecord(self._host, torch_store.port, session_store.port, token)
        self._open[generation] = (record, torch_store, session_store)
        return record

    def close(self) -> None:
        for _, _, session_store in self._open.values():
            session_store.close()
        self._open.clear()
