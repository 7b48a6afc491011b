"""torch's launcher and ours, run side by side on the same script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.agent_forks import ForkServer

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SWIFT_RUN = (sys.executable, "-m", "swift_agent.run")
TIMEOUT_S = 60


def environment(out: Path) -> dict[str, str]:
    drop = ("PET_", "SWIFT_ETCD_", "TORCH", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    (out / "tmp").mkdir(parents=True)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "OUT": str(out), "TMPDIR": str(out / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}


def launch(
    launcher: tuple[str, ...],
    args: list[str],
    script: Path,
    more: Mapping[str, str] | None = None,
    forks: ForkServer | None = None,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the launcher in the directory of *script*, with *more* in its environment; return how it ended and where the
    workers wrote. With *forks* it is one of those, not a new interpreter; its workers are what they always are."""
    out = script.parent.parent / launcher[-1]
    if forks is not None:
        _, *program = launcher
        return forks.run([*program, *args], {**environment(out), **(more or {})}, script.parent, TIMEOUT_S), out
    done = subprocess.run(
        [*launcher, *args],
        cwd=script.parent,
        env={**environment(out), **(more or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done, out
