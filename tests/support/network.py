"""Hosts of a network of their own, on one machine: network namespaces on a bridge. Needs root and iproute2.

The test itself stays outside, at the bridge's address, which every host can reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass

_numbers = itertools.count()


def why_not() -> str:
    """Why networks cannot be made here, or ""."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip of iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"swp{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made here: {probe.stderr.strip()}"
    _ip("netns", "del", f"swp{os.getpid()}")
    return ""


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def enter(name: str) -> None:
    """Put this process into that namespace, as ``ip netns exec`` does: with a /sys of its own, too."""
    # linux/sched.h, sys/mount.h
    clone_newns, clone_newnet, ms_rec, ms_slave, mnt_detach = 0x20000, 0x40000000, 0x4000, 0x80000, 2
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open(f"/run/netns/{name}") as namespace:
        check(libc.setns(namespace.fileno(), clone_newnet))
    check(libc.unshare(clone_newns))
    check(libc.mount(b"", b"/", b"none", ctypes.c_ulong(ms_slave | ms_rec), None))
    libc.umount2(b"/sys", mnt_detach)
    check(libc.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))


@dataclass(frozen=True)
class Host:
    """One namespace. *prefix* before a command runs it there."""

    name: str
    link: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Take the cable out: nothing passes, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def heal(self) -> None:
        _ip("link", "set", self.link, "up")

    def deafen(self, address: str, *, from_inside: bool) -> None:
        """One way only: packets from this host to *address* (or from there to this host) vanish."""
        if from_inside:
            _ip("-n", self.name, "route", "add", "blackhole", f"{address}/32")
        else:
            _ip("route", "add", "blackhole", f"{self.address}/32")

    def undeafen(self, address: str, *, from_inside: bool) -> None:
        if from_inside:
            _ip("-n", self.name, "route", "del", "blackhole", f"{address}/32")
        else:
            _ip("route", "del", "blackhole", f"{self.address}/32")

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name, check=False).split()]


class Network:
    """*num_hosts* hosts; `close` kills what still runs in them."""

    def __init__(self, num_hosts: int) -> None:
        tag = f"{os.getpid() % 100000}x{next(_numbers)}"
        # Each network has addresses of its own, so that a leftover of another one could not answer.
        net = f"10.{77 + os.getpid() % 100}.{next(_numbers) % 250}"
        self.address = f"{net}.254"
        self._bridge = f"swb{tag}"
        self.hosts: list[Host] = []
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number in range(1, num_hosts + 1):
                host = Host(f"swn{tag}n{number}", f"sv{tag}n{number}"[:15], f"{net}.{number}")
                self.hosts.append(host)
                _ip("netns", "add", host.name)
                _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
                _ip("link", "set", host.link, "master", self._bridge, "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.name, "link", "set", "eth0", "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """All hosts at once: what is outside is alone."""
        self._set_links("down")

    def heal(self) -> None:
        self._set_links("up")

    def _set_links(self, state: str) -> None:
        lines = "".join(f"link set {host.link} {state}\n" for host in self.hosts)
        subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)

    def close(self) -> None:
        for host in self.hosts:
            # A process that is left in it would keep the namespace, and its address, alive.
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):  # died with its agent, which was before it
                    os.kill(pid, signal.SIGKILL)
            _ip("route", "del", "blackhole", f"{host.address}/32", check=False)
            _ip("link", "del", host.link, check=False)
            _ip("netns", "del", host.name, check=False)
        _ip("link", "del", self._bridge, check=False)
