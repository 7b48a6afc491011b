"""What is remembered of each process group, so that it can be connected again. Must never make a connection itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swift_agent.torch_private import groups
from swift_agent.worker.groups import backend_swap, gloo_sockets
from swift_agent.worker.groups.connecting import BackendSpec

_KINDS = ("gloo", "nccl")
# Left to itself torch's NCCL watchdog ends a process whose collective fails, and that process is a survivor.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
# What workers have under torchrun, and so under our agent: nobody's wish.
_TORCHRUNS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(eq=False)
class Group:
    """A group of torch, and what is under it now."""

    pg: Any
    name: str
    specs: list[BackendSpec] = field(default_factory=list)  # one per backend
    exchanges: list[backend_swap.Exchange] = field(default_factory=list)  # likewise
    sockets: list[gloo_sockets.Socket] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)  # gloo's

    def by_kind(self) -> Iterator[tuple[str, backend_swap.Exchange]]:
        """("gloo" | "nccl", its exchange)"""
        for spec, one in zip(self.specs, self.exchanges, strict=True):
            yield spec.kind, one

    def is_among(self, ranks: Collection[int]) -> bool:
        """Whether it has only members of *ranks*, or one member."""
        spec = self.specs[0]
        return spec.size == 1 or set(spec.ranks or range(spec.size)) <= set(ranks)

    def set_default(self) -> None:
        """Tell torch which backend stands for the whole group."""
        exchanges = dict(self.by_kind())
        main = exchanges.get("nccl", self.exchanges[0])
        groups.set_default_backend(self.pg, main.default_number)


def kinds_of(backend: str) -> dict[str, str]:
    """{device type: "gloo" | "nccl"} of what was asked for, {} for torch's fake backend, else ValueError.

    Prepares the environment for NCCL, which reads it when the first group is made. What the user has set there stays.
    """
    kinds = groups.backends_by_device(backend)
    if set(kinds.values()) == {"fake"}:
        return {}
    unknown = sorted(set(kinds.values()) - set(_KINDS))
    if unknown:
        raise ValueError(
            f"process groups on {', '.join(unknown)} cannot be connected again after a failure; use gloo or nccl"
        )
    if "nccl" in kinds.values():
        for variable, value in _NCCL_ENVIRONMENT.items():
            if os.environ.get(variable) == _TORCHRUNS.get(variable):
                os.environ[variable] = value
    return kinds


def record(library: Any, pg: Any, kinds: dict[str, str], arguments: dict[str, Any]) -> Group:
    """Remember a group that torch has just made on its fake backend, and put exchanges under it.

    `library` is the native one or None, `arguments` those of `_new_process_group_helper`.
    """
    name = str(arguments["group_name"])
    group = Group(pg, name)
    for kind in dict.fromkeys(kinds.values()):
        devices = [device for device, its_kind in kinds.items() if its_kind == kind]
        group.specs.append(
            BackendSpec(
                name=name,
                kind=kind,
                prefix=f"{name}/{devices[0]}",
                rank=arguments["group_rank"],
                size=arguments["group_size"],
                ranks=list(arguments["global_ranks_in_group"]),
                timeout=arguments["timeout"],
                options=arguments["backend_options"] if kind == "nccl" else None,
            )
        )
        description = arguments["group_desc"] or "undefined"
        if library is not None:
            group.exchanges.append(backend_swap.NativeExchange(library, pg, name, description, kind, devices))
        else:
            group.exchanges.append(backend_swap.PythonExchange(pg, name, description, kind, devices))
    group.set_default()
    return group


def split_group(
    parent_pg: Any = None, split_ranks: list[list[int]] | None = None, timeout: timedelta | None = None,
    pg_options: Any = None, group_desc: str | None = None, backend: Any = None,
) -> Any:  # fmt: skip
    """Stands in for `dist.split_group`: makes the same group with `new_group`, which can be connected again."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = parent_pg if parent_pg is not None else dist.group.WORLD
    members = groups.global_ranks(parent)
    for split in split_ranks:
        ranks = [members[rank] for rank in sorted(split)]
        if dist.get_rank() in ranks:
            return dist.new_group(
                ranks, timeout=timeout, backend=backend or dist.get_backend(parent), pg_options=pg_options,
                use_local_synchronization=True, group_desc=group_desc,
            )  # fmt: skip
    return None
