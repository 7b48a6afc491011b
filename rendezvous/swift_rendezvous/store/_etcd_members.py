"""What the members of an etcd cluster are doing, asked one by one: which of them are certainly in no quorum.

    MemberList, Status of all known addresses --> which address is which member       (now and then, while all is well)
    connect --refused--> no server runs there
            --connected--> Status: knows no leader / has one / no answer               (again and again, while in doubt)

An address counts as a member's only after the member has answered there itself, with its id: what is configured may be
a proxy, and what a member advertises may be `localhost`. A member is refused only where all its addresses refuse, by
a reset of the machine itself and not by a firewall that says so on its behalf.

Must never decide what follows, and never take silence for an answer.
"""

from __future__ import annotations

import errno
import logging
import math
import platform
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import grpc

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store._etcd_proto import MEMBER_LIST, STATUS
from swift_rendezvous.store._etcd_transport import Transport
from swift_rendezvous.store.tenure import Event, MembersRead, Probed, Sight
from swift_rendezvous.threads import has_started, only_logged, start, thread

log = logging.getLogger("swift_rendezvous.store.etcd")

PERIOD_S = 0.25
TIMEOUT_S = 1.0
# While all is well: how often the list is read again, and what is still missing is tried again.
REFRESH_S = 30.0
RETRY_S = 3.0

_IP_RECVERR, _IPV6_RECVERR = 11, 25
_ORIGINS_OF_ICMP = (2, 3)


def _is_told_who_refuses(release: str) -> bool:
    """Whether that kernel keeps the ICMP message that has ended a connection which was not made yet."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 8)


_TELLS_ICMP = _is_told_who_refuses(platform.release())


class MembersWatch:
    """Daemon threads; *tell* is called from them. *in_doubt*: whether the members are to be asked now."""

    def __init__(self, transport: Transport, tell: Callable[[Event], object], in_doubt: Callable[[], bool]) -> None:
        self._transport, self._tell, self._in_doubt = transport, tell, in_doubt
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._members: frozenset[int] = frozenset()
        self._answered: dict[str, set[int]] = {}  # which members have, at an address
        self._busy: set[int] = set()
        self._channels: dict[str, Any] = {}
        start(thread("swift-etcd-members", self._run, only_logged))

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        refresh_s = -math.inf
        while not self._stop.wait(PERIOD_S) and not self._transport.closed.is_set():
            try:
                if self._in_doubt():
                    self._ask_all()
                elif time.monotonic() >= refresh_s:
                    refresh_s = time.monotonic() + (REFRESH_S if self._refresh() else RETRY_S)
            except Exception as error:  # whatever it is: without this thread nothing is proven, and that is safe
                log.debug("the members of etcd could not be asked: %s", error)
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    # ---- which members there are ----

    def _refresh(self) -> bool:
        """Whether all members and an address of each are known."""
        try:
            answer = self._transport.call(MEMBER_LIST, MEMBER_LIST.request(linearizable=True), TIMEOUT_S).response
        except RendezvousError as error:
            log.debug("the members of etcd could not be listed: %s", error)
            return False
        voters = {member.ID: member for member in answer.members if not member.isLearner}
        advertised = {urlsplit(url).netloc for member in answer.members for url in member.clientURLs}
        for address in sorted({*self._transport.config.endpoints, *advertised} - {""}):
            found = self._status(address)
            if found is not None:
                with self._lock:
                    self._answered.setdefault(address, set()).add(found.header.member_id)
        with self._lock:
            self._members = frozenset(voters)
            names = {member: self._name(member) or voters[member].name for member in voters}
            complete = all(self._addresses(member) for member in voters)
        self._tell(MembersRead(names))
        return complete

    def _name(self, member: int) -> str:
        """As the user knows it, where possible."""
        addresses = self._addresses(member)
        return next((a for a in addresses if a in self._transport.config.endpoints), next(iter(addresses), ""))

    def _addresses(self, member: int) -> list[str]:
        """Where that member has answered, and no other: an address of several is a proxy's. Under the lock."""
        return sorted(a for a, members in self._answered.items() if members & self._members == {member})

    # ---- how they are ----

    def _ask_all(self) -> None:
        with self._lock:
            asked = [(member, self._addresses(member)) for member in self._members if member not in self._busy]
            self._busy.update(member for member, _ in asked)
        for member, addresses in asked:
            args = (member, addresses)
            if not has_started(thread("swift-etcd-probe", self._ask, only_logged, *args)):
                with self._lock:
                    self._busy.discard(member)

    def _ask(self, member: int, addresses: list[str]) -> None:
        asked_s = time.monotonic()
        sight: Sight = "silent"
        try:
            sight = worst([self._look(member, address) for address in addresses])
        finally:
            with self._lock:
                self._busy.discard(member)
            self._tell(Probed(member, sight, asked_s, time.monotonic()))

    def _look(self, member: int, address: str) -> Sight:
        reached = reach(address, TIMEOUT_S)
        if reached != "connected":
            return "refused" if reached == "refused" else "silent"
        found = self._status(address)
        if found is None or found.header.member_id != member:
            return "silent"
        return "led" if found.leader else "leaderless"

    def _status(self, address: str) -> Any:
        """None if there is none."""
        with self._lock:
            if self._stop.is_set():
                return None
            channel = self._channels.get(address)
            if channel is None:
                try:
                    channel = self._channels[address] = self._transport.connect(address)
                except RendezvousError as error:
                    log.debug("etcd %s cannot be asked: %s", address, error)
                    return None
        call = channel.unary_unary(STATUS.path, STATUS.request.SerializeToString, STATUS.response.FromString)
        try:
            return call(STATUS.request(), timeout=TIMEOUT_S, metadata=self._transport.metadata())
        except (grpc.RpcError, ValueError) as error:  # or what gRPC says about a closed channel
            log.debug("etcd %s: no status: %s", address, error)
            return None


def worst(sights: list[Sight]) -> Sight:
    """Of one member, from what was seen at its addresses: what it says itself counts, and one silent address may be the
    one at which it is."""
    for sight in ("led", "leaderless", "silent", "refused"):
        if sight in sights:
            return sight
    return "silent"


def reach(address: str, timeout_s: float) -> str:
    """"connected"; "refused", if that is what the machine itself says at all addresses of that name; else ""."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return ""
    outcomes = {_reach_one(family, where, timeout_s) for family, _, _, _, where in found}
    if "connected" in outcomes:
        return "connected"
    return "refused" if outcomes == {"refused"} else ""


def _reach_one(family: int, where: Any, timeout_s: float) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        level, option = (
            (socket.IPPROTO_IPV6, _IPV6_RECVERR) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_RECVERR)
        )
        tells = _TELLS_ICMP
        try:
            sock.setsockopt(level, option, 1)  # to see what has refused
        except OSError:
            tells = False
        try:
            sock.connect(where)
        except OSError as error:
            if error.errno != errno.ECONNREFUSED or not tells or _was_icmp(sock):
                return ""
            return "refused"
        return "connected"


def _was_icmp(sock: socket.socket) -> bool:
    """A firewall on the way rejects with an ICMP message, and that reads like a port without a listener."""
    sock.setblocking(False)
    try:
        _, ancillary, _, _ = sock.recvmsg(0, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return False
    # struct sock_extended_err: errno (u32), origin (u8), ...
    return any(len(data) >= 5 and struct.unpack_from("=IB", data)[1] in _ORIGINS_OF_ICMP for _, _, data in ancillary)
