"""Which versions of torch this was run with.

A newer one is no error: most of it will work. This module must never import torch, which takes seconds.
"""

from __future__ import annotations

import re

# The newest that the tests have passed with, major and minor: `make test TORCH=2.15.0`.
NEWEST = (2, 15)


def warning(version: str) -> str:
    """*version*: that of the torch that is installed. What is to be said of it; "" of one that is known."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or (int(parts[1]), int(parts[2])) <= NEWEST:
        return ""
    known = ".".join(map(str, NEWEST))
    return (
        f"torch {version} is newer than what swift-agent was tested with ({known}): its private parts may differ. If a "
        f"recovery fails, install torch {known}"
    )
