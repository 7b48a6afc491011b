"""Copies segments to a store and back for `archive.Archive`, which can kill it:
`python -m swift_logging_store.log.archive_helper URL`.

What goes between them is in `helper`. Must never import torch, nor the other rooms.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_logging_store.stores.helper import serve
from swift_logging_store.stores.local import whole_file
from swift_logging_store.stores.open import open_store

_BUFFER_BYTES = 1 << 20


class Server:
    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def put(self, path: str, name: str) -> None:
        """The local file *path* becomes *name*."""
        with open(path, "rb", buffering=0) as source:

            def copy(stream: Any) -> None:
                source.seek(0)  # of another try
                shutil.copyfileobj(source, stream, _BUFFER_BYTES)

            self._store.write(name, copy)

    def clean(self, directory: str, name: str) -> None:
        """Remove what a process that was killed has left of that file."""
        for found in self._store.names(directory):
            if found.startswith(f"{name}.") and found.endswith(".part"):
                self._store.remove(f"{directory}/{found}")

    def get(self, name: str, path: str) -> None:
        """*name* becomes the local file *path*."""
        # It lives as long as a recovery.
        with self._store.reading(name) as source, whole_file(Path(path), durable=False) as stream:
            shutil.copyfileobj(source, stream, _BUFFER_BYTES)

    def answer(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        op = request.pop("op")
        operations: dict[str, Callable[..., Any]] = {
            "put": self.put, "get": self.get, "clean": self.clean, "names": self._store.names,
            "remove": self._store.remove, "remove_directory": self._store.remove_directory,
        }  # fmt: skip
        return {"value": operations[op](**request)}, b""


def kind_of(error: Exception) -> str:
    return "absent" if isinstance(error, FileNotFoundError) else ""


if __name__ == "__main__":
    serve(lambda: Server(sys.argv[1]).answer, kind_of)
