"""Process groups that outlive their connections: stop them from any thread, connect them again, all in one process.

`install()` makes torch build every group on its fake backend and records it; real backends are then put under the same
`ProcessGroup` objects, generation after generation, so that DDP, FSDP2, DeviceMesh, pipeline stages and the user's own
variables stay valid. It must never decide when to stop or with whom to go on: the session does.

Threads: `abort`, `check` and `aborted` may be used from any; everything else belongs to the thread that trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from swift_agent import native
from swift_agent.torch_private import groups as torch_private
from swift_agent.torch_private import messages as torch_messages
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.groups import backend_swap, connecting, transfer
from swift_agent.worker.groups.errors import GroupsAborted, RebuildFailed, WornOut
from swift_agent.worker.groups.group import Group, kinds_of, record, split_group
from swift_agent.worker.groups.stopping import Stop, in_background

logger = logging.getLogger(__name__)


class ProcessGroups:
    """All process groups of this process; made by `install()`."""

    def __init__(self, library: Any) -> None:
        self.solo = False
        """True: groups are only local (collectives return at once with local values), so that a replacement can run
        its set-up alone. `rebuild` ends it."""
        self._library = library
        self._groups: list[Group] = []
        self._lock = threading.RLock()
        self._attempt: connecting.Attempt | None = None
        self._store: StoreClient | None = None
        # Backends of older generations may still ask their store something, and C++ does not keep it alive.
        self._old_stores: list[StoreClient] = []
        self._generation = 0
        self._dead_generation = -1
        self._connected = False
        self._refused: tuple[str, list[Any]] = ("", [])  # inside `refused`: why, and what
        self.is_local = False
        """Inside `local`."""
        self._why: str | None = None  # set while stopped
        self._stops: list[Stop] = []  # not known to be quiet yet

    @property
    def generation(self) -> int:
        """Of the last `rebuild`, 0 before the first."""
        return self._generation

    @property
    def aborted(self) -> str | None:
        """Why the groups are stopped, or None."""
        return self._why

    @property
    def group_count(self) -> int:
        """torch's counter for the names of groups. Groups made in code that is run again need it to be put back, and
        all ranks, the replacement too, must have the same before the next `new_group`."""
        return torch_private.group_count()

    @group_count.setter
    def group_count(self, count: int) -> None:
        torch_private.set_group_count(count)

    @property
    def is_native(self) -> bool:
        return self._library is not None

    @property
    def swaps_left(self) -> int | None:
        """How many more times the groups can be connected in this process. None: without limit (native backend)."""
        if self.is_native:
            return None
        used = [one.num_swaps_used for group in self._groups for one in group.exchanges
                if isinstance(one, backend_swap.PythonExchange)]  # fmt: skip
        return backend_swap.NUM_SWAPS - max(used, default=0)

    @property
    def store(self) -> Any:
        """The client of the current generation's c10d store; cut by `abort`."""
        return self._store

    def check(self) -> None:
        """Raise GroupsAborted if the groups are stopped.

        To be called before results of collectives are used for good (`optimizer.step`): an aborted NCCL collective
        raises nothing, it just ends.
        """
        why = self._why
        if why is not None:
            raise GroupsAborted(why)

    def abort(self, why: str, generation: int | None = None) -> None:
        """Stop all groups: who is blocked in a collective gets an exception (or, with NCCL, goes on) within
        milliseconds, and so does a `rebuild` that is under way. Returns at once. May be repeated.

        `generation`: the one that has failed. If a newer one is in use already, nothing happens; if it has not been
        built yet, `rebuild` will refuse it. None: the current one.
        """
        with self._lock:
            if generation is not None and generation < self._generation:
                return
            self._dead_generation = max(self._dead_generation, self._generation if generation is None else generation)
            if self._attempt is not None:
                self._attempt.cancel(why)
                if self._store is not None:
                    self._store.cut()  # a group that is being created waits on it
            if self._connected:
                self._stop(why)

    def _stop(self, why: str) -> None:
        self._connected = False
        self._why = why
        self._stops.append(Stop(self._groups, why))
        if self._store is not None:
            self._store.cut()

    def wait_quiet(self, timeout: timedelta) -> bool:
        """Wait until nothing of the stopped backends touches a tensor any more: a few milliseconds after `abort`.

        Before it returns True, operations that were cut may still write into their tensors: nothing that took part in
        a collective may be used for training. `rebuild` waits for it too. False: they do not end; this process should
        be replaced.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        for stop in list(self._stops):
            if not stop.wait_quiet(timedelta(seconds=max(0.0, deadline_s - time.monotonic()))):
                return False
            self._stops.remove(stop)
        return True

    # ------------------------------------------------------------------------------------------------ connect

    def init_default_group(
        self, backend: str | None, store_address: tuple[str, int], generation: int, rank: int, world_size: int, *,
        timeout: timedelta | None = None, connect_timeout: timedelta = timedelta(minutes=5), solo: bool = False,
        store_token: bytes = b"",
    ) -> None:  # fmt: skip
        """`dist.init_process_group` for this generation, or alone (`solo`, without any network).

        `timeout` is that of collectives (None: torch's default), `connect_timeout` that of this call. When it raises
        GroupsAborted or RebuildFailed the default group exists and is stopped: call `rebuild`.
        """
        self.solo = True
        dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout)
        if not solo:
            self.rebuild(store_address, generation, connect_timeout, store_token)

    def rebuild(
        self, store_address: tuple[str, int], generation: int, timeout: timedelta, store_token: bytes = b"", *,
        meets: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        """Connect every group again, over a new client of the `store_client` server at (host, port).

        All members of a group must call it with the same generation, which must grow, within `timeout`; with *meets*,
        which all ranks must give, it waits until all have called it, without a limit, and `timeout` begins then;
        *meets* is told now and then for whom it waits. Groups still connected are stopped first. On success the groups
        work, on new connections under the same objects. Raises GroupsAborted (`abort` was called for this generation)
        or RebuildFailed; all groups then are stopped.
        """
        with self._lock:
            self.solo = False
            if self._connected:
                self._stop(f"generation {generation} begins")
            if generation <= self._dead_generation:
                raise GroupsAborted(self._why or f"generation {generation} has failed already")
            if generation <= self._generation:
                raise ValueError(f"rebuild of generation {generation} after {self._generation}: it must grow")
            if self.swaps_left == 0:
                raise WornOut("process groups cannot be exchanged again in this process: it must be replaced")
            if torch_messages.batch_was_cut():
                raise WornOut("a batch of messages on NCCL was cut while it was begun: this process must be replaced")
            self._generation = generation
            self._why = self._why or "not connected yet"
            self._groups = [group for group in self._groups if torch_private.is_registered(group.pg)]
            groups = list(self._groups)
            prefix = f"swift/{generation}"
            specs = [replace(spec, prefix=f"{prefix}/{spec.prefix}") for group in groups for spec in group.specs]
            meeting = meets and connecting.Meeting(generation, dist.get_rank(), dist.get_world_size(), meets)
            attempt = connecting.Attempt(
                specs, store=None, open_store=lambda: StoreClient(*store_address, store_token, timeout),
                timeout=timeout, dispose=self._dispose, meeting=meeting or None,
            )  # fmt: skip
            self._attempt = attempt
        built = self._run(attempt)
        quiet = self.wait_quiet(timeout)
        with self._lock:
            self._finish(attempt, built)
            if not quiet:
                in_background(lambda: attempt.give_up(built))
                raise WornOut("operations of the stopped groups do not end: this process must be replaced")
            if self._store is not None:
                self._store.close()
                self._old_stores.append(self._store)
            self._store = attempt.store
            for group in groups:
                self._put(group, [built.pop(0) for _ in group.specs])
                torch_private.set_group_store(group.pg, self._group_store(group.name))
            self._connected, self._why = True, None

    def _run(self, attempt: connecting.Attempt) -> list[connecting.Built]:
        try:
            return attempt.run()
        except connecting.Cancelled as error:
            self._attempt = None
            raise GroupsAborted(str(error)) from None
        except Exception as error:
            self._attempt = None
            raise RebuildFailed(str(error)) from error

    def _finish(self, attempt: connecting.Attempt, built: list[connecting.Built]) -> None:
        """Under the lock: from here on `abort` finds the result in the groups instead of the attempt."""
        self._attempt = None
        if attempt.cancelled is not None:
            in_background(lambda: attempt.give_up(built))
            raise GroupsAborted(attempt.cancelled)

    def _put(self, group: Group, built: Sequence[connecting.Built]) -> None:
        group.sockets, group.threads = [], set()
        for one, new in zip(group.exchanges, built, strict=True):
            one.put(new.backend)
            group.sockets += new.sockets
            group.threads |= new.threads
            new.backend = None  # the exchange alone must own it, else it would die with the GIL held
        group.set_default()

    def _group_store(self, name: str) -> Any:
        assert self._store is not None
        return PrefixStore(f"swift/{self._generation}/{name}", self._store)

    def _dispose(self, unwanted: list[connecting.Built]) -> None:
        """Destroy backends that nobody will use: tens of milliseconds, without the GIL where that is possible."""
        while unwanted:
            one = unwanted.pop()
            if self._library is not None:
                grave = self._library.Forward(0, 1, "gloo")
                grave.exchange(one.backend)
                grave.exchange(None)
                one.backend = None
                grave.release()

    # ------------------------------------------------------------------------------------------------ create

    def _create(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Stands in for torch's `_new_process_group_helper`."""
        name = str(arguments["group_name"])
        # torch has drawn the name already; one that is a number comes from the counter.
        count = torch_private.group_count() - int(name.isdecimal())
        try:
            return self._create_named(name, original, arguments)
        except BaseException:
            torch_private.set_group_count(count)
            raise

    def _create_named(self, name: str, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        kinds = kinds_of(str(arguments["backend"]))
        if not kinds:
            return original(**arguments)
        if not self.solo:
            self.check()
        pg, store = torch_private.create_on_fake(original, arguments)
        if pg is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        if any(group.pg is pg for group in self._groups):
            return pg, store  # same tag and ranks: torch gave the group that exists
        group = record(self._library, pg, kinds, arguments)
        try:
            if self.solo:
                with self._lock:
                    self._groups.append(group)
            else:
                self._connect(group, store)
        except BaseException:
            torch_private.forget_group(pg, name)
            raise
        return pg, store

    def _connect(self, group: Group, store: Any) -> None:
        """Give a new group, made while training is connected, its backends."""
        with self._lock:
            self.check()
            timeout = group.specs[0].timeout
            attempt = connecting.Attempt(group.specs, store=store, timeout=timeout, dispose=self._dispose)
            self._attempt = attempt
        built = self._run(attempt)
        with self._lock:
            self._finish(attempt, built)
            self._put(group, built)
            self._groups.append(group)
            self._connected = True

    # ------------------------------------------------------------------------------------------------ use

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Inside, collectives of stopped groups return at once with local values; afterwards they are stopped again.

        Only where results do not count: torch's fake backend communicates nothing, and a DDP backward on it fails.
        """
        with self._lock:
            if self._connected:
                raise RuntimeError("dry_run() is for stopped groups: call abort() first")
            everything = [one for group in self._groups for one in group.exchanges]
            for one in everything:
                one.dry_run()
        try:
            yield
        finally:
            for one in everything:
                one.end_dry_run(self._why or "not connected yet")

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Inside, collectives of connected groups return at once with local values; nobody else takes notice. Nothing
        changes inside another `local`."""
        if self.is_local:
            yield
            return
        everything = [one for group in self._groups for one in group.exchanges]
        for one in everything:
            one.local()
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False
            why, refused = self._refused
            for one in everything:
                if one in refused:
                    one.refuse(why)
                else:
                    one.end_local()

    @contextlib.contextmanager
    def refused(self, why: str, *, among: Collection[int] = ()) -> Iterator[None]:
        """Inside, operations of connected groups of more than one rank raise, but point-to-point ones, and those of
        groups that have only ranks *among* those (without the native backend all return at once with local values);
        nobody else takes notice."""
        everything = [one for group in self._groups if not group.is_among(among) for one in group.exchanges]
        for one in everything:
            one.refuse(why)
        self._refused = (why, everything)
        try:
            yield
        finally:
            self._refused = ("", [])
            for one in everything:
                one.end_local()

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's list (of the same length everywhere, signed 64-bit), by rank of the default group."""
        return transfer.all_gather_ints(values)


_installed: ProcessGroups | None = None


def install() -> ProcessGroups:
    """Take over the creation of process groups in this process, once; later calls return the same object.

    Uses the native backend if it is built (`swift_agent.native`). Raises RuntimeError when groups exist already or
    torch is set up so that groups could not be stopped.
    """
    global _installed
    if _installed is not None:
        return _installed
    if dist.is_initialized():
        raise RuntimeError("process groups exist already: call swift_agent.init() instead of init_process_group()")
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("", "0", "false", "off", "n", "no"):
        raise RuntimeError("TORCH_GLOO_LAZY_INIT is on: lazily made connections cannot be stopped. Unset it")
    if torch_private.uses_torchcomms():
        raise RuntimeError("torchcomms is on: its communicators cannot be connected again. Unset it")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    # A barrier over the store at the end of init_process_group would wait for ever in a replacement's set-up.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"
    library = native.load()
    _installed = ProcessGroups(library)
    torch_private.wrap_group_creation(_installed._create)
    torch_private.wrap_split_group(split_group)
    torch_private.have_fakes_pass_monitored_barriers()
    torch_messages.watch_symmetric_memory()
    torch_messages.mend_batches()
    logger.info("process groups are exchanged %s", "natively" if library else "in Python (native backend not built)")
    return _installed
