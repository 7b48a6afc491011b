"""What a script hears of checkpoints that are of no use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_agent.errors import SwiftError
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_logging_store.stores.local import LocalStore
from swift_recovery.checkpoint.directory import CheckpointDirectory
from swift_recovery.checkpoint.writer import CheckpointError, Checkpoints, Settings


def test_checkpoints_of_no_use_end_the_script_with_an_error_of_the_package(tmp_path: Path) -> None:
    """`except SwiftError` catches it, and what the room itself raises is still known by its own name."""
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(
        Settings(CheckpointDirectory(LocalStore(tmp_path / "file")), 10), 0, 1, [0], lambda line: None
    )
    unused = cast(Any, None)
    with pytest.raises(SwiftError, match="a directory or bucket that all nodes can read and write") as told:
        Checkpointing(checkpoints, unused, unused, unused, cast(Any, SimpleNamespace(note=None))).find()
    assert isinstance(told.value, CheckpointError)
