"""The state of a worker in a file of its node, for new workers of a job that changes its size.

In it is what a replica would send (`swift_recovery.transfer.state_file`). The file gets its name when it is complete.
Must never decide which worker keeps its state, nor leave half a file under that name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_logging_store.stores.local import whole_file
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import state_file
from swift_recovery.transfer.node_paths import path_of


def keep(directory: str, iteration: int, state: TrainingState, offer: dict[str, Any]) -> None:
    """Write the state before *iteration* and *offer*, what small state the loop adds. Raises OSError; then there is no
    such file."""
    with whole_file(Path(path_of(directory, iteration)), durable=False) as stream:
        state_file.write(stream, state, offer)


def load(directory: str, iteration: int, state: TrainingState) -> Any:
    """Receive the state into *state*; the offer that was kept with it. Raises OSError, or `StateError` for a file
    that is not what was kept."""
    path = path_of(directory, iteration)
    with open(path, "rb", buffering=1 << 20) as stream:
        return state_file.read(stream, path, state)
