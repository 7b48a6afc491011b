"""Where etcd is and how to log in, read from options and the environment.

Must never open a connection and must never put a password into a message or a repr.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_PORT = 2379
# Of an endpoint that is the absolute path of a Unix socket.
UNIX = "unix:"
_PLAIN_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_IPV6_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")


def parse_endpoints(text: str) -> tuple[tuple[str, ...], bool | None]:
    """Read a comma-separated list such as ``a:2379,b`` or ``https://[::1]:2379``.

    ``unix:/path`` is the Unix socket of a server on this machine. Returns the endpoints as ``host:port`` (or
    ``unix:/path``) in the given order, without repetition, and whether their scheme asks for TLS (None when no endpoint
    has a scheme). Raises ValueError with every mistake of the list, one per line.
    """
    endpoints: list[str] = []
    schemes: set[str] = set()
    mistakes: list[str] = []
    for part in text.split(","):
        endpoint = part.strip()
        if endpoint.startswith(UNIX):
            path = "/" + endpoint.removeprefix(UNIX).removeprefix("//").lstrip("/")
            if not os.path.isabs(endpoint.removeprefix(UNIX)) or path == "/":
                mistakes.append(f"{endpoint!r}: a Unix socket is named by its absolute path, as in unix:/run/etcd")
            elif UNIX + path not in endpoints:
                endpoints.append(UNIX + path)
            continue
        scheme, separator, rest = endpoint.rpartition("://")
        if separator and scheme not in ("http", "https"):
            mistakes.append(f"{endpoint.rpartition('@')[2]!r}: scheme {scheme!r} is not http or https")
            continue
        host, port, mistake = _split_host_port(rest.rstrip("/") if separator else rest)
        if mistake:
            shown = endpoint.rpartition("@")[2]  # what stands before an @ may be a password
            mistakes.append(f"{shown!r}: {mistake}")
            continue
        schemes.add(scheme)
        if f"{host}:{port}" not in endpoints:
            endpoints.append(f"{host}:{port}")
    if {"http", "https"} <= schemes:
        mistakes.append("http and https are mixed: use one of them for all")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return tuple(endpoints), {"http": False, "https": True}.get(max(schemes, default=""))


def _split_host_port(text: str) -> tuple[str, int, str]:
    """Host, port and what is wrong with them ('' when nothing is)."""
    if not text:
        return "", 0, "no host"
    if "@" in text:
        return "", 0, "credentials do not belong into an endpoint"
    if "/" in text or "?" in text:
        return "", 0, "an endpoint is host:port, without a path"
    if text.startswith("["):
        host, bracket, port_text = text.partition("]")
        host += bracket
        if not _IPV6_HOST.fullmatch(host):
            return "", 0, "not an IPv6 address in brackets"
        if port_text and not port_text.startswith(":"):
            return "", 0, "a port follows the bracket as ':2379'"
        port_text = port_text[1:] if port_text else str(DEFAULT_PORT)
    else:
        if text.count(":") > 1:
            return "", 0, "an IPv6 address is written in brackets, as in [::1]:2379"
        host, colon, port_text = text.partition(":")
        if not _PLAIN_HOST.fullmatch(host):
            return "", 0, f"{host!r} is not a host name" if host else "no host"
        port_text = port_text if colon else str(DEFAULT_PORT)
    if not port_text.isascii() or not port_text.isdigit() or not 0 < int(port_text) < 65536:
        return "", 0, f"port {port_text!r} is not a number from 1 to 65535"
    return host, int(port_text), ""


@dataclass(frozen=True)
class EtcdConfig:
    """How to reach an etcd cluster.

    ``endpoints`` are ``host:port`` or ``unix:/path``. ``tls`` is on when asked for by an https endpoint or by any of
    the three files; without ``ca_cert`` the roots that come with gRPC are trusted. ``timeout_s`` is the overall
    deadline of one operation, over all endpoints. The password is left out of the repr.
    """

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    timeout_s: float = 5.0
    tls: bool = False

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("no etcd endpoint")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {self.timeout_s}")
        if self.ca_cert or self.cert:
            object.__setattr__(self, "tls", True)

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        endpoints: str | None = None,
        user: str | None = None,
        password_file: str | None = None,
        ca_cert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout_s: float = 5.0,
    ) -> EtcdConfig | None:
        """Read the configuration; an argument goes before its variable (`os.environ` unless *environ* is given).

        Variables: ``SWIFT_ETCD_ENDPOINTS``, ``SWIFT_ETCD_USER``, ``SWIFT_ETCD_PASSWORD`` or
        ``SWIFT_ETCD_PASSWORD_FILE``, ``SWIFT_ETCD_CACERT``, ``SWIFT_ETCD_CERT``, ``SWIFT_ETCD_KEY``.
        Returns None when no endpoint is named. Raises ValueError with all mistakes, one per line.
        """
        env = os.environ if environ is None else environ
        given = endpoints or env.get("SWIFT_ETCD_ENDPOINTS") or ""
        if not given:
            return None
        mistakes: list[str] = []
        parsed: tuple[str, ...] = ()
        scheme_tls: bool | None = None
        try:
            parsed, scheme_tls = parse_endpoints(given)
        except ValueError as error:
            mistakes += [f"etcd endpoint {line}" for line in str(error).splitlines()]

        user = user or env.get("SWIFT_ETCD_USER") or None
        password = _read_password(env, password_file, mistakes)
        if user and password is None and not mistakes:
            mistakes.append(
                f"etcd user {user!r} has no password: set SWIFT_ETCD_PASSWORD_FILE or SWIFT_ETCD_PASSWORD"
            )
        if password is not None and not user:
            mistakes.append("etcd password without a user: set SWIFT_ETCD_USER")

        files = {
            "ca_cert": ca_cert or env.get("SWIFT_ETCD_CACERT") or None,
            "cert": cert or env.get("SWIFT_ETCD_CERT") or None,
            "key": key or env.get("SWIFT_ETCD_KEY") or None,
        }
        for path in files.values():
            if path and not os.access(path, os.R_OK):
                mistakes.append(f"etcd TLS file {path!r} cannot be read")
        if bool(files["cert"]) != bool(files["key"]):
            mistakes.append("an etcd client certificate needs both SWIFT_ETCD_CERT and SWIFT_ETCD_KEY")
        if scheme_tls is False and any(files.values()):
            mistakes.append("etcd endpoints are http:// but TLS files are given: write https:// or drop the files")
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return cls(parsed, user, password, **files, timeout_s=timeout_s, tls=bool(scheme_tls))


def _read_password(env: Mapping[str, str], password_file: str | None, mistakes: list[str]) -> str | None:
    """The password, or None; a trailing newline of the file is dropped."""
    path, direct = env.get("SWIFT_ETCD_PASSWORD_FILE"), env.get("SWIFT_ETCD_PASSWORD")
    if not password_file and path and direct:
        mistakes.append("both SWIFT_ETCD_PASSWORD and SWIFT_ETCD_PASSWORD_FILE are set: keep one")
        return None
    file = password_file or path
    if not file:
        return direct or None
    try:
        mode = os.stat(file).st_mode
        # The group may read: that is how Kubernetes hands a secret to a user that is not root.
        if mode & (stat.S_IWGRP | stat.S_IRWXO):
            mistakes.append(
                f"etcd password file {file!r}: others may read or change it ({stat.filemode(mode)}); "
                f"type chmod 600 {file}"
            )
            return None
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        mistakes.append(f"etcd password file {file!r} cannot be read: {reason}")
        return None
