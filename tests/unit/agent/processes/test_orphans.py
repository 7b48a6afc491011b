"""Who waits for what processes of an agent have left takes nothing from others that wait, and is not harmed by them."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest

from swift_agent.agent.processes.orphans import Orphans


def test_an_end_that_another_thread_has_taken_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there to be seen; then that thread, which waits for its own child, was first."""
    child = subprocess.Popen(["true"], start_new_session=True)
    looked = os.waitid

    def other_is_first(kind: int, number: int, options: int) -> Any:
        found = looked(kind, number, options)
        if found is not None:
            child.wait()
        return found

    orphans = Orphans()
    orphans.expect(child.pid)
    monkeypatch.setattr(os, "waitid", other_is_first)
    deadline_s = time.monotonic() + 10
    while child.returncode is None:
        assert time.monotonic() < deadline_s
        orphans.reap(())
    assert child.returncode == 0
