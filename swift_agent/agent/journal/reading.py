"""The lines of a journal, as a reader gets them: its head, then each line that is whole. Pure.

Must never look into a line but the first: what the others mean is in `format`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from swift_agent.agent.journal.format import FORMAT

CUT: Final = object()
"""In place of the last line, where the journal ends in its middle: its agent was killed, or the disk was full."""


class JournalError(ValueError):
    """This is no journal, or not one of this version; the message says which line and why."""


def lines_of(raw: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """Number and content of each line; the first is the head, an object of this format. Raises `JournalError` for what
    is no journal, is of another format, or is damaged in another place than its end."""
    number, cut = 0, 0
    for number, line in enumerate(raw, 1):
        if cut:
            raise JournalError(f"line {cut} is damaged: it is not JSON")
        try:
            content = json.loads(line)
        except ValueError:
            if number == 1:
                raise JournalError("this is no journal: its first line is not JSON") from None
            cut = number
            continue
        yield number, _head(content) if number == 1 else content
    if not number:
        raise JournalError("this is no journal: it is empty")
    if cut:
        yield cut, CUT


def _head(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or "journal" not in content:
        raise JournalError("this is no journal: its first line is not the head of one")
    if content["journal"] != FORMAT:
        by = content.get("version", "another version")
        raise JournalError(
            f"format {content['journal']} of swift-agent {by}; this version reads format {FORMAT}: use that version"
        )
    return content
