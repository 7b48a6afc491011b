"""Watches on etcd that outlive their server: they resume elsewhere without loss and without repetition.

Must never skip a revision silently: what cannot be resumed exactly is raised as `Compacted`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store._etcd_proto import RANGE, WATCH, decode_event, encode_key, watch_request
from swift_rendezvous.store._etcd_transport import TRY_S, Transport, as_error, is_transient, log, needs_login
from swift_rendezvous.store.kv import Compacted, PermissionDenied, WatchResponse
from swift_rendezvous.threads import NoThread, is_for_want_of_threads, only_logged, start, thread

QUIET_S = 1.0  # a stream that was silent for so long has its server probed
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.03, 1.0


class EtcdWatch:
    """Implements `kv.Watch`. The thread that iterates reads the stream itself: no queue, no hop between threads."""

    def __init__(self, transport: Transport, watchdog: Watchdog, prefix: str, single_key: bool,
                 start_revision: int, before: str | None = None) -> None:
        self._transport = transport
        self._watchdog = watchdog
        self.prefix = prefix
        self._before = before
        self._single_key = single_key
        # The next revision that the caller has not seen. Taken from the events, never from a response's header: the
        # header of a catching-up watch names the store's revision, which may be ahead of what was delivered.
        self._next_revision = start_revision
        self.endpoint_index = transport.current
        self._cancelled = threading.Event()
        self._call: Any = None
        self._request_done = threading.Event()
        self._token: str | None = None
        self._was_denied = False
        self._pause_s = 0.0
        self.heard_s = 0.0

    # -- for the caller ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[WatchResponse]:
        return self

    def __enter__(self) -> EtcdWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """See `kv.Watch`. Safe from any thread, any number of times."""
        self._cancelled.set()
        self._drop_stream()
        self._watchdog.remove(self)

    def __next__(self) -> WatchResponse:
        while not self._cancelled.is_set():
            try:
                message = next(self._call or self._open())
            except (grpc.RpcError, StopIteration) as error:
                self._drop_stream()
                if not self._cancelled.is_set():
                    self._recover(error)
                continue
            except (ValueError, RendezvousError):  # ValueError is what gRPC says about a closed channel
                if not self._transport.closed.is_set():
                    self._drop_stream()
                    raise
                break
            except RuntimeError as error:
                self._drop_stream()
                if is_for_want_of_threads(error):
                    self._transport.abandon(self.endpoint_index)
                    raise NoThread(f"there is no thread for a watch: {error}") from error
                raise
            self.heard_s = time.monotonic()
            response = self._digest(message)
            if response is not None:
                return response
        self.cancel()
        raise StopIteration

    # -- the stream ----------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        self.heard_s = time.monotonic()
        self._token = self._transport.login(self.endpoint_index, TRY_S, self._track)
        # With `hasleader` a member that is cut off from its leader ends the stream instead of staying silent.
        metadata = (("hasleader", "true"), *((("token", self._token),) if self._token else ()))
        done = self._request_done = threading.Event()
        request = watch_request(self.prefix, self._single_key, self._next_revision, self._before)

        def requests() -> Iterator[Any]:
            yield request
            done.wait()  # half-closing the stream would end it behind a proxy

        stub = self._transport.stub(self.endpoint_index, WATCH, stream=True)
        call = stub(requests(), metadata=metadata)
        self._track(call)
        self._watchdog.add(self)
        return call

    def _track(self, call: Any) -> None:
        """Remember what is running so that `cancel` can end it; end it at once if `cancel` was first."""
        self._call = call
        if self._cancelled.is_set():
            call.cancel()

    def _drop_stream(self) -> None:
        call, self._call = self._call, None
        self._request_done.set()
        if call is not None:
            call.cancel()

    def __del__(self) -> None:
        # gRPC's thread that waits for more requests must not outlive a watch that was forgotten.
        self._request_done.set()

    def restart(self, reason: str) -> None:
        """Called by the watchdog: the server of this stream does not answer."""
        log.info("etcd watch %s: %s: %s", self.prefix, self._transport.endpoint(self.endpoint_index), reason)
        call = self._call
        if call is not None:
            call.cancel()

    def _digest(self, message: Any) -> WatchResponse | None:
        if message.canceled:
            self._drop_stream()
            self._server_cancelled(message)
            return None
        if message.created:
            # Only an accepted watch proves the endpoint good: a refused stream must not reset the pause.
            self._pause_s = 0.0
            self._was_denied = False
            return None
        if not message.events:
            self._next_revision = max(self._next_revision, message.header.revision + 1)
            return None
        events = tuple(
            decode_event(event) for event in message.events if event.kv.mod_revision >= self._next_revision
        )
        if not events:
            return None
        revision = events[-1].kv.mod_revision
        self._next_revision = revision + 1
        return WatchResponse(revision, events)

    def _server_cancelled(self, message: Any) -> None:
        reason = message.cancel_reason
        if message.compact_revision:
            self.cancel()
            raise Compacted(
                f"watch {self.prefix!r} from revision {self._next_revision}: compacted up to "
                f"{message.compact_revision}; list again and watch from there",
                message.compact_revision,
            )
        denied = "permission denied" in reason
        has_user = self._transport.config.user is not None
        if needs_login(None, reason) or (denied and has_user and not self._was_denied):
            # Servers before 3.5.10 call an expired token a denied permission: believe it the second time only.
            self._was_denied = denied
            self._transport.forget(self._token)
            return
        if denied:
            self.cancel()
            raise PermissionDenied(f"etcd refused to watch {self.prefix!r}: {reason.removeprefix('etcdserver: ')}")
        self._rotate(reason or "watch cancelled by the server")

    def _recover(self, error: Exception) -> None:
        """Prepare the next try after a broken stream, or raise when there can be none."""
        if not isinstance(error, grpc.RpcError):
            self._rotate("stream ended")
            return
        code, details = error.code(), error.details() or ""
        if needs_login(code, details):
            self._transport.forget(self._token)
        elif not is_transient(code, details):
            self.cancel()
            raise as_error(code, details, f"to watch {self.prefix!r}")
        self._rotate(f"{details.removeprefix('etcdserver: ')} ({code.name})")

    def _rotate(self, reason: str) -> None:
        """Go to the next endpoint, after a pause that grows as long as none accepts the watch."""
        left = self.endpoint_index
        self._transport.leave(left, reason)
        good = self._transport.current  # never *left*, unless there is no other
        self.endpoint_index = good if good != left else (left + 1) % self._transport.num_endpoints
        log.debug("etcd watch %s: %s: %s", self.prefix, self._transport.endpoint(left), reason)
        self._cancelled.wait(self._pause_s)
        self._pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))


class Watchdog:
    """Restarts the watches of servers that hold their connection open but do not answer.

    Silence of a stream means nothing, so its server is asked something, at most once a second; a server that does not
    answer within a second loses its watches. One daemon thread while there are watches.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._wake = threading.Event()
        self._running = False

    def add(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.add(watch)
            if not self._running:
                start(thread("etcd-watchdog", self._run, only_logged))
                self._running = True

    def remove(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def close(self) -> None:
        """Cancel all watches and end the thread."""
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.cancel()
        self._wake.set()

    def _run(self) -> None:
        while not self._wake.wait(QUIET_S):
            with self._lock:
                if not self._watches:
                    self._running = False
                    return
            try:
                self._probe(time.monotonic())
            except Exception:
                # Nothing else would notice that a server is frozen.
                log.exception("quiet watches could not be looked after; trying on")

    def _quiet_watches(self, now_s: float) -> dict[int, list[EtcdWatch]]:
        with self._lock:
            watches = list(self._watches)
        by_endpoint: dict[int, list[EtcdWatch]] = {}
        for watch in watches:
            if now_s - watch.heard_s >= QUIET_S:
                by_endpoint.setdefault(watch.endpoint_index, []).append(watch)
        return by_endpoint

    def _probe(self, asked_s: float) -> None:
        calls: dict[int, Any] = {}
        by_endpoint = self._quiet_watches(asked_s)  # only for now: an abandoned watch must not live on here
        try:
            for index, quiet in by_endpoint.items():
                # From the server's own memory: another member, or the leader, being away is not this server's fault.
                # A server that refuses has answered as well, so an old token is good enough.
                request = RANGE.request(key=encode_key(quiet[0].prefix) or b"\0", serializable=True, count_only=True)
                try:
                    calls[index] = self._transport.stub(index, RANGE).future(
                        request, timeout=TRY_S, metadata=self._transport.metadata()
                    )
                except RuntimeError:
                    self._transport.abandon(index)
                    raise
            dead = {index for index, call in calls.items() if not _answered(call)}
        except (ValueError, RendezvousError):  # closed meanwhile
            return
        for index in dead:
            for watch in by_endpoint[index]:
                if watch.heard_s <= asked_s and watch.endpoint_index == index:
                    watch.restart(f"no answer within {TRY_S:g} s")


def _answered(call: Any) -> bool:
    error = call.exception()
    return error is None or not is_transient(error.code(), error.details() or "")
