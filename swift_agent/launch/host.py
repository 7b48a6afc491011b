"""What an agent has to know of the machine and of its own command before it joins a job. Must never open a
connection."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from collections.abc import Iterable

from swift_agent.errors import JobStopped
from swift_agent.launch.config import AgentConfig
from swift_rendezvous.roster.records import NodeRecord
from swift_rendezvous.store.etcd_config import UNIX, EtcdConfig


def job_fingerprint(config: AgentConfig) -> str:
    """Equal for agents that can be of one job."""
    logs: list[object] = [config.log_groups, config.log_budget, config.strategy]
    helpers: list[object] = [config.helpers, config.parallel_sum] if config.helpers else []
    return _digest([config.nnodes, config.max_nodes, config.recovery, *logs, *helpers])


def fingerprint(config: AgentConfig) -> str:
    """Equal for agents that run the same script with the same arguments."""
    return _digest([config.entry_kind, config.training_script, list(config.training_script_args)])


def _digest(of: list[object]) -> str:
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]


def another_command(me: NodeRecord, nodes: Iterable[NodeRecord]) -> str:
    """What there is to say of nodes that run something else than this one, or "". Pure."""
    others = sorted(node.node_id for node in nodes if node.fingerprint != me.fingerprint)
    if not others:
        return ""
    names = ", ".join(others[:3]) + (" and others" if len(others) > 3 else "")
    return f"{names} runs another script than {me.node_id}, another path of it, or with other arguments"


def is_own(address: str) -> bool:
    """Whether something can listen at *address*, a name or number, on this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        found = socket.getaddrinfo(address, None, family, socket.SOCK_STREAM)
    except OSError:
        return False
    for _, kind, proto, _, place in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.bind(place)
        except OSError:
            continue
        return True
    return False


class NoWay(JobStopped):
    """No interface leads to etcd, which may change: a machine's network comes up, or is away for a moment."""


def local_host(local_addr: str | None, etcd: EtcdConfig | None) -> str:
    """The address at which the other nodes reach this one: `--local-addr`, else that of the interface that leads to
    etcd. Raises `JobStopped` if it is not known, or not of this machine, `NoWay` if that may be otherwise in a moment.
    """
    if local_addr:
        _check_own(local_addr)
        return local_addr
    if etcd is None:
        return "127.0.0.1"
    problems: list[str] = []
    raised: type[JobStopped] = JobStopped
    for endpoint in etcd.endpoints:
        if endpoint.startswith(UNIX):
            return "127.0.0.1"
        host, _, port = endpoint.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # sends nothing: it only chooses a route
                return str(probe.getsockname()[0])
        except OSError as error:
            problems.append(f"{endpoint}: {error}")
            if not isinstance(error, socket.gaierror) or error.errno == socket.EAI_AGAIN:  # else there is no such name
                raised = NoWay
    raise raised(
        f"cannot find this node's address on the way to etcd ({'; '.join(problems)}); name it with --local-addr"
    )


def _check_own(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise JobStopped(
            f"--local-addr {address}: nothing can listen there: {error.strerror or error}; "
            "type an address of this machine"
        ) from None


def mistaken_address(me: NodeRecord, nodes: Iterable[NodeRecord]) -> str:
    """What is wrong with the address under which this node is known, or "". Pure.

    On the machine that runs etcd the way to etcd is the loopback interface, at which no other machine finds it.
    """
    if not _is_loopback(me.host):
        return ""
    elsewhere = sorted(node.node_id for node in nodes if not _is_loopback(node.host))
    if not elsewhere:
        return ""
    return (
        f"node {me.node_id} is known as {me.host}, where {', '.join(elsewhere[:3])} cannot reach it: "
        "start it with --local-addr ADDRESS"
    )


def resolves_to_loopback(host: str) -> bool:
    """Asks the resolver of this machine, for a name."""
    try:
        return _is_loopback(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
