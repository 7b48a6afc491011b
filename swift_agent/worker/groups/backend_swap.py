"""Two ways to exchange the backend under a live process group, with one interface.

`NativeExchange` (with the compiled library): one forwarding backend for the life of the group; nothing leaks, and an
aborted group refuses operations at once. `PythonExchange`: each new backend is registered under a BackendType number
of its own; torch then keeps the old ones (threads and descriptors included) until the process ends, and there are only
`NUM_SWAPS` numbers. They must never decide when: `process_groups` says so.

The second is a makeshift for want of a compiler: when traffic is cut, gloo sometimes forgets the thread that waits for
it (see native/forward.cpp), and only the native one frees that thread. Without it the worker hangs, and its agent must
replace it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

from swift_agent.torch_private import groups

_FIRST_NUMBER = 64  # BackendType is a uint8; torch uses the small values
_LAST_NUMBER = 253
_REFUSING_NUMBER = 255
_FORWARD_NUMBER = 254  # of a forwarding backend to gloo
NUM_SWAPS = _LAST_NUMBER - _FIRST_NUMBER + 1


class Exchange(Protocol):
    """The changeable backend of one group for some of its device types."""

    frees_waiters: bool
    """Whether `stop` frees who waits for an operation; else only the cut of the connections does."""

    default_number: int
    """The BackendType that torch may be told is the group's default. C++ casts the backend under "gloo" to
    ProcessGroupGloo (DDP's logger), so only a real one may be there; "custom" is never cast."""

    def put(self, backend: Any) -> None:
        """Route operations to `backend`. The caller must give up its own references."""

    def stop(self, why: str) -> None:
        """Refuse new operations where that is possible. Called from any thread; must return at once."""

    def abort(self) -> None:
        """Call the current backend's own `abort()`, which may block (NCCL)."""

    def dry_run(self) -> None:
        """Route operations to the group's fake backend. Undone by `stop` or `put`."""

    def end_dry_run(self, why: str) -> None:
        """Back to the stopped backend."""

    def local(self) -> None:
        """Like `dry_run`, for a group that is connected and stays so. Undone by `end_local`."""

    def refuse(self, why: str) -> None:
        """Like `local`, but all operations but point-to-point ones raise, where that is possible. Undone by
        `end_local`."""

    def end_local(self) -> None:
        """Back to the connected backend."""

    def release(self) -> None:
        """Destroy stopped backends where that is possible. Blocks as long as one of their operations does."""


class NativeExchange:
    """See the module. Thread-safe: the library locks."""

    frees_waiters = True

    def __init__(self, library: ModuleType, group: Any, name: str, description: str, kind: str, devices: list[str]):
        self._fake = groups.make_fake(group.rank(), group.size())
        self._forward = library.Forward(group.rank(), group.size(), kind)
        self._forward.exchange(self._fake)
        self._library, self._kind = library, kind
        self._refusing: Any = None
        is_nccl = kind == "nccl"
        self._guarded = not is_nccl  # NCCL's own abort ends its works
        self.default_number = groups.backend_number("nccl") if is_nccl else groups.FAKE_NUMBER
        self._number = self.default_number if is_nccl else _FORWARD_NUMBER
        self._group, self._devices, self._name, self._description = group, devices, name, description
        self._route(self._number)

    def _route(self, number: int) -> None:
        groups.register_backend(self._group, self._devices, number, self._forward)
        groups.set_names(self._group, self._name, self._description)

    def local(self) -> None:
        self._route(groups.FAKE_NUMBER)  # where torch's own fake backend is registered since the creation

    def refuse(self, why: str) -> None:
        if self._refusing is None:
            self._refusing = self._library.Forward(self._group.rank(), self._group.size(), self._kind)
            self._refusing.pass_messages_to(self._forward)
        self._refusing.exchange(None, why)
        groups.register_backend(self._group, self._devices, _REFUSING_NUMBER, self._refusing)
        groups.set_names(self._group, self._name, self._description)

    def end_local(self) -> None:
        self._route(self._number)

    def put(self, backend: Any) -> None:
        self._forward.exchange(backend, guarded=self._guarded)

    def stop(self, why: str) -> None:
        self._forward.exchange(None, why)

    def abort(self) -> None:
        self._forward.abort()

    def dry_run(self) -> None:
        self._forward.exchange(self._fake)

    def end_dry_run(self, why: str) -> None:
        self._forward.exchange(None, why)

    def release(self) -> None:
        self._forward.release()


class PythonExchange:
    """See the module. Everything but `stop`, `abort` and `release` belongs to the thread that uses the group."""

    frees_waiters = False

    def __init__(self, group: Any, name: str, description: str, kind: str, devices: list[str]) -> None:
        self._group, self._kind, self._devices = group, kind, devices
        self._name, self._description = name, description
        self._fake = groups.get_backend(group, devices[0])
        self._current: Any = None
        self._number = self.default_number = groups.FAKE_NUMBER
        self.num_swaps_used = 0

    def put(self, backend: Any) -> None:
        if self._current is None:
            self._number = self.default_number = groups.backend_number(self._kind)
        else:
            if self.num_swaps_used == NUM_SWAPS:
                raise RuntimeError("no backend number left: this worker must be replaced, or build the native backend")
            self._number = _FIRST_NUMBER + self.num_swaps_used
            self.num_swaps_used += 1
        self._route(backend)
        self._current = backend

    def stop(self, why: str) -> None:
        # Its sockets are shut by the caller. Rerouting here would race with the thread that uses the group.
        pass

    def abort(self) -> None:
        if self._current is not None:
            self._current.abort()

    def dry_run(self) -> None:
        self._number, self._stopped_number = groups.FAKE_NUMBER, self._number
        self._route(self._fake)

    def end_dry_run(self, why: str) -> None:
        self._number = self._stopped_number
        self._route(self._current or self._fake)

    def local(self) -> None:
        self.dry_run()

    def refuse(self, why: str) -> None:
        self.dry_run()

    def end_local(self) -> None:
        self.end_dry_run("")

    def release(self) -> None:
        pass

    def _route(self, backend: Any) -> None:
        groups.register_backend(self._group, self._devices, self._number, backend)
        groups.set_names(self._group, self._name, self._description)
