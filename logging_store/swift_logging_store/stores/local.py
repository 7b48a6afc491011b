"""A store in a directory that all nodes see; and files that are whole or not there, for others.

It must never leave half a file under its name when a writer is killed: until a file is complete it is called `.part`,
and in a store it is on the disk before it gets its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from swift_logging_store.stores.contract import _BUFFER_BYTES, T


class LocalStore:
    """Below *directory*, which is made if need be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    def __str__(self) -> str:
        return str(self._directory)

    def names(self, path: str = "") -> list[str]:
        try:
            return os.listdir(self._directory / path)
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return (self._directory / path).is_file()

    def size(self, path: str) -> int:
        try:
            return (self._directory / path).stat().st_size
        except FileNotFoundError:
            return -1

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        target = self._directory / path
        _make(target.parent)
        with whole_file(target) as stream:
            yield stream
        _sync(target.parent)

    def write(self, path: str, content: Callable[[BinaryIO], T]) -> T:
        with self.writing(path) as stream:
            return content(stream)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        with open(self._directory / path, "rb", buffering=_BUFFER_BYTES) as stream:
            yield stream

    def put(self, path: str, data: bytes) -> None:
        with self.writing(path) as stream:
            stream.write(data)
        _sync(self._directory)

    def remove(self, path: str) -> None:
        target = self._directory / path
        with contextlib.suppress(FileNotFoundError):
            os.remove(target)
            _sync(target.parent)

    def remove_directory(self, path: str) -> None:
        shutil.rmtree(self._directory / path, ignore_errors=True)


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that has its name when this ends, and that is not there if it ends with an error: what was there under
    that name stays. *durable*: it is on the disk then."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(part, "xb", buffering=_BUFFER_BYTES) as stream:
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def _make(directory: Path) -> None:
    """With its ancestors; their names, too, are on the disk when this ends."""
    new = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for one in new:
        with contextlib.suppress(PermissionError):  # who may make names there need not be allowed to read them
            _sync(one.parent)


def _sync(directory: Path) -> None:
    """Names of files are on the disk only when their directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
