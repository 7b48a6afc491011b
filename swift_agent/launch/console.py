"""Where the agent's lines go: one line per decision on standard error, unless the caller has set up logging itself.

It must never touch the root logger or its handlers: these are the caller's.
"""

from __future__ import annotations

import logging
import sys


def show_decisions(node_id: str) -> None:
    """Show INFO and above of this project's loggers; does nothing for a logger that has a handler already."""
    formatter = logging.Formatter(f"[swift-run {node_id} %(asctime)s.%(msecs)03d] %(message)s", "%H:%M:%S")
    for name in ("swift_agent", "swift_rendezvous", "swift_recovery"):
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
