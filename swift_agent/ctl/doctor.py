"""`swiftctl doctor`: measures what `diagnosis` judges.

Must never fail because a measurement does: what cannot be measured is a finding. It writes one key of its own under a
lease, outside of all jobs, and removes it. Nothing is sent to any other host than the etcd servers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path

import click
import psutil
from rich.text import Text

from swift_agent.ctl.common import etcd_options, output, table
from swift_agent.ctl.reports import jobs
from swift_agent.ctl.reports.diagnosis import LEASE_TTL_S, Etcd, Finding, Machine, Member, Torch, diagnose, worst
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import ROOT
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import PermissionDenied

NUM_PROBES = 20
HTTP_TIMEOUT_S = 2.0
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--local-addr", metavar="ADDRESS", help="The address to check, if it is given to swift-run as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@etcd_options
def doctor(config: EtcdConfig | None, local_addr: str | None, as_json: bool) -> None:
    """Check whether this machine can take part in a job: etcd, network, limits, torch.

    Each line is ok, warn (a job runs, but not as well as it could) or fail, with what to do about it. Exit codes: 0
    nothing fails, 1 something does, 2 a wrong command line.
    """
    etcd = None if config is None else measure_etcd(config)
    findings = diagnose(etcd, measure_machine(config, local_addr), measure_torch())
    verdict = worst(findings)
    if as_json:
        click.echo(json.dumps({"verdict": verdict, "findings": [vars(finding) for finding in findings]}))
    else:
        _print(findings)
    raise SystemExit(1 if verdict == "fail" else 0)


def _print(findings: tuple[Finding, ...]) -> None:
    rows = table("", "CHECK", "FOUND", "REMEDY")
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        rows.add_row(verdict, *(Text(cell) for cell in (finding.name, finding.found, finding.remedy)))
    output().print(rows)


# ---- etcd ----------------------------------------------------------------------------------------------------------


def measure_etcd(config: EtcdConfig) -> Etcd:
    """Ask each member alone, then the cluster as an agent would."""
    from swift_rendezvous.store.etcd import EtcdStore

    members = tuple(_member(config, endpoint) for endpoint in config.endpoints)
    key = f"{ROOT}{jobs.PROBE_ID}/{secrets.token_hex(8)}"
    found = Etcd(members)
    with EtcdStore(config) as store:
        try:
            with contextlib.suppress(PermissionDenied):  # it has answered: that is what counts here
                store.get(key)  # connects and logs in; the next ones are measured
            found = replace(found, read_s=_times(lambda: _allowed(lambda: store.get(key))))
        except RendezvousError as error:
            return replace(found, error=str(error))
        try:
            lease = store.grant_lease(LEASE_TTL_S)
        except RendezvousError as error:
            return replace(found, lease_error=str(error), write_error="no lease, not tried")
        try:
            found = replace(found, lease_ttl_s=lease.ttl_s)
            found = replace(found, write_s=_times(lambda: store.put(key, b"1", lease.id)))
        except PermissionDenied:
            found = replace(found, write_denied=True)
        except RendezvousError as error:
            found = replace(found, write_error=str(error))
        finally:
            with contextlib.suppress(RendezvousError):
                lease.revoke()  # and with it the key; if it cannot be reached, the lease runs out
    return found


def _allowed(action: Callable[[], object]) -> None:
    with contextlib.suppress(PermissionDenied):
        action()


def _times(action: Callable[[], object]) -> tuple[float, ...]:
    taken = []
    for _ in range(NUM_PROBES):
        began_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began_s)
    return tuple(taken)


def _member(config: EtcdConfig, endpoint: str) -> Member:
    from swift_rendezvous.store.etcd import EtcdStore

    try:
        with EtcdStore(replace(config, endpoints=(endpoint,), timeout_s=HTTP_TIMEOUT_S)) as store:
            _allowed(lambda: store.get(f"{ROOT}{jobs.PROBE_ID}"))
    except RendezvousError as error:
        return Member(endpoint, error=str(error).splitlines()[-1].removeprefix(f"  {endpoint}").strip())
    version, ahead_s = _http_version(config, endpoint)
    return Member(endpoint, version=version, ahead_s=ahead_s)


def _http_version(config: EtcdConfig, endpoint: str) -> tuple[str, float | None]:
    """What the server says of itself over plain HTTP, which needs no login: its version, and its clock minus ours.

    ("", None) when it does not speak HTTP at this port.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    connection: http.client.HTTPConnection
    try:
        if config.tls:
            context = ssl.create_default_context(cafile=config.ca_cert)
            if config.cert:
                context.load_cert_chain(config.cert, config.key)
            connection = http.client.HTTPSConnection(host, int(port), timeout=HTTP_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, int(port), timeout=HTTP_TIMEOUT_S)
        with contextlib.closing(connection):
            began_s = time.time()
            connection.request("GET", "/version")
            response = connection.getresponse()
            middle_s = (began_s + time.time()) / 2
            version = str(json.loads(response.read()).get("etcdserver", ""))
            date = response.headers.get("Date")
            # It tells whole seconds, rounded down.
            ahead_s = parsedate_to_datetime(date).timestamp() + 0.5 - middle_s if date else None
            return version, ahead_s
    except (OSError, http.client.HTTPException, ValueError, TypeError, AttributeError):
        return "", None


# ---- this machine --------------------------------------------------------------------------------------------------


def measure_machine(config: EtcdConfig | None, local_addr: str | None) -> Machine:
    """Network, limits, kernel, tools. Binds two ports for a moment."""
    from swift_rendezvous.store.private_etcd import find_etcd

    address, address_error = local_addr or "", ""
    if not address:
        address, address_error = _local_address(config)
    shm_bytes, shm_free_bytes = _shared_memory()
    etcd_binary = ""
    with contextlib.suppress(RendezvousError):
        etcd_binary = find_etcd()
    return Machine(
        address=address,
        address_error=address_error,
        bind_error=_bind_error(address) if address else "",
        loopback_error=_bind_error("127.0.0.1"),
        interfaces=_interfaces(),
        num_ports=_num_ports(),
        max_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_processes=_soft_limit(resource.RLIMIT_NPROC),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        has_pidfd=_has_pidfd(),
        has_setpriv=_has_setpriv(),
        etcd_binary=etcd_binary,
    )


def _local_address(config: EtcdConfig | None) -> tuple[str, str]:
    """The address that an agent would choose, or why it would not find one."""
    try:
        from swift_agent.errors import JobStopped
        from swift_agent.launch import host
    except Exception as error:  # torch is missing or broken: that is another finding
        return "", f"not known without torch: {error}"
    try:
        return host.local_host(None, config), ""
    except JobStopped as error:
        return "", str(error)


def _bind_error(address: str) -> str:
    """Why a port of *address* cannot be bound and reached from here, or ""."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind(where)
            server.listen(1)
            with socket.socket(family, socket.SOCK_STREAM) as client:
                client.settimeout(HTTP_TIMEOUT_S)
                client.connect(server.getsockname())
        return ""
    except OSError as error:
        return error.strerror or str(error)


def _interfaces() -> tuple[tuple[str, tuple[str, ...]], ...]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        # An IPv6 address of one link only has its interface behind a %.
        ips = tuple(a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        if name in up and ips:
            found.append((name, ips))
    return tuple(found)


def _num_ports() -> int | None:
    """How many of the ports that the kernel gives to callers that ask for any are not in use."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return None
    used: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # no IPv6, for example
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            used |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return high - low + 1 - sum(low <= port <= high for port in used)


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _has_setpriv() -> bool:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return False
    try:
        usage = subprocess.run([setpriv, "--help"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "--pdeathsig" in usage.stdout


# ---- torch ---------------------------------------------------------------------------------------------------------


def measure_torch() -> Torch:
    """What the installed torch can do. Must not load the native forwarder: what is loaded stays."""
    try:
        import torch
        import torch.distributed as dist

        from swift_agent import native

        path = native.library_path()
        return Torch(
            version=str(torch.__version__),
            has_gloo=dist.is_available() and dist.is_gloo_available(),
            has_nccl=dist.is_available() and dist.is_nccl_available(),
            gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
            native_path=str(path) if path.is_file() else "",
            native_off=os.environ.get("SWIFT_NATIVE") == "0",
        )
    except Exception as error:  # a broken torch raises anything
        return Torch(error=f"{type(error).__name__}: {error}")
