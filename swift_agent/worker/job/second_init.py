"""`init_process_group` and `destroy_process_group` of a script, or of a library that it uses, after our `init()`.

The group exists already, so a second `init_process_group` that asks for the same has nothing to do. Names that modules
have imported before are replaced too. This module must never make or change a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from swift_agent.errors import UsageError
from swift_agent.torch_private import groups


def replace(name: str, stand_in: Callable[..., Any]) -> None:
    """`torch.distributed.NAME` becomes *stand_in*, also where a module has that name from there."""
    original = getattr(dist, name)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, stand_in)


def allow_again() -> None:
    """From now on `init_process_group` does nothing while there is the default group, if it asks for that."""
    original = dist.init_process_group

    def init_process_group(*args: Any, **named: Any) -> None:
        if not dist.is_initialized():
            original(*args, **named)
            return
        asked = dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args, strict=False)) | named
        if mistakes := _differences(asked):
            raise UsageError(
                f"init_process_group() after swift_agent.init(): {'; '.join(mistakes)}. Say it to swift_agent.init(), "
                "and leave init_process_group() out."
            )

    replace("init_process_group", init_process_group)


def _differences(asked: dict[str, Any]) -> list[str]:
    mistakes = []
    if backend := asked.get("backend"):
        there = groups.backends_by_device(dist.get_backend_config())
        here = groups.backends_by_device(str(backend))
        if any(there.get(device) != name for device, name in here.items()):
            has = ", ".join(f"{device}:{name}" for device, name in there.items())
            mistakes.append(f"it asks for the backend {backend}, and the group has {has}")
    for name, actual in (("world_size", dist.get_world_size()), ("rank", dist.get_rank())):
        if asked.get(name, -1) not in (-1, None, actual):
            mistakes.append(f"it asks for {name}={asked[name]}, and this is {actual}")
    return mistakes
