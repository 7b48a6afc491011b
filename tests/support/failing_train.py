"""A DDP job of two workers in which rank 1 fails in the way that $FAILS names; rank 0 prints each tenth iteration.

`oom`: it is killed in each iteration from the 20th on. `raises`: it raises in the 20th. `all-raise`: so do all.
`often`: it is killed in each twelfth, once. `set-up-once`: it is killed in the 20th, and a replacement raises before it
joins, until all workers have started over. `set-up`: also then. Else nothing, and with $SLOW an iteration takes 0.1 s.
Leaves `hash.{rank}`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift

FAILS = os.environ.get("FAILS", "")
HERE = Path(os.environ["HERE"])
RANK = int(os.environ["RANK"])


def first_time(what: str) -> bool:
    path = HERE / what
    if path.exists():
        return False
    path.touch()
    return True


with open(HERE / f"pids.{RANK}", "a") as file:
    print(os.getpid(), file=file)
torch.manual_seed(0)
job = swift.init()
if FAILS.startswith("set-up") and RANK == 1 and (HERE / "killed").exists():
    starts_over = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if FAILS == "set-up" or not starts_over:
        raise RuntimeError("this replacement cannot be set up")
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job.track(model=model, optimizer=optimizer)


@job.iteration
def train(number: int) -> None:
    if RANK == 1 or FAILS == "all-raise":
        if FAILS in ("raises", "all-raise") and number == 20:
            raise ValueError(f"a bad sample, {os.getpid()}")
        killed = FAILS == "oom" and number >= 20
        killed |= FAILS == "often" and number % 12 == 11 and first_time(f"killed.{number}")
        killed |= FAILS.startswith("set-up") and number == 20 and first_time("killed")
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for number in job.iterations(60):
    train(number)
    if "SLOW" in os.environ:
        time.sleep(0.1)
    if RANK == 0 and number % 10 == 0:
        print("iteration", number, flush=True)
state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
(HERE / f"hash.{RANK}").write_text(hashlib.sha256(state).hexdigest())
sys.exit(0)
