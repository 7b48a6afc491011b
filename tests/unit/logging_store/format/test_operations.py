"""Logs that exist must stay readable: a tag names one collective for ever."""

from __future__ import annotations

from swift_agent.torch_private import messages as torch_messages
from swift_logging_store.format.operations import COLLECTIVE_TAGS

# As the README of the room says. A new collective gets the next number.
SHIPPED = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "barrier",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
)  # fmt: skip


def test_tags_stay() -> None:
    assert {name: COLLECTIVE_TAGS[name] for name in SHIPPED} == {name: tag for tag, name in enumerate(SHIPPED)}
    assert len(set(COLLECTIVE_TAGS.values())) == len(COLLECTIVE_TAGS)


def test_whatever_is_logged_has_a_tag() -> None:
    assert COLLECTIVE_TAGS.keys() == set(torch_messages.ALIKE)
