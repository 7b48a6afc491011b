"""Where in the script a failed worker was, from the traceback that it left. Pure.

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
