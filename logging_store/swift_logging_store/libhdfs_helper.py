"""Talks to HDFS for `hdfs.HdfsStore` as `hdfs_helper` does, by pyarrow and Hadoop's own client, with a Java machine in
this process: `python -m swift_logging_store.libhdfs_helper URL`.

Needs libhdfs.so (below `HADOOP_HOME`, or in `ARROW_LIBHDFS_DIR`), Java, and Hadoop's jars: `CLASSPATH`, or what
`hadoop classpath --glob` says. Must never import torch, nor the other rooms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from swift_logging_store.hdfs_operations import answers
from swift_logging_store.helper import serve

_CLASSPATH_TIMEOUT_S = 15.0
# What a data node that is gone, or a connection to it, looks like in what Java says.
_CUT = ("ConnectException", "SocketException", "EOFException", "NoRouteToHost", "All datanodes", "Bad connect ack")


class Server:
    """Has at most one file open, for reading or for writing."""

    def __init__(self, url: str) -> None:
        _find_jars()
        # No signals: those that come are for the training, which may use this for its end.
        os.environ["LIBHDFS_OPTS"] = f"{os.environ.get('LIBHDFS_OPTS', '')} -Xrs".strip()
        parts = urlsplit(url)
        goes_on = "dfs.client.block.write.replace-datanode-on-failure.best-effort"
        self._fs: Any = fs.HadoopFileSystem(
            f"hdfs://{parts.hostname}", parts.port or 0, extra_conf={goes_on: "true"},
            user=os.environ.get("HADOOP_USER_NAME"),
        )  # fmt: skip
        self._file: Any = None

    def names(self, path: str) -> list[str]:
        return [info.base_name for info in self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True))]

    def size(self, path: str) -> int:
        """-1: there is no file of that name."""
        info = self._fs.get_file_info(path)
        return int(info.size) if info.type == fs.FileType.File else -1

    def create(self, path: str, alone: bool) -> None:
        """*alone* is of no use: this client asks for other data nodes itself."""
        self._file = self._fs.open_output_stream(path, buffer_size=0)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def finish(self, path: str, target: str) -> None:
        """The file that is being written, *path*, gets its name, in the place of one that may have it."""
        self._file.flush()
        self._file.close()
        self._file = None
        if self.size(target) >= 0:
            self._fs.delete_file(target)  # this client renames to no name that is there
        self._fs.move(path, target)

    def open(self, path: str) -> None:
        if self.size(path) < 0:
            raise FileNotFoundError(path)  # libhdfs says it in the trace of a Java exception
        self._file = self._fs.open_input_file(path)

    def read(self, size: int) -> bytes:
        """Fewer bytes, or none, at the end of the file."""
        return bytes(self._file.read(size))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def remove(self, path: str, recursive: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            if recursive:
                self._fs.delete_dir(path)
            elif self.size(path) >= 0:
                self._fs.delete_file(path)


def kind_of(error: Exception) -> str:
    """See `hdfs_helper.kind_of`."""
    if isinstance(error, FileNotFoundError):
        return "absent"
    return "connection" if any(word in str(error) for word in _CUT) else ""


def _find_jars() -> None:
    if os.environ.get("CLASSPATH"):
        return
    home = os.environ.get("HADOOP_HOME")
    program = f"{home}/bin/hadoop" if home else shutil.which("hadoop")
    if program is None:
        raise OSError("no jars of Hadoop: set HADOOP_HOME, or CLASSPATH to what `hadoop classpath --glob` says")
    found = subprocess.run(
        [program, "classpath", "--glob"], stdout=subprocess.PIPE, timeout=_CLASSPATH_TIMEOUT_S, check=True, text=True
    )
    os.environ["CLASSPATH"] = found.stdout.strip()


if __name__ == "__main__":
    serve(lambda: answers(Server(sys.argv[1])), kind_of)
