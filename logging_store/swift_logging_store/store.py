"""Files that all nodes see: below a directory of a shared filesystem or of HDFS, or below a prefix of an S3 bucket.

A file has its name when it is complete and durable, and not before. Paths are relative, with `/` between their parts; a
directory is there as long as a file is in it. Everything raises OSError if the filesystem or the server does.

Must never decide what is written, or for how long it is kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

from swift_logging_store import hdfs
from swift_logging_store.errors import LogError

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20
# Of one request to a server, of which a file takes many; and how often one is tried.
REQUEST_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 3


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


def check_url(url: str) -> None:
    """Raises `StoreUnknown` for what `open_store` would not open; makes nothing, and loads no library."""
    if "://" not in url and not re.match(r"[A-Za-z][A-Za-z0-9+]+:/", url):
        return
    parts = urlsplit(url)
    # What could hold a secret is not repeated.
    is_plain = not parts.query and "@" not in parts.netloc
    if parts.scheme == "file" and not parts.netloc and is_plain:
        return
    if parts.scheme == "s3" and parts.netloc and is_plain:
        if importlib.util.find_spec("pyarrow") is None:
            raise StoreUnknown(f"s3://{parts.netloc} needs pyarrow: pip install 'swift-agent[s3]'")
    elif parts.scheme == "hdfs" and parts.netloc and is_plain:
        try:
            package, extra = {"hdfs-native": ("hdfs_native", "hdfs"), "libhdfs": ("pyarrow", "s3")}[hdfs.client()]
        except ValueError as error:
            raise StoreUnknown(str(error)) from None
        if importlib.util.find_spec(package) is None:
            raise StoreUnknown(
                f"hdfs://{parts.netloc} needs {package.replace('_', '-')}: pip install 'swift-agent[{extra}]'"
            )
    else:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise StoreUnknown(
            f"{shown}: a directory that all nodes share, file:///PATH, hdfs://HOST:PORT/PATH or s3://BUCKET/PREFIX is "
            "wanted; credentials come from the environment"
        )


def open_store(url: str) -> Store:
    """*url*: a path, `file://` and a path, `hdfs://HOST:PORT/PATH` (or a service's name for host and port), or
    `s3://BUCKET/PREFIX`. Raises `StoreUnknown`; asks no server yet."""
    check_url(url)
    if "://" not in url:
        return LocalStore(Path(url))
    parts = urlsplit(url)
    match parts.scheme:
        case "s3":
            return S3Store(parts.netloc, parts.path.strip("/"))
        case "hdfs":
            return hdfs.HdfsStore(parts.netloc, parts.path)
    return LocalStore(Path(parts.path))


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
        target.parent.mkdir(parents=True, exist_ok=True)
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


class S3Store:
    """Below *prefix* in *bucket*, by pyarrow. Credentials, region and endpoint come from where AWS's tools have them:
    `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, profiles, roles."""

    def __init__(self, bucket: str, prefix: str) -> None:
        from pyarrow import fs

        self._base = f"{bucket}/{prefix}".rstrip("/")
        options: dict[str, Any] = {}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            scheme, _, host = endpoint.rpartition("://")
            options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region:
            options["region"] = region
        self._fs: Any = fs.S3FileSystem(
            connect_timeout=CONNECT_TIMEOUT_S, request_timeout=REQUEST_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS), **options,
        )  # fmt: skip
        self._selector, self._is_file = fs.FileSelector, fs.FileType.File

    def __str__(self) -> str:
        return f"s3://{self._base}"

    def names(self, path: str = "") -> list[str]:
        found = self._fs.get_file_info(self._selector(self._at(path), allow_not_found=True))
        return [info.base_name for info in found]

    def exists(self, path: str) -> bool:
        return bool(self._fs.get_file_info(self._at(path)).type == self._is_file)

    def size(self, path: str) -> int:
        found = self._fs.get_file_info(self._at(path))
        return int(found.size) if found.type == self._is_file else -1

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        # An object is there when its upload is complete.
        with self._fs.open_output_stream(self._at(path)) as stream:
            yield stream

    def write(self, path: str, content: Callable[[BinaryIO], T]) -> T:
        with self.writing(path) as stream:
            return content(stream)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        with self._fs.open_input_stream(self._at(path), buffer_size=_BUFFER_BYTES) as stream:
            yield stream

    def put(self, path: str, data: bytes) -> None:
        with self.writing(path) as stream:
            stream.write(data)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(self._at(path))

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._fs.delete_dir(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base


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


def _sync(directory: Path) -> None:
    """Names of files are on the disk only when their directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
