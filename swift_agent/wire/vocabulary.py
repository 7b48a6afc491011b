"""Typed messages as the objects that a channel carries, and back: a class for each message, its `op` is the name.

A vocabulary lists what one side may say to the other. What comes is checked field by field against the types of its
class; fields that this version does not know are left out. Must never evaluate or unpickle what it reads.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, Generic, TypeVar

from swift_agent.wire.channel import Message
from swift_rendezvous.codec import from_plain, to_plain

T = TypeVar("T")


class NotUnderstood(ValueError):
    """A message that the vocabulary does not have, or one with fields that do not fit; the text names both."""


def name_of(kind: type) -> str:
    """The `op` of a class of messages: `AskPlace` is "ask place"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def written(message: Any) -> Message:
    """A message, a dataclass, as a channel carries it."""
    return {"op": name_of(type(message)), **{f.name: to_plain(getattr(message, f.name)) for f in fields(message)}}


class Vocabulary(Generic[T]):
    """The messages of one direction, whose classes are the members of the union *T*."""

    def __init__(self, *kinds: type[T]) -> None:
        self._kinds = {name_of(kind): kind for kind in kinds}

    def read(self, message: Message) -> T:
        """Raises `NotUnderstood`."""
        op = message.get("op")
        kind = self._kinds.get(op) if isinstance(op, str) else None
        if kind is None:
            raise NotUnderstood(f"{op!r} is no message of this version")
        try:
            found: T = from_plain(kind, {name: value for name, value in message.items() if name != "op"}, repr(op))
        except ValueError as error:
            raise NotUnderstood(str(error)) from None
        return found
