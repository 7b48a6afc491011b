"""Checksums of what was received: which are known, and what they are compared with."""

from __future__ import annotations

import pytest
import torch

from swift_logging_store.format.record import Channel
from swift_logging_store.log.digests import Digests

CHANNEL, OTHER = Channel("world", 1, 0), Channel("world", 2, 0, 5)


def message(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((3, 2), value, dtype=dtype)


def received(*values: float, first: int = 0, channel: Channel = CHANNEL) -> Digests:
    digests = Digests()
    for number, value in enumerate(values, first):
        digests.add(channel, number, message(value))
    return digests


def known(digests: Digests, channel: Channel = CHANNEL) -> list[int]:
    """The numbers of messages that are told from others."""
    return [number for number in range(10) if digests.differs(channel, number, message(-1))]


def test_what_is_sent_again_must_be_the_same() -> None:
    digests = received(1, 2, first=3)
    assert known(digests) == [3, 4] and not known(digests, OTHER)
    assert not digests.differs(CHANNEL, 3, message(1)) and digests.differs(CHANNEL, 4, message(1))
    # Whatever it is: views with gaps, and types that NumPy does not have.
    assert not digests.differs(CHANNEL, 4, torch.full((3, 4), 2.0)[:, ::2])
    digests.add(CHANNEL, 5, message(3, torch.bfloat16))
    assert not digests.differs(CHANNEL, 5, message(3, torch.bfloat16))
    assert digests.differs(CHANNEL, 5, message(3))
    digests.add(CHANNEL, 6, torch.zeros(2).to_sparse())
    assert known(digests) == [3, 4, 5]


def test_those_that_come_again_and_those_that_a_checkpoint_covers_are_forgotten() -> None:
    digests = received(*range(6))
    digests.keep_before({CHANNEL: 5})
    digests.keep_from({CHANNEL: 2})
    assert known(digests) == [2, 3, 4]
    digests.add(CHANNEL, 5, message(7))
    assert not digests.differs(CHANNEL, 5, message(7)) and known(digests) == [2, 3, 4, 5]
    digests.keep_from({})
    assert known(digests) == [2, 3, 4, 5]
    digests.add(CHANNEL, 7, message(9))  # nobody has waited for the one before
    assert known(digests) == [7]
    digests.keep_before({})
    assert known(digests) == []


def test_they_go_to_who_has_sent_it() -> None:
    digests = received(1, 2, 3, first=2)
    digests.add(OTHER, 0, message(8))
    told = Digests()
    told.take(digests.to_bytes(1))
    told.take(digests.to_bytes(3))  # of another rank, from which nothing came
    assert known(told) == [2, 3, 4] and not told.differs(CHANNEL, 4, message(3)) and not known(told, OTHER)
    with pytest.raises(ValueError, match="checksums of 3"):
        told.take(digests.to_bytes(1)[:-8])


def test_of_very_many_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_logging_store.log.digests.MAX_VALUES", 4)
    assert known(received(*range(7))) == [4, 5, 6]
    digests = received(*range(4))
    digests.keep_before({CHANNEL: 1})
    assert known(digests) == []
