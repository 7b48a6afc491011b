"""Keeps what iterations of ranks on other nodes were given, for who takes their place when their node is lost.

    page of a rank (`given`) --changed records, before each iteration--> its witnesses: a copy, as it comes
    its node is lost: generation n + 1 --copies, through the store--> its replacement, elsewhere

The connections are one-way but for one byte, one for each generation and witness, and both ends find each other
through the store of the generation, which only workers of the job can read. The sender never waits: what does not fit
is left out, and the whole page follows. What has arrived stays in the socket until the witness looks, which it does
now and then, and first of all in a recovery. So a rank whose record has left its node is no longer the only one that
knows what it was given.

This module must never hold up training, and decides nothing: what a copy says `given` compares.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from swift_agent.wire.given import PAGE_BYTES, RECORD_BYTES, GivenPage, copied
from swift_agent.wire.store_client import StoreClient
from swift_recovery.transfer.socket_link import Listener
from swift_rendezvous.threads import has_started, thread

_RANK = struct.Struct(">Q")
_TICKET = struct.Struct(">Q")
_MET = b"m"  # from the witness, once it holds the connection
_CONNECT = timedelta(seconds=10)
_SLICE = timedelta(seconds=2)
# All ranks begin together, so a witness is there within milliseconds; who is later is still found, and so long.
FIRST_WAIT_S = 0.2
MEET_S = 60.0
# What has come is taken out of the sockets once in so many times that this rank shows something itself: they hold more.
_LOOK_EVERY = 8
# More than that is waiting to be sent, and the page is as good.
_MAX_WAITING = 1 << 16


def witnesses_of(node: int, local_rank: int, nodes: Sequence[int]) -> list[int]:
    """Ranks on other nodes, for a rank of *node*; *nodes*: how many workers each has, in the order of their ranks. One
    on the next node, and one on the node after that if there is another one, as two nodes may be lost at once."""
    num_nodes = len(nodes)
    next_node, second = (node + 1) % num_nodes, (node + 2) % num_nodes
    if num_nodes == 1:
        return []
    found = [(next_node, local_rank)]
    if num_nodes > 2:
        found.append((second, local_rank))
    elif nodes[next_node] >= 2 * nodes[node]:
        found.append((next_node, local_rank + nodes[node]))
    return sorted(sum(nodes[:one]) + local % nodes[one] for one, local in found)


def _copies_of(rank: int) -> str:
    return f"witness/{rank}/copies"


def _where(rank: int) -> str:
    return f"witness/{rank}/where"


class _Outgoing:
    """To one witness."""

    def __init__(self, sock: socket.socket, page: GivenPage) -> None:
        self._socket, self._page = sock, page
        self._rest = b""

    def begin(self) -> None:
        """With the whole page."""
        self._rest = self._page.whole()

    def send(self, records: bytes) -> bool:
        """False once the connection is gone."""
        data = self._rest + records
        try:
            num_sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) if data else 0
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return False
        self._rest = data[num_sent:]
        if len(self._rest) > _MAX_WAITING:  # to the end of the record that has gone in part
            self._rest = self._rest[: len(self._rest) % RECORD_BYTES] + self._page.whole()
        return True

    def close(self) -> None:
        self._socket.close()


class _Incoming:
    """From a rank whose witness this one is; it says first which it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rank: int | None = None
        self._received = bytearray()

    def look(self, copies: dict[int, bytearray], world_size: int) -> bool:
        """Into *copies* with what has come. False once nothing more will."""
        is_open = True
        while is_open:
            try:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            is_open = bool(data)
        if self._rank is None and len(self._received) >= _RANK.size:
            (self._rank,) = _RANK.unpack_from(self._received)
            del self._received[: _RANK.size]
        if self._rank is not None and self._rank < world_size:
            num_whole = len(self._received) // RECORD_BYTES * RECORD_BYTES
            if num_whole:
                copied(copies.setdefault(self._rank, bytearray(PAGE_BYTES)), bytes(self._received[:num_whole]))
                del self._received[:num_whole]
        return is_open

    def close(self) -> None:
        self._socket.close()


class Witnesses:
    """Of one rank, whose *page* goes to the ranks *of* others; and this rank is one of theirs. *page*: None if it has
    none; it may still be a witness. *note* tells people."""

    def __init__(
        self, page: GivenPage | None, rank: int, of: list[int], world_size: int, note: Callable[[str], None]
    ) -> None:
        self._page, self._rank, self._of, self._world_size, self._note = page, rank, of, world_size, note
        self._copies: dict[int, bytearray] = {}
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []
        self._lock = threading.Lock()
        self._new: list[_Outgoing | _Incoming] = []  # made by a thread
        self._stop, self._is_connected = threading.Event(), threading.Event()
        self._num_shown = 0
        self._has_told = False

    # ---- the thread that trains ----

    def show(self) -> None:
        """What is new in the page goes out."""
        if self._new:
            self._take_new()
        if self._page is not None:
            records = self._page.changed()
            for one in self._outgoing:
                if not one.send(records):
                    one.close()
                    self._outgoing = [other for other in self._outgoing if other is not one]
        self._num_shown += 1
        if self._num_shown % _LOOK_EVERY == 0:
            self._look()

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for one in new:
            if isinstance(one, _Outgoing):
                one.begin()
                self._outgoing.append(one)
        self._incoming += [one for one in new if isinstance(one, _Incoming)]

    def _look(self) -> None:
        for one in self._incoming:
            if not one.look(self._copies, self._world_size):
                one.close()
                self._incoming = [other for other in self._incoming if other is not one]

    def end(self) -> None:
        """The generation has ended: what has come is taken, and the connections are given up."""
        with self._lock:
            self._stop.set()
        self._take_new()
        self._look()
        connections: list[_Outgoing | _Incoming] = [*self._outgoing, *self._incoming]
        for one in connections:
            one.close()
        self._outgoing, self._incoming = [], []

    def enter(self, store: StoreClient, *, asks: bool) -> None:
        """All ranks enter the generation of *store*, and tell it what they keep of others; who takes the place of a
        lost one *asks* for its page. The connections are made meanwhile."""
        self.end()
        if not self._of:
            return
        self._stop, self._is_connected = stop, is_connected = threading.Event(), threading.Event()
        copies = {str(rank): bytes(page).hex() for rank, page in self._copies.items()}
        listener = self._listener(store) if self._page is not None else None
        where = listener.where if listener is not None else ""
        store.multi_set([_copies_of(self._rank), _where(self._rank)], [json.dumps(copies), where])
        if listener is not None and not self._start("swift-witness", self._hear, listener, stop):
            listener.close()  # who comes is refused, and says so
        if self._page is None:
            return
        for witness in self._of if asks else []:
            told = json.loads(store.get(_copies_of(witness)))
            if str(self._rank) in told:
                self._page.learn(bytes.fromhex(told[str(self._rank)])[:PAGE_BYTES])
        if not self._start("swift-witnessed", self._find, store.clone, stop, is_connected):
            is_connected.set()

    def begin(self) -> None:
        """Training begins in that generation: what this rank is given is shown from now on."""
        if self._of and self._page is not None:
            self._is_connected.wait(FIRST_WAIT_S)
            self.show()

    def _start(self, name: str, run: Callable[..., None], *args: object) -> bool:
        """False, and told, where no thread is left: training goes on without."""
        if has_started(thread(name, run, self._tell, *args)):
            return True
        self._tell("no thread is left")
        return False

    def _listener(self, store: StoreClient) -> Listener | None:
        try:
            return Listener(store.local_address)
        except OSError as error:
            self._tell(f"{error}")
            return None

    # ---- threads of one generation ----

    def _hear(self, listener: Listener, stop: threading.Event) -> None:
        until_s = time.monotonic() + MEET_S
        with listener, contextlib.closing(listener.visitors()) as visitors:
            for sock in visitors:
                if sock is not None:
                    self._hand_over(_Incoming(sock), stop)
                    with contextlib.suppress(OSError):
                        sock.send(_MET, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                if stop.is_set() or time.monotonic() > until_s:
                    return

    def _find(
        self, clone: Callable[[timedelta], StoreClient], stop: threading.Event, is_connected: threading.Event
    ) -> None:
        try:
            with contextlib.closing(clone(_CONNECT)) as store:
                for witness in self._of:
                    self._connect(store, witness, stop)
        except (dist.DistStoreError, OSError, ValueError) as error:
            if not stop.is_set():  # else the generation has ended, and its store has
                self._tell(f"{error}")
        finally:
            is_connected.set()

    def _connect(self, store: StoreClient, witness: int, stop: threading.Event) -> None:
        until_s = time.monotonic() + MEET_S
        while not store.check([_where(witness)]):
            if stop.is_set():
                return
            with contextlib.suppress(dist.DistStoreError):
                store.wait([_where(witness)], _SLICE)
            if time.monotonic() > until_s:
                raise OSError(f"rank {witness} has not come within {MEET_S:g} s")
        where = store.get(_where(witness))
        if not where:
            return  # it keeps nothing, and has said why
        address, port, ticket = json.loads(where)
        sock = socket.create_connection((address, port), _CONNECT.total_seconds())
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(_TICKET.pack(len(ticket)) + ticket.encode() + _RANK.pack(self._rank))
            # What is sent from now on is found by the witness even if the generation ends at once.
            with contextlib.suppress(TimeoutError):
                sock.recv(len(_MET))
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        assert self._page is not None
        self._hand_over(_Outgoing(sock, self._page), stop)

    def _hand_over(self, one: _Outgoing | _Incoming, stop: threading.Event) -> None:
        with self._lock:
            if not stop.is_set():
                self._new.append(one)
                return
        one.close()

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._note(
                f"what iterations are given cannot be shown to a rank on another node ({why}): if this node is lost, "
                "nobody can tell whether its replacement trains on the same data"
            )
