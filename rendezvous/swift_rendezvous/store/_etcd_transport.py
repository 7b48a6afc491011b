"""Calls to an etcd cluster: channels, deadlines, failover, login. What `etcd.EtcdStore` is made of.

Must never log or raise a password or a token, and must never start a thread before the first call.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store._etcd_proto import AUTHENTICATE, Method
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import (
    AuthenticationFailed,
    Compacted,
    LeaseLost,
    PermissionDenied,
    RequestRefused,
    StoreUnavailable,
)
from swift_rendezvous.threads import is_for_want_of_threads

log = logging.getLogger("swift_rendezvous.store.etcd")

TRY_S = 1.0  # one try on one endpoint, in the first round over all of them
PAUSE_S = 0.03  # between two rounds
WANT_S = 0.1  # between two tries that this process itself stands in the way of
_OUTAGE_S = 30.0
# What gRPC opens when it starts, before it connects; with some to spare.
_DESCRIPTORS = 8

_OPTIONS = [
    # etcd drops a connection that is pinged more often than every 5 s. Without the ping timeout a frozen server is
    # noticed only after a minute.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # Retries are ours: gRPC would not go to another endpoint.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A store of its own per object: closing one must not disturb another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    # etcd is inside the cluster; an http_proxy meant for the outside must not get its traffic.
    ("grpc.enable_http_proxy", 0),
]

Metadata = tuple[tuple[str, str], ...]
_Code = grpc.StatusCode
_CONNECTION_CODES = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED}


def is_transient(code: Any, details: str) -> bool:
    """Whether another try, or another endpoint, may succeed. What etcd itself says under any other code is final."""
    if code in _CONNECTION_CODES:
        return True
    if code is _Code.RESOURCE_EXHAUSTED:
        return "too many requests" in details
    return code in (_Code.INTERNAL, _Code.UNKNOWN) and not details.startswith("etcdserver:")


def needs_login(code: Any, details: str) -> bool:
    """A token that timed out, was issued by a dead server or before the permissions changed."""
    return (
        code is _Code.UNAUTHENTICATED
        or "invalid auth token" in details
        or "revision of auth store is old" in details
        or "user name is empty" in details  # no token where one is wanted
    )


def as_error(code: Any, details: str, what: str) -> RendezvousError:
    """The exception for a final refusal."""
    message = f"etcd refused {what}: {details.removeprefix('etcdserver: ')}"
    if code is _Code.PERMISSION_DENIED:
        return PermissionDenied(message)
    if "invalid user ID or password" in details:
        return AuthenticationFailed(message)
    if "requested lease not found" in details:
        return LeaseLost(message)
    if "has been compacted" in details:
        return Compacted(message)
    if code is _Code.INVALID_ARGUMENT:
        return RequestRefused(message)
    return RendezvousError(f"{message} ({code.name})")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response and whether an earlier try of the same call may have been applied as well."""

    response: Any
    retried: bool


class NoDescriptors(StoreUnavailable):
    """This process cannot open enough files to connect."""


class Transport:
    """One channel per endpoint, a current endpoint, a token. *asked* is called after each request, in its thread: its
    name, the seconds it took, whether it was answered."""

    def __init__(self, config: EtcdConfig, asked: Callable[[str, float, bool], None] | None = None) -> None:
        self.config, self._asked = config, asked
        self.closed = threading.Event()
        self._credentials = _credentials(config) if config.tls else None
        self._lock = threading.Lock()
        self._channels: dict[int, Any] = {}
        self._stubs: dict[tuple[int, str], Any] = {}
        # Members start evenly loaded; only a failure makes a client move.
        self._current = random.randrange(len(config.endpoints))
        self._left_s = -math.inf
        self._token: str | None = None
        self._login_is_off = config.user is None

    @property
    def num_endpoints(self) -> int:
        return len(self.config.endpoints)

    @property
    def current(self) -> int:
        """Index of the endpoint that answered last, or that is tried next."""
        return self._current

    def endpoint(self, index: int) -> str:
        return self.config.endpoints[index]

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()

    # -- one call ------------------------------------------------------------------------------------------------

    def call(self, method: Method, request: Any, timeout_s: float | None = None) -> Answer:
        """Ask endpoint after endpoint until one answers. Raises what `kv.KeyValueStore` says."""
        if self._asked is None:
            return self._call(method, request, timeout_s)
        began_s, is_answered = time.monotonic(), False
        try:
            answer = self._call(method, request, timeout_s)
            is_answered = True
            return answer
        finally:
            self._asked(method.name, time.monotonic() - began_s, is_answered)

    def _call(self, method: Method, request: Any, timeout_s: float | None) -> Answer:
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        reasons: dict[int, str] = {}
        retried = False
        num_tries = num_logins = 0
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._unavailable(method, timeout_s, reasons)
            index = self._current
            # Later rounds wait longer, so that a server that is merely slow gets to answer.
            try_s = min(left_s, TRY_S * 2 ** (num_tries // self.num_endpoints))
            token: str | None = None
            try:
                token = self.login(index, try_s)
                metadata = (("token", token),) if token else None
                return Answer(self.stub(index, method)(request, timeout=try_s, metadata=metadata), retried)
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
            except ValueError as error:  # what gRPC says about a closed channel
                if not self.closed.is_set():
                    raise
                raise _closed_error() from error
            except (NoDescriptors, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not is_for_want_of_threads(error):
                    raise
                # There may be some again in a moment. Nothing was sent.
                self.abandon(index)
                reasons[index] = f"not asked: {error}"
                self.closed.wait(min(WANT_S, max(0.0, deadline_s - time.monotonic())))
                if self.closed.is_set():
                    raise _closed_error() from error
                continue
            if self.closed.is_set():
                raise _closed_error()
            if needs_login(code, details):
                self.forget(token)
                num_logins += 1
                if num_logins > 2:  # a member that lags behind the login; normally the second try succeeds
                    self.closed.wait(PAUSE_S)
                reasons[index] = _reason(code, details, try_s)
                continue
            if not is_transient(code, details):
                raise as_error(code, details, method.name)
            # A connection that was never made has carried no request.
            retried = retried or not (code is _Code.UNAVAILABLE and "failed to connect" in details)
            reasons[index] = _reason(code, details, try_s)
            self.leave(index, reasons[index])
            num_tries += 1
            if num_tries % self.num_endpoints == 0:
                self.closed.wait(min(PAUSE_S, max(0.0, deadline_s - time.monotonic())))

    def leave(self, index: int, reason: str) -> None:
        """Go on with the next endpoint, unless another thread has done so already."""
        with self._lock:
            if self._current != index or self.num_endpoints == 1:
                return
            self._current = (index + 1) % self.num_endpoints
            first = time.monotonic() - self._left_s > _OUTAGE_S
            self._left_s = time.monotonic()
        # One line per outage: while all members are away each of them is left again and again.
        level = logging.INFO if first else logging.DEBUG
        log.log(level, "etcd %s: %s; going on with %s", self.endpoint(index), reason, self.endpoint(self._current))

    def stub(self, index: int, method: Method, stream: bool = False) -> Any:
        """The callable for a method at an endpoint; its channel is made on first use."""
        stub = self._stubs.get((index, method.path))
        if stub is None:
            with self._lock:
                if self.closed.is_set():
                    raise _closed_error()
                channel = self._channels.get(index)
                if channel is None:
                    channel = self._channels[index] = self.connect(self.endpoint(index))
                make = channel.stream_stream if stream else channel.unary_unary
                stub = make(method.path, method.request.SerializeToString, method.response.FromString)
                self._stubs[index, method.path] = stub
        return stub

    def abandon(self, index: int) -> None:
        """The next call there has a channel of its own. gRPC could not start the thread of one, and takes it for
        started: whatever else needs that would wait for ever, its own `__del__` too. So it is kept for the life of this
        process, also when the interpreter clears its modules. Not closed: others may be in calls that do not wait."""
        with self._lock:
            channel = self._channels.pop(index, None)
            if channel is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))
            self._stubs = {key: stub for key, stub in self._stubs.items() if key[0] != index}

    def connect(self, endpoint: str) -> Any:
        """A channel to any server of the cluster; the caller closes it. Raises NoDescriptors if there are
        none: the first channel of a process starts gRPC, which would abort it then."""
        _check_descriptors()
        target = f"ipv6:{endpoint}" if endpoint.startswith("[") else endpoint
        if self._credentials is None:
            return grpc.insecure_channel(target, _OPTIONS)
        return grpc.secure_channel(target, self._credentials, _OPTIONS)

    def metadata(self) -> Metadata | None:
        """The token that is at hand, as gRPC wants it."""
        token = self._token
        return (("token", token),) if token else None

    # -- login ---------------------------------------------------------------------------------------------------

    def login(self, index: int, timeout_s: float, on_call: Any = None) -> str | None:
        """The token to send, fetched if need be; None when no user is configured or the server wants no login.

        *on_call* is given the call while it runs, so that another thread can cancel it. Raises AuthenticationFailed,
        or grpc.RpcError. Two threads may log in at the same time: both tokens are good.
        """
        if self._login_is_off or self._token is not None:
            return self._token
        request = AUTHENTICATE.request(name=self.config.user, password=self.config.password or "")
        future = self.stub(index, AUTHENTICATE).future(request, timeout=timeout_s)
        if on_call is not None:
            on_call(future)
        try:
            self._token = future.result().token
        except grpc.FutureCancelledError:
            raise _LoginCancelled() from None
        except grpc.RpcError as error:
            if "invalid user ID or password" in (error.details() or ""):
                raise AuthenticationFailed(
                    f"etcd {self.endpoint(index)} refused user {self.config.user!r}: wrong user or password"
                ) from None
            if "authentication is not enabled" not in (error.details() or ""):
                raise
            log.info("etcd %s: user %r given, but this server wants no login", self.endpoint(index), self.config.user)
            self._login_is_off = True
        return self._token

    def forget(self, token: str | None) -> None:
        """Drop a token that was refused, unless another thread has replaced it already."""
        if token is None:
            # Refused without one: the operator has turned authentication on meanwhile.
            if self.config.user is None:
                raise AuthenticationFailed("etcd wants a user and a password: set SWIFT_ETCD_USER and a password")
            self._login_is_off = False
        elif self._token == token:
            self._token = None

    def _unavailable(self, method: Method, timeout_s: float, reasons: dict[int, str]) -> StoreUnavailable:
        lines = [f"  {name}  {reasons.get(index, 'not tried')}" for index, name in enumerate(self.config.endpoints)]
        return StoreUnavailable("\n".join([f"etcd did not answer {method.name} within {timeout_s:g} s", *lines]))


class _LoginCancelled(grpc.RpcError):  # type: ignore[misc]  # gRPC has no type information
    def code(self) -> Any:
        return _Code.CANCELLED

    def details(self) -> str:
        return "login cancelled"


def _closed_error() -> RendezvousError:
    return RendezvousError("this store was closed")


def _reason(code: Any, details: str, try_s: float) -> str:
    if code is _Code.DEADLINE_EXCEEDED:
        return f"no answer within {try_s:.2g} s"
    if "Connection refused" in details:
        return "connection refused"
    return f"{details.removeprefix('etcdserver: ')} ({code.name})"


def _check_descriptors() -> None:
    found: list[int] = []
    try:
        while len(found) < _DESCRIPTORS:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise NoDescriptors(f"{error.strerror or error} in this process (limit {limit})") from error
    finally:
        for fd in found:
            os.close(fd)


def _credentials(config: EtcdConfig) -> Any:
    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return grpc.ssl_channel_credentials(read(config.ca_cert), read(config.key), read(config.cert))
