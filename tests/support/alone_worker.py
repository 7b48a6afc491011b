"""One rank of two in this process, with all that its loop consists of, under an agent that is not there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.protected import Protected
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.tracked.tracked import Tracked


class AloneWorker:
    """It holds state, before its first iteration. Dry runs need no process groups. *agent*: the other end of its line,
    to be closed."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, others: Mapping[str, Any] | None = None, rank: int = 0
    ) -> None:
        self.model, self.optimizer = model, optimizer
        ours, self.agent = socket.socketpair()
        self.supervisor = Supervisor(WorkerChannel(ours), 0)
        self.place = Place(rank, Seeds("iteration", 0, 0), self.supervisor.fence)
        pending = {"models": {"m": model}, "optimizers": {"o": optimizer}, "others": dict(others or {})}
        self.tracked = Tracked(cast(Any, pending), [0, 1], 2, self.supervisor)
        self.place.hold(self.tracked)
        self.place.status = "holding"
        groups = ProcessGroups.__new__(ProcessGroups)
        self.protected: Any = Protected(self.place, self.supervisor, groups, torch.device("cpu"), None)
        self.loop: Any = self.protected.assemble(self.tracked)
        self.protected.dry_runs._groups = SimpleNamespace(
            aborted=None, local=contextlib.nullcontext, dry_run=contextlib.nullcontext
        )
