"""Where in the script a thread is, from its stack. Must never hold on to a frame: it has all that the script holds."""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

import torch

import swift_logging_store
import swift_recovery

TORCH, OURS = (os.path.dirname(module.__file__ or "") + os.sep for module in (torch, sys.modules["swift_agent"]))
_ROOMS = (OURS, *(os.path.dirname(room.__file__ or "") + os.sep for room in (swift_recovery, swift_logging_store)))
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")})


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the script, of a library where no other is there: "train, train.py:33"; "?" if all is
    torch's or ours."""
    in_library = ""
    for one in _frames(frame):
        path = one.f_code.co_filename
        if not path.startswith((TORCH, *_ROOMS, "<")):
            place = f"{one.f_code.co_name}, {os.path.basename(path)}:{one.f_lineno}"
            if not path.startswith(_LIBRARIES):
                return place
            in_library = in_library or place
    return in_library or "?"


def is_of_script(path: str) -> bool:
    """Whether that file is neither torch's nor ours, nor an installed library's."""
    return not path.startswith((TORCH, *_ROOMS, *_LIBRARIES, "<"))


def way_to(frame: FrameType | None) -> str:
    """By which functions the script comes to where *frame* calls torch, and the line there: the same in all processes
    that are at the same place."""
    names: list[str] = []
    for one in _frames(frame):
        path = one.f_code.co_filename
        if path.startswith((TORCH, *_ROOMS, "<")):
            continue
        line = "" if names else f":{one.f_lineno}"
        names.append(f"{os.path.basename(path)}:{one.f_code.co_name}{line}")
    return " ".join(names)


_FOR = dis.opmap["FOR_ITER"]


def called_by_us(frame: FrameType | None) -> bool:
    """Whether the innermost call of torch in *frame* comes from this package."""
    seen_torch = False
    for one in _frames(frame):
        path = one.f_code.co_filename
        if path.startswith(TORCH):
            seen_torch = True
        elif seen_torch and not path.startswith("<"):
            return path.startswith(_ROOMS)
    return True


def is_called_by_torch(frame: FrameType | None) -> bool:
    """Whether *frame* is torch's own code."""
    return frame is not None and frame.f_code.co_filename.startswith(TORCH)


def is_in(frame: FrameType | None, folder: str) -> bool:
    """Whether a function of a file in *folder* is being called, here or further out."""
    return any(one.f_code.co_filename.startswith(folder) for one in _frames(frame))


def operation_of(frame: FrameType | None) -> str:
    """The function of `torch.distributed` that was called: "all_reduce", or ""."""
    name = ""
    for one in _frames(frame):
        path = one.f_code.co_filename
        if path.endswith("distributed_c10d.py"):
            name = one.f_code.co_name
        elif name and not path.startswith((TORCH, "<")):
            break
    return name


def is_for(frame: FrameType) -> bool:
    """Whether *frame* is at a `for`, which asks an iterator for what is next, not at a call of `next()`."""
    return frame.f_code.co_code[frame.f_lasti] == _FOR


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def imported_packages() -> list[str]:
    """Installed top-level packages that this process has imported: what a replacement will import, too.

    Modules beside the script are left out: they may look at the environment of the worker when imported.
    """
    roots = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    names = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.startswith(("torch", "numpy", "swift_", "_")) or "._" in name:
            continue
        if file.startswith(roots) and name.count(".") <= 1:
            names.add(name)
    return sorted(names)
