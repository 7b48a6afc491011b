"""What a store of files is: its contract and its errors.

A file has its name when it is complete and durable, and not before (but see `Store.writing`). Paths are relative, with
`/` between their parts; a directory is there as long as a file is in it. Everything raises OSError if the filesystem or
the server does. A store must never decide what is written, or for how long it is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import BinaryIO, Protocol, TypeVar

from swift_logging_store.errors import LogError

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20


class StoreUnknown(LogError):
    """A URL that no store is known for, or one whose library is not installed; the message says what to do."""


class Store(Protocol):
    """See the module. `str` of one is its URL or path."""

    def names(self, path: str = "") -> list[str]:
        """Files and directories directly below *path*; none if that is not there."""

    def exists(self, path: str) -> bool:
        """Whether there is a file of that name."""

    def size(self, path: str) -> int:
        """Of a file, in bytes; -1 if there is none."""

    def writing(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file, which is there when this ends. If it ends with an error there may be a part of it, in a bucket:
        so only names that are not used again may be written like this."""

    def write(self, path: str, content: Callable[[BinaryIO], T]) -> T:
        """The same, with what *content* writes; its result. It may be called again for another try, where that may go
        to other servers."""

    def reading(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Its bytes, from the first on. Raises FileNotFoundError."""

    def put(self, path: str, data: bytes) -> None:
        """A small file, all at once, in the place of one that may be there."""

    def remove(self, path: str) -> None:
        """A file; nothing if there is none."""

    def remove_directory(self, path: str) -> None:
        """And all that is below; what cannot be removed stays."""
