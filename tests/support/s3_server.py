"""A real S3 server for tests: seaweedfs, one process on loopback, which checks signatures and writes to a disk."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from swift_agent.agent.processes.linux import Guard
from tests.support.ports import free_ports

BUCKET = "checkpoints"
NAMES = ("s3", "master", "volume", "filer")


class S3Server:
    """A context manager; *directory* holds its data and its log. There is one bucket, `BUCKET`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._ports = free_ports(8)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": "swift", "secretKey": "a-secret-of-tests"}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        # Short: a path to a socket has 107 characters at most. Else they are made, and left, in /tmp.
        self._sockets = tempfile.TemporaryDirectory(prefix="s3-")
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports[0]}",
            "AWS_ACCESS_KEY_ID": "swift",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> S3Server:
        ports = [
            option for index, name in enumerate(NAMES)
            for option in (f"-{name}.port={self._ports[index]}", f"-{name}.port.grpc={self._ports[index + 4]}")
        ]  # fmt: skip
        command = [
            str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "server", f"-dir={self.directory}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={self.directory / 's3.json'}", *ports,
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=20",
            "-master.telemetry=false", f"-filer.localSocket={self._sockets.name}/filer",
            f"-s3.localSocket={self._sockets.name}/s3",
        ]  # fmt: skip
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen(Guard().wrap(command), stdout=log, stderr=log)
        self._wait()
        self._make_bucket()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.thaw()
        self.process.kill()
        self.process.wait()
        self._sockets.cleanup()
        for name, port in zip(NAMES, self._ports[len(NAMES) :], strict=True):
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)  # nothing says where to make these

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    def _wait(self) -> None:
        deadline_s = time.monotonic() + 60.0
        while True:
            assert self.process.poll() is None, (self.directory / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(self.environment["AWS_ENDPOINT_URL"], timeout=1.0)
                return
            except urllib.error.HTTPError:
                return  # it wants a signature
            except OSError:
                assert time.monotonic() < deadline_s, (self.directory / "log").read_text()[-2000:]
                time.sleep(0.05)

    def _make_bucket(self) -> None:
        from pyarrow import fs

        server = self.environment
        made = fs.S3FileSystem(
            access_key=server["AWS_ACCESS_KEY_ID"], secret_key=server["AWS_SECRET_ACCESS_KEY"], scheme="http",
            endpoint_override=server["AWS_ENDPOINT_URL"].removeprefix("http://"), region=server["AWS_REGION"],
            allow_bucket_creation=True,
        )  # fmt: skip
        deadline_s = time.monotonic() + 60.0
        while True:  # its parts come up one after the other
            try:
                made.create_dir(BUCKET)
                return
            except OSError:
                assert time.monotonic() < deadline_s, (self.directory / "log").read_text()[-2000:]
                time.sleep(0.1)
