"""The tests' own search for files and threads that were left behind."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from swift_rendezvous.store.owned_directory import own
from tests.support.leftovers import files_in, our_threads


def test_what_nobody_uses_is_left_behind(tmp_path: Path) -> None:
    for name in ("swift-agent-a", "swift-agent-b", "other", "swift-tests-c"):
        (tmp_path / name).mkdir()
    descriptor = own(tmp_path / "swift-agent-a")
    (tmp_path / "jetty-localhost-1").mkdir()
    address = str(tmp_path / "seaweedfs-s3-1.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(address)
        assert files_in(str(tmp_path)) == {"swift-agent-b", "jetty-localhost-1"}
    os.close(descriptor)
    assert files_in(str(tmp_path)) == {"swift-agent-a", "swift-agent-b", "jetty-localhost-1", "seaweedfs-s3-1.sock"}


def test_a_thread_of_ours_is_seen_as_long_as_it_runs() -> None:
    before, end = our_threads(), threading.Event()
    threads = [threading.Thread(target=end.wait, name=name) for name in ("swift-liveness", "swift-log-writer", "other")]
    for thread in threads:
        thread.start()
    assert our_threads() - before == {threads[0]}
    end.set()
    for thread in threads:
        thread.join()
    assert our_threads() == before
