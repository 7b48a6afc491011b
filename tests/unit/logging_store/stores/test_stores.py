"""Files below a directory, and what is no store at all. The same elsewhere: tests/integration/test_s3.py,
test_hdfs.py."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import pytest

from swift_logging_store.stores import local
from swift_logging_store.stores.contract import StoreUnknown
from swift_logging_store.stores.hdfs import ENV_CLIENT
from swift_logging_store.stores.local import LocalStore, whole_file
from swift_logging_store.stores.open import check_url, open_store
from tests.support.stores import check_files_come_and_go


def test_files_come_and_go(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new" / "one"))
    assert str(store) == str(tmp_path / "new" / "one")
    check_files_come_and_go(store)


@pytest.mark.parametrize("url", ["relative", "file:///tmp/x", "/tmp/x"])
def test_urls_of_directories(url: str) -> None:
    assert isinstance(open_store(url), LocalStore)


@pytest.mark.parametrize(
    "url",
    ["ftp://name/path", "s3://", "s3:///prefix", "file://host/path", "s3://b/p?scheme=http", "hdfs:///path",
     "hdfs://user:secret@name/path"],
)  # fmt: skip
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(StoreUnknown, match="all nodes share, file:///PATH, hdfs://HOST:PORT/PATH or s3://BUCKET/PREFIX"):
        open_store(url)


def test_without_hdfs_native_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreUnknown, match=r"hdfs://name:1 needs hdfs-native: pip install 'swift-agent\[hdfs\]'"):
        open_store("hdfs://name:1/path")


PLUG_IN = """
import sys
from swift_logging_store.stores.hdfs_operations import answers
from swift_logging_store.stores.helper import serve

class Server:
    def names(self, path):
        return [sys.argv[1], path]
    def _other(self, *arguments):
        raise NotImplementedError
    size = create = write = finish = open = read = close = remove = _other

if __name__ == "__main__":
    serve(lambda: answers(Server()), lambda error: "")
"""


def test_another_client_of_hdfs_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site_client.py").write_text(PLUG_IN)
    monkeypatch.setenv(ENV_CLIENT, "site_client")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert open_store("hdfs://name:1/some/files").names("a") == ["hdfs://name:1", "/some/files/a"]


@pytest.mark.parametrize("name", ["libhdfs", "nowhere.client", "not a name", "..relative"])
def test_a_client_that_is_no_module_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CLIENT, name)
    with pytest.raises(StoreUnknown, match=r"SWIFT_HDFS_CLIENT=.*: no such module; without the variable"):
        check_url("hdfs://somewhere/path")


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreUnknown, match=r"s3://bucket needs pyarrow: pip install 'swift-agent\[s3\]'"):
        open_store("s3://bucket/x")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"before")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), whole_file(path) as stream:
        stream.write(b"after")
    with pytest.raises(ZeroDivisionError), whole_file(path) as stream:
        stream.write(b"%d" % (1 // 0))
    assert path.read_bytes() == b"before" and [one.name for one in tmp_path.iterdir()] == ["one"]
    with whole_file(path, durable=False) as stream:  # does not sync
        stream.write(b"after")
    assert path.read_bytes() == b"after"


def test_the_names_of_new_directories_are_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = local._sync
    monkeypatch.setattr(local, "_sync", lambda directory: (synced.append(directory), sync(directory)))
    store = local.LocalStore(tmp_path / "runs" / "today")
    store.put("7/part", b"x")
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs/today", tmp_path / "runs/today/7"} <= set(synced)
    synced.clear()
    store.put("7/other", b"x")
    assert tmp_path not in synced  # once
