"""`examples/digits.py`, with rank 0 killed in its first evaluation: only there it calls `all_reduce` itself."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

original = dist.all_reduce


def all_reduce(*args: Any, **kwargs: Any) -> Any:
    marker = Path(os.environ["HERE"]) / "killed"
    if os.environ["RANK"] == "0" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)


dist.all_reduce = all_reduce
sys.argv = ["digits.py", "--epochs", "2"]
runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits.py"), run_name="__main__")
