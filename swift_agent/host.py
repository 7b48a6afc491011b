"""What an agent has to know of the machine and of its own command before it joins a job. Must never open a connection
to anybody."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile

from swift_agent.config import AgentConfig
from swift_agent.errors import JobStopped


def fingerprint(config: AgentConfig) -> str:
    """Equal for agents that were started with the same command."""
    command = [
        config.nnodes,
        config.nproc,
        config.entry_kind,
        config.training_script,
        list(config.training_script_args),
    ]
    return hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]


def private_directory() -> str:
    """A directory for the agent's socket, whose path the kernel limits to 107 bytes."""
    directory = tempfile.mkdtemp(prefix="swift-agent-")
    if len(directory) <= 90:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="swift-agent-", dir="/tmp")


def local_host(config: AgentConfig) -> str:
    """The address at which the other nodes reach this one: that of the interface that leads to etcd."""
    if config.etcd is None:
        return "127.0.0.1"
    host, _, port = config.etcd.endpoints[0].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise JobStopped(
            f"cannot find this node's address on the way to {config.etcd.endpoints[0]}: {error}; "
            "name it with --local-addr"
        ) from None
