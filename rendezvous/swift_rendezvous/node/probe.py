"""Asks the kernel of another machine whether a process listens at an agent's heartbeat port.

A living kernel connects us and keeps us, however starved the process behind it is; that of a dead process resets us or
refuses. Where strangers keep the queue full it is silent at that port, and still refuses us at another one.

This module must never decide which peer is lost; `suspicion` does.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Iterator

from swift_rendezvous.node.suspicion import LIVES, Answer
from swift_rendezvous.roster.records import NodeRecord

_NUM_PROBES = 2  # at least: on a lossy network one may get lost
# No descriptor, memory or port to ask from.
_OF_OUR_OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL}
# Nothing listens here: a living kernel refuses at once, whatever waits at its other ports (tcpmux).
_UNUSED_PORT = 1


def answer_of(node: NodeRecord, probe_s: float, on_connected: Callable[[], object]) -> Answer:
    """What the kernel of *node* says within *probe_s* seconds. *on_connected* is called whenever it connects us."""
    deadline_s = time.monotonic() + probe_s
    with _calling(node.host) as is_there:
        answer = _answer_until(node, probe_s, deadline_s, on_connected)
        if answer.says == "nothing" and is_there():
            # Its machine lives, and would refuse a port without a listener: too many callers want to connect there.
            return LIVES
        return answer


def _answer_until(node: NodeRecord, probe_s: float, deadline_s: float, on_connected: Callable[[], object]) -> Answer:
    says = "nothing"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            timeout_s = min(left_s, probe_s / _NUM_PROBES)
            sock = socket.create_connection((node.host, node.watch_port), timeout=timeout_s)
        except TimeoutError:
            says = "nothing"
            continue
        except OSError as error:
            if error.errno in _OF_OUR_OWN:
                return LIVES  # the kernel was not asked
            return Answer(str(error.strerror or error), isinstance(error, ConnectionRefusedError))
        on_connected()
        with sock:
            if _is_kept(sock, deadline_s):
                return LIVES
        says = "it hangs up"
    return Answer(says, False)


@contextlib.contextmanager
def _calling(host: str) -> Iterator[Callable[[], bool]]:
    """Call the kernel of *host* at a port without a listener; whether it has answered by then, be it by refusing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        yield lambda: False
        return
    with sock:
        try:
            has_answered = sock.connect_ex((host, _UNUSED_PORT)) in (0, errno.ECONNREFUSED)
        except OSError:  # a name that is none
            has_answered = False

        def answered() -> bool:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if has_answered or not poll.poll(0):
                return has_answered
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED)

        yield answered


def _is_kept(sock: socket.socket, deadline_s: float) -> bool:
    """Whether a listener with a living process is behind this new connection: it is greeted, or at least left open.

    The kernel closes the sockets of a dead process one after the other, its listener last: for a moment it still lets
    us in, and then resets what was not accepted.
    """
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        return bool(sock.recv(4096))
    except TimeoutError:
        return True
    except OSError:
        return False
