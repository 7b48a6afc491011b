"""Connect new backends in a thread of their own, so that a thread that waits for them can always be let go.

A gloo constructor blocks until all members of the group are there, and no member can know that one never comes. The
waiting thread is freed at once by `cancel()`; the builder itself is interrupted through its sockets and, where gloo has
none yet to interrupt, ends at the group's own timeout, unnoticed. It must not touch a process group: results are
handed over only when all are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.torch_private import groups
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.groups import gloo_sockets

_TELL = timedelta(minutes=1)


@dataclass(frozen=True)
class Meeting:
    """Of *num_ranks*, of which this is *rank*. *tell* tells people for whom it waits."""

    generation: int
    rank: int
    num_ranks: int
    tell: Callable[[str], object]


@dataclass(frozen=True)
class BackendSpec:
    """One backend to make: what `_new_process_group_helper` knows of it."""

    name: str  # of the group
    kind: str  # "gloo" or "nccl"
    prefix: str  # of its keys in the store
    rank: int
    size: int
    ranks: list[int]
    timeout: timedelta
    options: Any = None


@dataclass
class Built:
    backend: Any
    sockets: list[gloo_sockets.Socket] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)


class Cancelled(RuntimeError):
    """`cancel()` was called: the attempt is given up."""


class Attempt:
    """One try to connect some backends; see the module."""

    def __init__(
        self, specs: Sequence[BackendSpec], *, store: Any, open_store: Callable[[], StoreClient] | None = None,
        timeout: timedelta, dispose: Callable[[list[Built]], object], meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        """The store is `store`, for which the caller is responsible, or what `open_store` connects to. *meeting*: all
        must be there before anything is made; *timeout* begins then."""
        self.store = store
        self._client: StoreClient | None = None
        self._open_store, self._timeout, self._specs = open_store, timeout, specs
        self._meeting = meeting
        self._met = threading.Event()
        self._dispose = dispose
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._built: list[Built] = []
        self._before: set[int] | None = None  # sockets before the constructor that is running
        self._error: Exception | None = None
        self._cancelled: str | None = None
        self._finished = False
        self._doing = "start"

    @property
    def cancelled(self) -> str | None:
        """Why, once `cancel()` was called: then the result of `run()` is cut off and must be disposed of."""
        return self._cancelled

    def run(self) -> list[Built]:
        """Blocks until all are connected, or raises Cancelled, TimeoutError, or what the constructor raised.

        After an error nothing of the attempt is in use, and what it opened goes away in the background.
        """
        threading.Thread(target=self._build, name="swift-rebuild", daemon=True).start()
        self._met.wait()
        if not self._wake.wait(self._timeout.total_seconds()):
            self.cancel(f"not done after {self._timeout.total_seconds():g} s")
            raise TimeoutError(f"{self._doing}: not done after {self._timeout.total_seconds():g} s")
        with self._lock:
            if self._cancelled is not None:
                raise Cancelled(self._cancelled)
            if self._error is not None:
                raise self._error
            return self._built

    def cancel(self, why: str) -> None:
        """Free the thread in `run()`. Any thread; returns at once; may be repeated."""
        with self._lock:
            if self._cancelled is not None:
                return
            self._cancelled = why
            if self._client is not None:
                self._client.cut()
            targets = [socket for one in self._built for socket in one.sockets]
            if self._before is not None and not self._finished:
                targets += [one for loop in gloo_sockets.new_loops(self._before) for one in loop]
        gloo_sockets.shut_down(targets)
        self._wake.set()
        self._met.set()

    def give_up(self, built: list[Built]) -> None:
        """What `run` has returned will not be used. The store goes last: C++ does not keep it alive, and what is built
        may still ask it something."""
        self._dispose(built)
        if self._client is not None:
            self._client.close()

    def _build(self) -> None:
        try:
            if self._open_store is not None:
                self._step("connect to the store")
                client = self._open_store()
                with self._lock:
                    self.store = self._client = client
                self._meet(client)
            self._met.set()
            for spec in self._specs:
                self._build_one(spec)
        except Exception as error:
            self._error = error
            # Peers wait for us in the groups that we have connected: let them fail too.
            gloo_sockets.shut_down([socket for one in self._built for socket in one.sockets])
        with self._lock:
            self._finished = True
            unwanted = self._built if self._cancelled is not None or self._error is not None else []
            self._wake.set()
            self._met.set()
        if unwanted:
            self._dispose(unwanted)

    def _meet(self, client: StoreClient) -> None:
        """Some have much to do before they come, and gloo's constructors wait for nobody longer than the group's
        timeout. A rank that is lost is reported by its agent, which cancels this."""
        meeting = self._meeting
        if meeting is None:
            return
        here = PrefixStore(f"here/{meeting.generation}", client)
        here.set(str(meeting.rank), "")
        missing = list(map(str, range(meeting.num_ranks)))
        while missing:
            self._step("wait for all ranks to come")
            try:
                here.wait(missing, _TELL)
                return
            except dist.DistStoreError:  # not yet; or the next question says what it is
                missing = [rank for rank in missing if not here.check([rank])]
            if missing and meeting.rank == min(set(range(meeting.num_ranks)).difference(map(int, missing))):
                meeting.tell(f"ranks {', '.join(missing)} have not come yet, all others wait for them")

    def _build_one(self, spec: BackendSpec) -> None:
        self._step(f"connect group {spec.name!r} ({_abbreviate(spec)})")
        store = PrefixStore(spec.prefix, self.store)
        if spec.kind == "nccl":
            built = Built(groups.make_nccl(
                store, spec.rank, spec.size, spec.timeout, spec.name, spec.ranks, spec.options
            ))  # fmt: skip
        else:
            before, threads = gloo_sockets.sockets(), gloo_sockets.threads()
            self._before = before
            backend = groups.make_gloo(store, spec.rank, spec.size, spec.timeout, spec.name, spec.ranks)
            sockets = gloo_sockets.connections(before, spec.size - 1)
            built = Built(backend, sockets, gloo_sockets.threads() - threads)
            gloo_sockets.keep_alive(built.sockets)
        with self._lock:
            self._before = None
            self._built.append(built)

    def _step(self, doing: str) -> None:
        with self._lock:
            if self._cancelled is not None:
                raise Cancelled(self._cancelled)
            self._doing = doing


def _abbreviate(spec: BackendSpec) -> str:
    if not spec.ranks:
        return f"all {spec.size} ranks"
    text = ", ".join(map(str, spec.ranks[:8]))
    return f"ranks {text}" if len(spec.ranks) <= 8 else f"{spec.size} ranks: {text}, ..."
