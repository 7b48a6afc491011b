"""The files of a node in which workers keep their state: their names, and their removal by the agent.

Must never import what a state is made of: the agent, which removes them, needs none of it.
"""

from __future__ import annotations

import contextlib
import os

_NAME = "kept-state"


def remove(directory: str, but: int | None = None) -> None:
    """Remove the files below *directory*. With *but*: not that of this iteration, nor what is being written."""
    for name in os.listdir(directory):
        spared = but is not None and (name == f"{_NAME}.{but}" or name.endswith(".part"))
        if name.startswith(f"{_NAME}.") and not spared:
            with contextlib.suppress(FileNotFoundError):  # a worker has just given it its name, or given it up
                os.remove(os.path.join(directory, name))


def path_of(directory: str, iteration: int) -> str:
    """Files of several iterations may be there: the agent may not have heard of the newest."""
    return os.path.join(directory, f"{_NAME}.{iteration}")
