"""The job's secret: read once from a file or the environment, and kept from every process that the agent starts.

Must never put a secret into a message, and must never take one from the command line.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping

from swift_rendezvous.node.job_key import JobKey

ENV_SECRET = "SWIFT_JOB_SECRET"
ENV_SECRET_FILE = "SWIFT_JOB_SECRET_FILE"
MIN_BYTES = 16
MAX_BYTES = 4096
# What workers have no business with. They run as the same user, so this keeps it out of their dumps and logs, no more.
_SECRET_VARIABLES = (ENV_SECRET, "SWIFT_ETCD_PASSWORD")


def read(environ: Mapping[str, str], secret_file: str | None, mistakes: list[str]) -> bytes | None:
    """The secret, without the newline at its end; None if there is none. *secret_file* goes before its variable.

    What is wrong is appended to *mistakes*, with what to type instead.
    """
    path = secret_file if secret_file is not None else environ.get(ENV_SECRET_FILE) or None
    # One that is set and empty is a mistake, above all in scripts: it must not turn the protection off.
    direct = environ.get(ENV_SECRET)
    if path is not None and direct is not None:
        named = "--job-secret-file" if secret_file is not None else ENV_SECRET_FILE
        mistakes.append(f"both {named} and {ENV_SECRET} are given: keep one")
        return None
    if path is not None:
        secret, where = _read_file(path, mistakes), f"job secret file {path!r}"
        if secret is None:
            return None
    elif direct is not None:
        # As bytes: a file with the same content is the same secret.
        secret, where = os.fsencode(direct), ENV_SECRET
    else:
        return None
    secret = secret.rstrip(b"\r\n")
    if len(secret) < MIN_BYTES:
        mistakes.append(
            f"{where}: too few bytes for a secret ({len(secret)}, at least {MIN_BYTES}); "
            "make one with `openssl rand -base64 32`"
        )
        return None
    if len(secret) > MAX_BYTES:
        mistakes.append(f"{where}: longer than {MAX_BYTES} bytes; is it the right one?")
        return None
    return secret


def _read_file(path: str, mistakes: list[str]) -> bytes | None:
    """The beginning of the file, or None."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # The group may read: that is how Kubernetes hands a secret to a user that is not root.
            if mode & (stat.S_IWGRP | stat.S_IRWXO):
                mistakes.append(
                    f"job secret file {path!r}: others may read or change it ({stat.filemode(mode)}); "
                    f"type chmod 600 {path}"
                )
                return None
            return file.read(MAX_BYTES + 3)
    except OSError as error:
        mistakes.append(f"job secret file {path!r} cannot be read: {error.strerror}")
    except ValueError as error:  # a path with a zero byte
        mistakes.append(f"job secret file {path!r} cannot be read: {error}")
    return None


def key(secret: bytes | None, job_id: str, *, alone: bool) -> JobKey:
    """*alone*: no other agent can join the job, which then needs no secret to be protected."""
    if secret is not None:
        return JobKey.of_secret(secret, job_id)
    return JobKey.of_one_node() if alone else JobKey.without_secret(job_id)


def warning(job_key: JobKey) -> str:
    """What a job without a secret has to be told, "" for any other."""
    if job_key.protected:
        return ""
    return (
        "no job secret: agents and workers do not authenticate each other; a program that reads the job's records in "
        "etcd and reaches its ports can take part (--job-secret-file FILE, see docs/security.md)"
    )


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Keep the variables that hold secrets out of the environment, and so of every process that is started inside."""
    taken = {name: os.environ.pop(name) for name in _SECRET_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)
