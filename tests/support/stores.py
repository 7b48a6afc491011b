"""What every store of files does, wherever it keeps them."""

from __future__ import annotations

import pytest

from swift_logging_store.store import Store


def check_files_come_and_go(store: Store) -> None:
    """*store* is empty, and is so again afterwards."""
    assert store.names() == [] and not store.exists("a/b") and store.size("a/b") == -1
    with store.writing("a/b") as stream:
        stream.write(b"first")
        assert not store.exists("a/b")  # not before it is complete
    store.put("a/c", b"second")
    store.put("a/c", b"third")
    assert store.names() == ["a"] and sorted(store.names("a")) == ["b", "c"]
    assert store.exists("a/b") and not store.exists("a") and store.size("a/b") == 5
    with store.reading("a/c") as stream:
        assert stream.read() == b"third"
    with pytest.raises(FileNotFoundError), store.reading("a/d"):
        pass
    store.remove("a/c")
    store.remove("a/c")
    assert store.names("a") == ["b"]
    store.remove_directory("a")
    store.remove_directory("a")
    assert store.names() == []
