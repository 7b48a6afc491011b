"""Which errors torch raises when a connection of a process group breaks.

torch has types for most of them. gloo's are plain RuntimeErrors, told by what stands at the begin of their text: the
file of gloo that raised it, or one of few sentences; and an error that has gone through C++ (a future, a hook) may be
a RuntimeError, too, whose text begins with the name of the type that it was.

This module must never go by a word that an error of the script may have: "connection", "timed out", "monitoredBarrier".
"""

from __future__ import annotations

import re

import torch.distributed as dist

_GLOO_FILE = re.compile(r"\[(?:enforce fail at )?[^\]\s]*gloo/[^\]\s]+\.(?:cc|h|cpp):\d+\] ")
_SENTENCES = (
    # gloo's, without a file
    "Application timeout caused pair closure", "Connection closed by peer [", "Gloo connectFullMesh failed with ",
    "Connect timeout [",
    # torch's, of any operation that is waited for with a timeout
    "Operation timed out!",
    # the compiled backend's (native/forward.cpp), where their type is lost
    "process group aborted: ", "swift-agent: a collective in the rest of an iteration",
)  # fmt: skip
# gloo's barrier that names who is missing, in ProcessGroupGloo.cpp.
_BARRIER = re.compile(
    r"(?:\[Rank \d+\]: )?Ranks? \d[\d, ]*(?:failed to pass|timed out in|successfully reached) monitoredBarrier\b"
)
# What a future says of the callback that raised it: a communication hook of DDP.
_IN_CALLBACK = re.compile(r"(?:Got the following error when running the callback: (?:[\w.]*\bRuntimeError: )?)+")
_TYPE = re.compile(r"(?:[\w.]+\.)?(?:Dist(?:Backend|Network|Store)?Error|GroupsAborted|PeerFailure|LinkLost): ")


def is_of_connection(error: BaseException) -> bool:
    """Whether torch raised *error* because a connection of a process group broke, or an operation ran out of time."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if (around := _IN_CALLBACK.match(text)) is not None:
        text = text[around.end() :]
    return bool(_GLOO_FILE.match(text) or _TYPE.match(text) or _BARRIER.match(text)) or text.startswith(_SENTENCES)


def was_raised_for(error: BaseException, why: str) -> bool:
    """Whether the compiled library has refused an operation with the reason *why*, and *error* comes from that. Its
    errors come out of torch, whose translators to Python know types of torch only; and of what has gone through a hook,
    or a stage of a pipeline, nothing is left but the text."""
    return why in str(error)
