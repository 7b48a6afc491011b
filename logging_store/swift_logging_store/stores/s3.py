"""A store below a prefix of an S3 bucket, by pyarrow.

A bucket renames nothing, so an upload that ends with an error may leave a part of a file under its name. It must never
import pyarrow before there is such a store, take credentials from a URL, or try a request for ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from swift_logging_store.stores.contract import _BUFFER_BYTES, T

# Of one request to a server, of which a file takes many; and how often one is tried.
REQUEST_TIMEOUT_S = 20.0

CONNECT_TIMEOUT_S = 5.0

MAX_ATTEMPTS = 3


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
