"""Where in the script a failed worker was, and what it said last, from the text that it left. Pure.

This module must never raise for what it finds there: the text is the script's.
"""

from __future__ import annotations

import os
import re

_FRAME = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
# Follows the last frame: what is indented is that frame's line of source.
_ERROR = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(:|$)", re.MULTILINE)
# Frames of these are not the script's own.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ", os.path.dirname(os.__file__) + os.sep)


# Before what is no traceback.
SAID = "the last lines of its standard error:"
# Lines that are shown.
_LINES, _TRACEBACK_LINES = 20, 60
_BEGIN = "Traceback (most recent call last):"
# Which torch puts before each line of a traceback once there are groups.
_RANK = re.compile(r"^\[rank\d+\]:[ ]?", re.MULTILINE)


def last_words(stderr: str) -> str:
    """Of the end of a worker's standard error: the traceback, if there is one, else the last lines under `SAID`; '' if
    it said nothing. What redraws a line, such as a progress bar, is shown as it was last."""
    text = _RANK.sub("", stderr.replace("\r\n", "\n"))
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        return ""
    begin = next((number for number, line in enumerate(lines) if line == _BEGIN), None)
    if begin is not None:
        return "\n".join(lines[max(begin, len(lines) - _TRACEBACK_LINES) :])
    return "\n".join([SAID, *lines[-_LINES:]])


def place_of(traceback: str) -> str:
    """`ValueError at train.py:31`: the exception, and the innermost line of the script's own files; '' if *traceback*
    is none."""
    frames = list(_FRAME.finditer(traceback))
    error = _ERROR.search(traceback, frames[-1].end()) if frames else None
    if error is None:
        return ""
    own = [
        frame
        for frame in frames
        if not frame["path"].startswith(_OURS) and not any(part in frame["path"] for part in _LIBRARIES)
    ]
    frame = (own or frames)[-1]
    return f"{error['name']} at {os.path.basename(frame['path'])}:{frame['line']}"
