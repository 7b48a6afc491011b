"""Find and cut the TCP sockets of a gloo process group, and watch its threads: the way to interrupt gloo (Linux).

gloo has no abort, and a thread blocked in it returns only when its sockets fail. Each gloo group runs one event loop
(an epoll descriptor) in which its listener and its connections are registered, and `/proc/self/fdinfo` lists them with
their inodes. So the group's own sockets are known exactly, whatever other threads open at the same time.

It must never shut down a listening socket (gloo's loop thread then terminates the process), nor a descriptor whose
inode is not the one that was recorded (it has been closed and given to somebody else).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# libc instead of `socket.socket(fileno=...)`: that would make the shared file description non-blocking whenever the
# user has called socket.setdefaulttimeout().
_libc = ctypes.CDLL(None, use_errno=True)
_REGISTERED = re.compile(r"^tfd:\s*(\d+) .*\bdata:\s*([0-9a-f]+) .*\bino:\s*([0-9a-f]+)", re.MULTILINE)
_EPOLL_CTL_MOD = 3


class _EpollEvent(ctypes.Structure):
    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]



_GLOO_THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")

KEEPALIVE_IDLE_S = 1
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_MS = 3000


class Socket(NamedTuple):
    """A socket of this process. The inode tells whether the descriptor still is that socket."""

    fd: int
    inode: int


def sockets() -> set[int]:
    """Inodes of all sockets of this process; compare two calls to see what was opened in between."""
    return {inode for _, kind, inode in _descriptors() if kind == "socket"}


def new_loops(before: set[int]) -> list[list[Socket]]:
    """The sockets, listeners excepted, of each event loop whose listener is not in `before`.

    `before` is what `sockets()` gave just before gloo's constructor was called. Includes connections that are only
    being made. A loop without a listener (grpc, asyncio clients) is not gloo's.
    """
    found: list[list[Socket]] = []
    for fd, kind, _ in list(_descriptors()):
        if kind != "eventpoll":
            continue
        listens = False
        others = []
        for member, _ in _registrations(fd):
            is_listener = _is_listener(member)
            if is_listener is None:
                continue
            if is_listener:
                listens = listens or member.inode not in before
            else:
                others.append(member)
        if listens and others not in found:  # the descriptor of a loop may have been duplicated for a moment, by `mute`
            found.append(others)
    return found


def connections(before: set[int], num_peers: int) -> list[Socket]:
    """The connections of the gloo group that was made since `before` and has `num_peers` other members.

    Fewer, when a peer has gone again already. More, when strangers have connected to its listener: gloo keeps those
    that say nothing. To cut those with the others harms nobody; to leave one of a member's out could not be mended.
    Raises ConnectionError if they cannot be told: such a group could not be interrupted.
    """
    if num_peers == 0:
        return []
    loops = new_loops(before)
    fitting = [loop for loop in loops if len(loop) == num_peers]
    fitting = fitting or [loop for loop in loops if len(loop) > num_peers] or loops
    if len(fitting) != 1:
        sizes = [len(loop) for loop in loops]
        raise ConnectionError(f"cannot find gloo's {num_peers} connections: new event loops have {sizes}")
    return fitting[0]


def shut_down(targets: Iterable[Socket], how: int = socket.SHUT_RDWR) -> int:
    """Shut the sockets that still exist; returns how many. Never raises, may be repeated.

    A thread that is blocked on them gets an error; with SHUT_RDWR so do their peers. With traffic under way use
    SHUT_RD: a thread that finds its socket closed for writing is forgotten by gloo and waits until the group's timeout.
    """
    num_shut = 0
    for target in targets:
        with _held(target) as fd:
            # The listener check is repeated here because its violation kills the process.
            if fd is not None and _option(fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                num_shut += _libc.shutdown(fd, how) == 0
    return num_shut


def mute(targets: Iterable[Socket]) -> None:
    """Let gloo's event loops hear no more of these sockets, which have been shut some time ago.

    A loop that has a message for an operation which is gone neither reads it nor closes the connection: it spins.
    """
    wanted = set(targets)
    for fd, kind, _ in list(_descriptors()):
        if kind != "eventpoll" or wanted.isdisjoint(member for member, _ in _registrations(fd)):
            continue
        # Of a duplicate, so that nobody can put another loop in its place meanwhile.
        try:
            loop = os.dup(fd)
        except OSError:
            continue
        try:
            for member, pointer in _registrations(loop):
                if member in wanted:
                    # Changed, not removed: gloo removes it itself and insists on finding it. The pointer is gloo's.
                    event = _EpollEvent(select.EPOLLONESHOT, pointer)
                    _libc.epoll_ctl(loop, _EPOLL_CTL_MOD, member.fd, ctypes.byref(event))
        finally:
            os.close(loop)


def threads() -> set[int]:
    """Ids of gloo's threads in this process; compare two calls to see those of a new group."""
    return {int(name) for name in os.listdir("/proc/self/task") if _status(int(name)) is not None}


def all_asleep(thread_ids: Iterable[int]) -> bool:
    """Whether all these gloo threads are blocked or gone: one that moves data would run or be about to."""
    return all(_status(one) in (None, "S") for one in thread_ids)


def keep_alive(targets: Iterable[Socket]) -> None:
    """Let the kernel notice within about 3 s that the machine at the other end is gone (a frozen process is not)."""
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    )
    for target in targets:
        with _held(target) as fd:
            if fd is not None:
                for level, name, value in options:
                    _libc.setsockopt(fd, level, name, ctypes.byref(ctypes.c_int(value)), 4)


def _descriptors() -> Iterator[tuple[int, str, int]]:
    """(descriptor, "socket" | "eventpoll", inode) of this process; the inode of an event loop is 0 (they have none)."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(name), "socket", int(target[8:-1])
        elif target == "anon_inode:[eventpoll]":
            yield int(name), "eventpoll", 0


def _registrations(epoll_fd: int) -> list[tuple[Socket, int]]:
    """What an event loop listens to, with the data that comes with the events."""
    try:
        with open(f"/proc/self/fdinfo/{epoll_fd}") as file:
            text = file.read()
    except OSError:
        return []
    return [(Socket(int(fd), int(inode, 16)), int(data, 16)) for fd, data, inode in _REGISTERED.findall(text)]


def _status(thread_id: int) -> str | None:
    """The kernel's one-letter state of a gloo thread; None: it is gone, or none of gloo's."""
    try:
        with open(f"/proc/self/task/{thread_id}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return None
    return rest.split()[0] if name in _GLOO_THREADS else None


@contextlib.contextmanager
def _held(target: Socket) -> Iterator[int | None]:
    """A duplicate of the descriptor, or None if it no longer is that socket: nobody can exchange it under us."""
    try:
        fd = os.dup(target.fd)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(fd)
        yield fd if stat.S_ISSOCK(status.st_mode) and status.st_ino == target.inode else None
    finally:
        os.close(fd)


def _is_listener(target: Socket) -> bool | None:
    """None: not a TCP socket, or gone."""
    with _held(target) as fd:
        if fd is None or _option(fd, socket.SOL_SOCKET, socket.SO_DOMAIN) not in (socket.AF_INET, socket.AF_INET6):
            return None
        return _option(fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _option(fd: int, level: int, name: int) -> int | None:
    value, size = ctypes.c_int(), ctypes.c_uint(4)
    failed = _libc.getsockopt(fd, level, name, ctypes.byref(value), ctypes.byref(size))
    return None if failed else value.value
