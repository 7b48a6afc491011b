"""Talks to HDFS for `hdfs.HdfsStore`, which can kill it: `python -m swift_logging_store.stores.hdfs_helper URL`.

What goes between them is in `helper`. Must never import torch, nor the other rooms.
"""

from __future__ import annotations

import errno
import re
import sys
from typing import Any

import hdfs_native

from swift_logging_store.stores.hdfs_operations import answers
from swift_logging_store.stores.helper import serve

# What the library says of a change in whose call its connection to the name node was lost, or which came just after; it
# may have been made. Questions it asks again itself.
_LOST_NAME_NODE = "RPC listener disconnected"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# Each block may come to a dead node, and then all is written again: so there are few.
_ALONE_BLOCK_BYTES = 1 << 30
_CUT = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


class Server:
    """Has at most one file open, for reading or for writing."""

    def __init__(self, url: str) -> None:
        # A pipeline that loses a data node goes on with the others: the name node makes up for it afterwards. Without
        # this three replicas on three nodes are not written at all while one of them is away.
        goes_on = "dfs.client.block.write.replace-datanode-on-failure.best-effort"
        self._client = hdfs_native.Client(url, {goes_on: "true"})
        self._file: Any = None
        self._num_replicas = 0  # that the file which is being written is to have once it is complete; 0: has

    def names(self, path: str) -> list[str]:
        try:
            return [status.path.rpartition("/")[2] for status in self._client.list_status(path)]
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        """-1: there is no file of that name."""
        try:
            status = self._client.get_file_info(path)
        except FileNotFoundError:
            return -1
        return -1 if status.isdir else int(status.length)

    def create(self, path: str, alone: bool) -> None:
        """*alone*: each block goes to one data node, and to the others when the file is complete."""
        block_size = _ALONE_BLOCK_BYTES if alone else None
        options = hdfs_native.WriteOptions(block_size=block_size, overwrite=False, create_parent=True)
        self._file = self._client.create(path, options)
        self._num_replicas = 0
        num_replicas = self._client.get_file_info(path).replication if alone else None
        if num_replicas is not None and num_replicas > 1:  # it is 0 where files are erasure-coded
            # It has no block yet: where they go is asked for when there are bytes for them.
            self._client.set_replication(path, 1)
            self._num_replicas = num_replicas

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def finish(self, path: str, target: str) -> None:
        """The file that is being written, *path*, gets its name, in the place of one that may have it."""
        try:
            self._file.hsync()
        except Exception as error:  # of Java: the class is the same for others, and only the text tells it
            if "not supported for erasure-coded files" not in str(error):
                raise
        self._file.close()
        self._file = None
        if self._num_replicas:
            self._client.set_replication(path, self._num_replicas)
        self._client.rename(path, target, overwrite=True)

    def open(self, path: str) -> None:
        self._file = self._client.read(path)

    def read(self, size: int) -> bytes:
        """Fewer bytes, or none, at the end of the file."""
        return bytes(self._file.read(size))

    def close(self) -> None:
        self._file = None

    def remove(self, path: str, recursive: bool) -> None:
        try:
            self._client.delete(path, recursive)
        except FileNotFoundError:
            return


def kind_of(error: Exception) -> str:
    """`absent`; `cut`: the connection to the name node was, and another process makes a new one; `connection`: a data
    node could not be reached, and another try may get other ones; or ``."""
    if isinstance(error, FileNotFoundError):
        return "absent"
    if _LOST_NAME_NODE in str(error):
        return "cut"
    number = _OS_ERROR.search(str(error))  # it is not in the exception
    is_cut = number is not None and int(number[1]) in _CUT
    return "connection" if is_cut or "DataTransferError" in str(error) else ""


if __name__ == "__main__":
    serve(lambda: answers(Server(sys.argv[1])), kind_of)
