"""Parallel recovery in one process: the replacement of a lost rank gathers those that help it, and a helper repeats the
same iterations until they are done, and ends.

    replacement: opens --> loads, takes logs --> gathers --> shared steps --> closes, goes on with the others
    helper:      the same script, checkpoint and logs --> joins --> shared steps --> its process ends

Where nobody comes, or steps cannot be shared, the replacement repeats everything by itself. This module must never let
a helper do anything that others notice: it is in no process group, logs nothing, and takes no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.messages.messages import Messages
from swift_agent.worker.rejoin.shared_steps import SharedSteps
from swift_agent.worker.rejoin.step_parts import Computed
from swift_recovery.replay.parallel import SUMS, Sum
from swift_recovery.replay.ring import Frame, Pieces
from swift_recovery.replay.team import Dismissed, Helper, Hub, Reformed
from swift_recovery.transfer.socket_link import connected

# A helper is started when its replacement is, and does the same until both have loaded a checkpoint. The replacement
# waits for it so long, and as long again as all that has taken, if that is more.
GATHER_S = 2.0
GATHER_SHARE = 0.5
# mallopt: what is freed stays in the process, up to 1 GiB of it, and what has less than 32 MiB is no map of its own.
_KEEP_MEMORY = ((-1, 1 << 30), (-3, 32 << 20))


class Gathering:
    """The replacement's side: from `tell` on until `close`. *note* tells people."""

    def __init__(
        self, address: str, num_helpers: int, how: Sum, note: Callable[[str], None], device: torch.device
    ) -> None:
        self._hub, self._num_helpers, self._note = Hub(address, note, how, device), num_helpers, note
        self._began_s = time.monotonic()
        self._stack = contextlib.ExitStack()

    def tell(self, store: Any, rank: int) -> None:
        """Those that help *rank* where this process listens."""
        PrefixStore("helpers", store).set(str(rank), self._hub.where)

    def begin(
        self, messages: Messages, parameters: Sequence[Tensor], device: torch.device, is_cut: Callable[[], bool]
    ) -> None:
        """Iterations are about to be repeated: wait for the helpers, and share steps with those that come."""
        within_s = max(GATHER_S, GATHER_SHARE * (time.monotonic() - self._began_s))
        self._hub.gather(self._num_helpers, within_s, is_cut)
        if self._hub.size == 1:
            self._note(f"none of {self._num_helpers} helpers has come within {within_s:.1f} s: it repeats alone")
            self.close()
            return
        if self._hub.sum != SUMS[0]:
            self._note("gradients are added block by block (--parallel-sum unordered): the result is rounded otherwise")
        shared = SharedSteps(_HubTeam(self._hub), messages, parameters, device, self._refused)
        self._stack.enter_context(shared.around())
        self._note(f"{self._hub.size} processes repeat iterations together, each some micro-batches")

    def _refused(self, why: str) -> None:
        self._note(f"its steps are not shared, it repeats them alone: {why}")
        self._hub.close()

    def close(self) -> None:
        """All iterations are repeated."""
        self._stack.close()
        self._hub.close()


class Joining:
    """A helper's side, of the rank *rank*: from `join` on until `leave`. *check* raises when there is no reason to go
    on."""

    def __init__(
        self, store: StoreClient, rank: int, messages: Messages, note: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._store, self._rank, self._messages, self._note, self._check = store, rank, messages, note, check
        self._stack = contextlib.ExitStack()

    def join(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        """The replacement, when it gathers; from then on steps are shared."""
        _keep_memory()
        where = PrefixStore("helpers", self._store).get(str(self._rank))
        with self.leaving():
            hub = self._stack.enter_context(connected(where, f"the replacement of rank {self._rank}", self._check))
            helper = Helper(hub, self._store.local_address, self._check, device)
            helper.form()
        shared = SharedSteps(_HelperTeam(helper, self), self._messages, parameters, device, self._refused)
        self._stack.enter_context(shared.around())

    def _refused(self, why: str) -> None:
        self.leave(why)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Where it is not needed any more this process ends. A script must not catch that."""
        try:
            yield
        except (Dismissed, RuntimeError) as error:
            if isinstance(error, Reformed):
                raise
            self.leave(f"{type(error).__name__}: {error}")

    def leave(self, why: str = "") -> NoReturn:
        """All iterations are repeated, or it is of no use, *why*: this process ends."""
        if why:
            self._note(f"a helper leaves: {why}")
        self._messages.discard()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _keep_memory() -> None:
    """Gradients of each micro-batch come and go in every step: to get their pages from the system each time takes as
    long as a part of the computation."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _KEEP_MEMORY:
            mallopt(option, value)


class _HubTeam:
    index = 0

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    @property
    def size(self) -> int:
        return self._hub.size

    @property
    def sum(self) -> Sum:
        return self._hub.sum

    def meet(self) -> None:
        self._hub.meet()

    def exchange(
        self, computed: Computed, own: Pieces, parameters: Sequence[Tensor], is_for_all: Callable[[Any], bool]
    ) -> tuple[list[Tensor | None], Computed]:
        everything = Computed()
        everything.parts.update(computed.parts)

        def tell(frames: Sequence[Frame]) -> list[Frame]:
            for frame in frames:
                everything.add(frame)
            told = Computed()
            told.parts.update({key: tensors for key, tensors in everything.parts.items() if is_for_all(key)})
            return [told.to_frame()] if told.parts else []

        sums, _ = self._hub.exchange(computed.of, computed.seconds, own, parameters, tell)
        return sums, everything


class _HelperTeam:
    def __init__(self, helper: Helper, joining: Joining) -> None:
        self._helper, self._joining = helper, joining

    @property
    def index(self) -> int:
        return self._helper.index

    @property
    def size(self) -> int:
        return self._helper.size

    @property
    def sum(self) -> Sum:
        return self._helper.sum

    def meet(self) -> None:
        with self._joining.leaving():
            self._helper.meet()

    def exchange(
        self, computed: Computed, own: Pieces, parameters: Sequence[Tensor], is_for_all: Callable[[Any], bool]
    ) -> tuple[list[Tensor | None], Computed]:
        everything = Computed()
        with self._joining.leaving():
            head, tensors = computed.to_frame()
            sums, frames = self._helper.exchange(head, tensors, own, parameters)
            for frame in frames:
                everything.add(frame)
        return sums, everything
