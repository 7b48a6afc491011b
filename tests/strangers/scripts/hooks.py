"""What the harness adds to a stranger's script: three moments at which it may be killed, and a hash at its end.

A script calls `moment("before", i)` between two iterations, `moment("inside", i)` between the forward and the backward
of iteration i, `moment("after", i)` after the update, still inside the iteration, and `finish(job, ...)` at its end.
Nothing else here may change what the script does.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

from tests.support.fault_train import DIR, RANK, bytes_of, fault

__all__ = ["DIR", "begin", "finish", "moment"]


def begin() -> None:
    """First of all: who this process is."""
    torch.set_num_threads(1)
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)


def moment(at: str, iteration: int) -> None:
    """The test may have this process, or its node, killed here."""
    fault(at, iteration)


def finish(job: Any, *state: Any) -> None:
    """*state*: modules, optimizers, and other objects with `state_dict`; plain numbers and tensors too."""
    digest = hashlib.sha256()
    for one in state:
        _digest(digest, one.state_dict() if hasattr(one, "state_dict") else one)
    result = {"pid": os.getpid(), "iterations": job.iteration_number, "hash": digest.hexdigest()}
    (DIR / f"result.{RANK}.json").write_text(json.dumps(result))


def _digest(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        # Of a sharded tensor this rank's part.
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(f"{local.dtype}{tuple(local.shape)}".encode() + bytes_of(local.cpu()))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _digest(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _digest(digest, one)
    else:
        digest.update(repr(value).encode())
