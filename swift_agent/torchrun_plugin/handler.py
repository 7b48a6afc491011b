"""The rendezvous backend swift-etcd of a stock torchrun: etcd v3 behind torch's own elastic rendezvous.

    torchrun --rdzv-backend swift-etcd --rdzv-endpoint etcd1:2379,etcd2:2379 --rdzv-id job7 --nnodes 2:4 train.py

`swift-run` does not use it. Every torchrun on a machine with this package loads this module, whatever its backend, and
while `torch.distributed.elastic.rendezvous` is still being imported: so this
module must never import torch or grpc before a handler is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_agent.torchrun_plugin.name import BACKEND
from swift_rendezvous.store.etcd_config import EtcdConfig

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

DEFAULT_READ_TIMEOUT_S = 60
DEFAULT_LEASE_TTL_S = 60
_DEFAULT_KEEP_ALIVE_S = 5  # torch's


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point names: torch calls it without arguments and registers what it returns."""
    return create_handler


@dataclass(frozen=True)
class PluginOptions:
    """Ours of the options in ``--rdzv-conf``; torch reads the others."""

    etcd: EtcdConfig
    lease_ttl_s: int

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> PluginOptions:
        """Raises ValueError, which names the option that is wrong."""
        if params.get("password") is not None:
            raise ValueError("a password does not belong on the command line: use password_file or SWIFT_ETCD_PASSWORD")
        read_timeout_s = _positive(params, "read_timeout", DEFAULT_READ_TIMEOUT_S)
        keep_alive_s = _positive(params, "keep_alive_interval", _DEFAULT_KEEP_ALIVE_S)
        lease_ttl_s = _positive(params, "lease_ttl", max(DEFAULT_LEASE_TTL_S, 3 * keep_alive_s))
        # The state belongs to the lease of the node that wrote it last. If that node dies, the heartbeat of another
        # must write the state again before the lease is over.
        if lease_ttl_s < 2 * keep_alive_s:
            raise ValueError(f"lease_ttl={lease_ttl_s} must be at least twice keep_alive_interval={keep_alive_s}")
        config = EtcdConfig.from_environment(
            endpoints=_endpoints(params),
            user=params.get("user"),
            password_file=params.get("password_file"),
            ca_cert=params.get("ca_cert"),
            cert=params.get("ssl_cert"),
            key=params.get("ssl_cert_key"),
            timeout_s=float(read_timeout_s),
        )
        if config is None:
            raise ValueError(f"--rdzv-backend {BACKEND} needs --rdzv-endpoint host[:port],... or SWIFT_ETCD_ENDPOINTS")
        return cls(config, lease_ttl_s)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for one node. Nothing is sent to etcd before its first rendezvous."""
    options = PluginOptions.from_parameters(params)
    from swift_agent.torchrun_plugin.backend import make_handler
    from swift_rendezvous.store.etcd import EtcdStore

    # By default torch's agents share one TCPStore over all rounds, and a survivor keeps its address when the node that
    # served it is lost and another becomes rank 0. With etcd that loss is survived, so each round gets a store of its
    # own. A user's setting is respected.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return make_handler(EtcdStore(options.etcd), params, options.lease_ttl_s)


def _endpoints(params: RendezvousParameters) -> str:
    endpoints: str = params.endpoint or os.environ.get("SWIFT_ETCD_ENDPOINTS", "")
    protocol = str(params.get("protocol", "")).strip().lower()
    if protocol not in ("", "http", "https"):
        raise ValueError(f"protocol={protocol} is not http or https")
    if protocol and "://" in endpoints and f"{protocol}://" not in endpoints:
        raise ValueError(f"protocol={protocol} contradicts the endpoints {endpoints.rpartition('@')[2]}")
    # The scheme of one endpoint is that of all.
    return f"{protocol}://{endpoints}" if protocol and endpoints and "://" not in endpoints else endpoints


def _positive(params: RendezvousParameters, name: str, default: int) -> int:
    value: Any = params.get_as_int(name, default)
    if value is None or value < 1:
        raise ValueError(f"{name}={value} is not a positive number of seconds")
    return int(value)
