"""The generation that a worker is to enter, as its main thread has it: the agent's `Go` with the plan read.

This module must never decide anything: what is in the message the agents have decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swift_agent.wire import messages as msg
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
    helpers: int = 0
    """So many processes repeat the one rank of the plan together with its replacement."""
    share: int = 0
    """Of one of those: which share of the micro-batches is its own, from 1; 0 of a worker."""

    @property
    def session_store(self) -> tuple[str, int]:
        return self.store_host, self.session_port

    @classmethod
    def of(cls, message: msg.Go) -> Go:
        """Raises KeyError, TypeError or ValueError if there is no plan in it."""
        store = message.store
        return cls(
            generation=message.generation,
            plan=Plan.from_json(message.plan),
            world_size=message.world_size,
            store_host=store.host,
            store_port=store.port,
            session_port=store.session_port,
            token=store.token.encode(),
            leaves=message.leaves,
            keeps=message.keeps,
            kept=message.kept,
            helpers=message.helpers,
            share=message.share,
        )
