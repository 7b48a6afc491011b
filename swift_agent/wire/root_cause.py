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
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Lines that may follow the traceback that ended a process, such as warnings at its end.
_AFTER = 10
_LINE_CHARS = 300
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
# All but tabs and ends of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Which torch puts before each line of a traceback once there are groups.
_RANK = re.compile(r"^\[rank\d+\]:[ ]?", re.MULTILINE)


def last_words(stderr: str, was_killed: bool = False) -> str:
    """Of the end of a worker's standard error: the traceback that ended it, else the last lines under `SAID`; '' if it
    said nothing. One that was killed by a signal has no traceback that explains it. What redraws a line, such as a
    progress bar, is shown as it was last; what would steer a terminal is left out."""
    text = _CONTROL.sub("", _ESCAPE.sub("", _RANK.sub("", stderr.replace("\r\n", "\n"))))
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        return ""
    begin = None if was_killed else _last_traceback(lines)
    if begin is not None:
        return "\n".join(lines[max(begin, len(lines) - _TRACEBACK_LINES) :])
    return "\n".join([SAID, *lines[-_LINES:]])


def _last_traceback(lines: list[str]) -> int | None:
    """Where the last one begins, with those that led to it; None if more than a few lines follow it: it was handled."""
    begin = next((number for number in range(len(lines) - 1, -1, -1) if lines[number] == _BEGIN), None)
    if begin is None:
        return None
    end = next((number for number in range(begin + 1, len(lines)) if not lines[number].startswith(" ")), len(lines) - 1)
    if len(lines) - 1 - end > _AFTER:
        return None
    while True:
        above = next((number for number in range(begin - 1, -1, -1) if lines[number].strip()), None)
        if above is None or not lines[above].startswith(_CHAINED):
            return begin
        before = next((number for number in range(above, -1, -1) if lines[number] == _BEGIN), None)
        if before is None:
            return begin
        begin = before


def line_of(message: str) -> str:
    """Of a traceback the line that names the exception; else the last one. Short enough for a summary."""
    frames = list(_FRAME.finditer(message))
    error = _ERROR.search(message, frames[-1].end()) if frames else None
    lines = [line for line in message.splitlines() if line.strip()]
    found = message[error.start() :].partition("\n")[0] if error is not None else lines[-1] if lines else ""
    return _CONTROL.sub("", found)[:_LINE_CHARS]


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
