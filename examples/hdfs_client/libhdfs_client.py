"""A client of HDFS for swift-agent, by pyarrow and Hadoop's own libhdfs, for what hdfs-native lacks (a site's own
authentication, say). See README.md beside it. swift-agent runs it as `python -m libhdfs_client URL`, in a process of
its own, with a Java machine in it.

Needs libhdfs.so (below `HADOOP_HOME`, or in `ARROW_LIBHDFS_DIR`), Java, and Hadoop's jars: `CLASSPATH`, or what
`hadoop classpath --glob` says. Must never import torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from pyarrow import fs

from swift_logging_store.stores.hdfs_operations import answers
from swift_logging_store.stores.helper import Answer, serve

_CLASSPATH_TIMEOUT_S = 15.0
# Of most of Java's exceptions, those of connections among them, libhdfs says nothing but this (EINTERNAL).
_SOME_ERROR = 255
_AS_CONFIGURED = 0  # how many replicas


class Server:
    """Has at most one file open, for reading or for writing."""

    def __init__(self, url: str) -> None:
        _find_jars()
        # No signals: those that come are for the training, which may use this for its end.
        # Nor figures for monitors of Java, whose file in /tmp would stay behind when this process is killed.
        os.environ["LIBHDFS_OPTS"] = f"{os.environ.get('LIBHDFS_OPTS', '')} -Xrs -XX:-UsePerfData".strip()
        host, port = address_of(url)
        goes_on = "dfs.client.block.write.replace-datanode-on-failure.best-effort"
        self._fs: Any = fs.HadoopFileSystem(
            f"hdfs://{host}", port, extra_conf={goes_on: "true"}, replication=_AS_CONFIGURED,
            user=os.environ.get("HADOOP_USER_NAME"),
        )  # fmt: skip
        self._file: Any = None

    def names(self, path: str) -> list[str]:
        try:
            return [info.base_name for info in self._fs.get_file_info(fs.FileSelector(path))]
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        """-1: there is no file of that name."""
        info = self._fs.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            # Arrow says that for any error, a name node that cannot be reached among them. A listing tells.
            try:
                found = self._fs.get_file_info(fs.FileSelector(path))
            except FileNotFoundError:
                return -1
            (info,) = found if len(found) == 1 and found[0].path == path else (info,)  # it has come meanwhile
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
            raise FileNotFoundError(path)
        self._file = self._fs.open_input_file(path)

    def read(self, size: int) -> bytes:
        """Fewer bytes, or none, at the end of the file."""
        return bytes(self._file.read(size))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def remove(self, path: str, recursive: bool) -> None:
        if recursive:
            self._fs.delete_dir(path)
        elif self.size(path) >= 0:
            self._fs.delete_file(path)


def kind_of(error: Exception) -> str:
    """See `swift_logging_store.stores.hdfs_helper.kind_of`."""
    if isinstance(error, FileNotFoundError):
        return "absent"
    return "connection" if isinstance(error, ConnectionError) else ""


def explained(answer: Answer) -> Answer:
    """What libhdfs says of an error in words that help; it may be a data node that is gone, so another try may do."""

    def explained_answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        path = request.get("path", "a file that is open")
        try:
            return answer(request, data)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            if error.errno != _SOME_ERROR:
                raise OSError(error.errno, f"{path}: {error.strerror or error}") from error
            raise ConnectionError(
                f"{path}: libhdfs has failed; why is in Java's trace in the standard error of this process"
            ) from error

    return explained_answer


def address_of(url: str) -> tuple[str, int]:
    """Name node and port; 0: as configured, also where the name is that of a cluster with several. As it is written:
    names of clusters have capitals."""
    authority = url.removeprefix("hdfs://").partition("/")[0]
    host, _, port = authority.rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (authority, 0)


def _find_jars() -> None:
    if os.environ.get("CLASSPATH"):
        return
    home = os.environ.get("HADOOP_HOME")
    program = f"{home}/bin/hadoop" if home else shutil.which("hadoop")
    if program is None:
        raise OSError("no jars of Hadoop: set HADOOP_HOME, or CLASSPATH to what `hadoop classpath --glob` says")
    found = subprocess.run(
        [program, "classpath", "--glob"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        timeout=_CLASSPATH_TIMEOUT_S, check=True, text=True,
    )  # fmt: skip
    os.environ["CLASSPATH"] = found.stdout.strip()


if __name__ == "__main__":
    serve(lambda: explained(answers(Server(sys.argv[1]))), kind_of)
