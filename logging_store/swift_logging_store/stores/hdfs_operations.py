"""What a process that talks to HDFS can be asked for, whichever library it does that with: what a plug-in has to have
(`examples/hdfs_client` is one). Must never know a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Server(Protocol):
    """Has at most one file open, for reading or for writing. See `hdfs_helper.Server`."""

    def names(self, path: str) -> list[str]: ...

    def size(self, path: str) -> int: ...

    def create(self, path: str, alone: bool) -> None: ...

    def write(self, data: bytes) -> None: ...

    def finish(self, path: str, target: str) -> None: ...

    def open(self, path: str) -> None: ...

    def read(self, size: int) -> bytes: ...

    def close(self) -> None: ...

    def remove(self, path: str, recursive: bool) -> None: ...


def answers(server: Server) -> Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]:
    """For `helper.serve`."""
    operations: dict[str, Callable[..., Any]] = {
        "names": server.names, "size": server.size, "create": server.create, "finish": server.finish,
        "open": server.open, "close": server.close, "remove": server.remove,
    }  # fmt: skip

    def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        op = request.pop("op")
        if op == "write":
            server.write(data)
            return {}, b""
        if op == "read":
            return {}, server.read(**request)
        return {"value": operations[op](**request)}, b""

    return answer
