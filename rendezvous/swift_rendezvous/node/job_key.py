"""The keys of a job, derived from the secret that an operator gives to all of its nodes.

    secret --PBKDF2, salted with the job's id--> master --HMAC-SHA256 per label--> heartbeat key, store tokens, ...

Without a secret the master is derived from the job's id alone. Then every key can be worked out by anyone: keys still
keep two jobs from being mixed up, but prove nothing, and nothing that is said about them may claim that.

This module must never read a file or the environment, and must never let a key into a record, a message or a `repr`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

# The cost of one guess at the secret behind a proof: PBKDF2, unlike scrypt, is there in FIPS mode, too.
_NUM_ROUNDS = 600_000


class JobKey:
    """All nodes of a job that were given the same secret have an equal one. *protected*: there is a secret."""

    def __init__(self, master: bytes, protected: bool) -> None:
        self._master = master
        self.protected = protected

    @classmethod
    def of_secret(cls, secret: bytes, job_id: str) -> JobKey:
        """Takes 0.1 to 0.3 s on purpose: a secret that is too simple is not guessed at once."""
        return cls(hashlib.pbkdf2_hmac("sha256", secret, _salt(job_id), _NUM_ROUNDS), True)

    @classmethod
    def without_secret(cls, job_id: str) -> JobKey:
        return cls(hashlib.sha256(_salt(job_id)).digest(), False)

    @classmethod
    def of_one_node(cls) -> JobKey:
        """For a job that no other agent can join: a random key that never leaves this process."""
        return cls(secrets.token_bytes(32), True)

    @property
    def proof(self) -> str:
        """Public: equal on nodes with the same secret; "" without one. It tells nothing else, but lets a reader
        test guesses, each at the price of `of_secret`.
        """
        return self._derive("proof").hex() if self.protected else ""

    @property
    def heartbeat(self) -> bytes:
        """What agents prove to each other that they know."""
        return self._derive("heartbeat")

    def store_token(self, generation: int, nonce: str) -> str:
        """Of the session store of *generation*; *nonce*: the public one in its record."""
        return self._derive("store", str(generation), nonce).hex()

    def signed_modules(self, names: Sequence[str]) -> tuple[str, ...]:
        """*names*, of modules that other nodes of the job may import, with what proves that a node of it says so."""
        return (*names, self._derive("preload", ",".join(names)).hex())

    def modules_of(self, signed: Sequence[str]) -> tuple[str, ...]:
        """The names in what `signed_modules` gave; none if a node without the secret can have written it. To import a
        module is to run it."""
        names = tuple(signed[:-1])
        is_told = self.protected and bool(signed)
        expected = self.signed_modules(names)[-1] if is_told else ""
        is_ours = is_told and hmac.compare_digest(signed[-1].encode(errors="replace"), expected.encode())
        return names if is_ours and all(part.isidentifier() for name in names for part in name.split(".")) else ()

    def _derive(self, *label: str) -> bytes:
        # A part cannot contain the separator: labels are ours, the rest are numbers and hexadecimal.
        return hmac.new(self._master, "|".join(label).encode(), hashlib.sha256).digest()

    def __repr__(self) -> str:
        return f"JobKey({'protected' if self.protected else 'without a secret'})"


def _salt(job_id: str) -> bytes:
    return b"swift-agent job key 1|" + job_id.encode()
