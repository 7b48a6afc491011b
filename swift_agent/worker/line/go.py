"""What an agent sends its workers to have them enter a generation.

This module must never decide anything: what is in the message the agents have decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swift_agent.wire.channel import Message
from swift_recovery.planning.plan import Plan


@dataclass(frozen=True)
class Go:
    """Enter a generation: its plan, and where its stores listen (see `StoreRecord`)."""

    generation: int
    plan: Plan
    world_size: int
    store_host: str
    store_port: int
    session_port: int
    token: bytes = field(repr=False)
    leaves: bool = False
    """Of a drained node: hand the state over to the successors in the plan, and enter nothing."""
    keeps: bool = False
    """Of a worker that ends because the job changes its size: keep the state in *kept*, and enter nothing."""
    kept: str = ""
    """The directory where a node keeps a state for its new workers."""

    @property
    def session_store(self) -> tuple[str, int]:
        return self.store_host, self.session_port

    @classmethod
    def from_message(cls, message: Message) -> Go:
        """Raises KeyError, TypeError or ValueError for another one."""
        store = message["store"]
        return cls(
            generation=int(message["generation"]),
            plan=Plan.from_json(message["plan"]),
            world_size=int(message["world_size"]),
            store_host=str(store["host"]),
            store_port=int(store["port"]),
            session_port=int(store["session_port"]),
            token=str(store["token"]).encode(),
            leaves=bool(message.get("leaves")),
            keeps=bool(message.get("keeps")),
            kept=str(message.get("kept", "")),
        )
