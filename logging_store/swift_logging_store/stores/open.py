"""Which store a URL names: a directory of a shared filesystem or of HDFS, or a prefix of an S3 bucket.

`contract` says what all of them are. It must never ask whether a server is there, and never repeat what may be a secret
in a URL.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

from swift_logging_store.stores import hdfs
from swift_logging_store.stores.contract import Store, StoreUnknown
from swift_logging_store.stores.local import LocalStore
from swift_logging_store.stores.s3 import S3Store


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
            lacks = hdfs.needs_hdfs_native() and importlib.util.find_spec("hdfs_native") is None
        except ValueError as error:
            raise StoreUnknown(str(error)) from None
        if lacks:
            raise StoreUnknown(f"hdfs://{parts.netloc} needs hdfs-native: pip install 'swift-agent[hdfs]'")
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


