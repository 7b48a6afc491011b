"""The same few records are read again and again: reading each once makes the search several times faster."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from swift_rendezvous.roster import codec, view


@pytest.fixture(autouse=True)
def records_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = functools.cache(codec.decode)
    monkeypatch.setattr(view, "decode", known)
