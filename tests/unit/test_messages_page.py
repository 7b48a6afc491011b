"""docs/messages.md has every line that a worker or an agent prints to people, and none that nobody prints.

A text of the sources is looked up by the first words of its longest constant piece; the quotation that has them must be
a part of that very text. The other way round, each quotation of the page, between two `...`, must be a part of a text.
"""

from __future__ import annotations

import functools
import re

from tests.support.job import ROOT
from tests.support.texts import Message, Text, is_part, rows, texts

PAGE = ROOT / "docs" / "messages.md"
NUM_WORDS = 6
MIN_WORDS = 3
"""What has fewer is a name, or a clause of another text."""

# Texts of these modules are not on the page.
LEFT_OUT = {
    "swift_agent/ctl/": "what swiftctl prints: docs/operations.md, docs/status.md",
    "recovery/swift_recovery/strategy/": "what swiftctl plan prints: docs/planning.md",
    "swift_agent/agent/injection/strikes.py": "shell commands; why swiftctl inject is refused: docs/fault-injection.md",
    "swift_agent/wire/injected.py": "what swiftctl inject prints: docs/fault-injection.md",
    "swift_agent/agent/metrics/exposition.py": "the help of metrics: docs/observability.md",
    "swift_agent/agent/metrics/health.py": "what /healthz and /readyz answer: docs/observability.md",
    "swift_agent/agent/metrics/server.py": "the answer to a path that is none: docs/observability.md",
    "swift_agent/native/": "what swiftctl native prints: docs/operations.md",
    "swift_agent/launch/options.py": "the help of swift-run: docs/cli.md",
    "swift_agent/agent/journal/format.py": "what swiftctl replay says of a journal: docs/journals.md",
    "swift_agent/agent/journal/reading.py": "what swiftctl replay says of a journal: docs/journals.md",
    "swift_agent/agent/journal/replay.py": "what swiftctl replay says of a journal: docs/journals.md",
    "swift_agent/torchrun_plugin/": "under the stock torchrun: docs/torchrun-plugin.md",
    "swift_agent/torch_private/": "texts of torch, which are looked for; errors that only a mistake of ours gives",
    "swift_agent/wire/channel.py": "a clause of another line: how a connection broke",
    "swift_agent/wire/standing.py": "a clause of another line: what is wrong with a file",
    "swift_agent/wire/store_frames.py": "a clause of another line: how a connection broke",
    "recovery/swift_recovery/planning/reports.py": "a clause of another line: what is wrong in a report",
    "recovery/swift_recovery/state/codec.py": "a clause of another line: what cannot be copied, or is malformed",
    "recovery/swift_recovery/state/incoming.py": "a clause of another line: why a state does not fit",
    "recovery/swift_recovery/state/tensors.py": "a clause of another line: what tensor cannot be copied",
    "recovery/swift_recovery/transfer/": "a clause of another line: why a state has not come",
    "recovery/swift_recovery/undo/patch.py": "a clause of another line: why a patch does not fit",
    "recovery/swift_recovery/undo/rules.py": "a table of recovery/README.md",
    "recovery/swift_recovery/undo/parts.py": "a word of that table",
    "logging_store/swift_logging_store/format/": "a clause of another line: what is damaged in a segment",
    "rendezvous/swift_rendezvous/node/_handshake.py": "a clause of another line: why an agent was not let in",
    "rendezvous/swift_rendezvous/codec.py": "a clause of another line: what is wrong in a record",
    "rendezvous/swift_rendezvous/store/kv.py": "an error that only a mistake of ours gives",
}
# Arguments of these calls are no lines: they are shown only if somebody asks for it, or not at all.
NOT_PRINTED = re.compile(r"(.*\.)?(debug|AssertionError|compile|Thread|thread)|click\.\w+")
# Others that are no lines, by the words by which they would be looked up.
CODE = ("import ctypes, os, sys parent =", "import sys; from swift_agent.agent.processes.forked_main import run_path;",
        'exec 3<&0 </dev/null "$@" 3<&- &', "| optimizer | kept besides the", "Run a training script on this",
        "What follows TRAINING_SCRIPT is passed to", "etcd Version: (\\d+)\\.(\\d+)")  # fmt: skip
OF_OTHERS = (  # of etcd, Python, Hadoop
    "too many requests", "invalid auth token", "revision of auth store is old", "user name is empty",
    "invalid user ID or password", "requested lease not found", "has been compacted", "authentication is not enabled",
    "can't start new thread", "failed to connect", "address already in use", "watch cancelled by the server",
    "RPC listener disconnected", "not supported for erasure-coded files",
    "\\(os error (\\d+)\\)", "Traceback (most recent call last):",
    "During handling of the above exception", "The above exception was the direct",
)  # fmt: skip
MISTAKES_OF_OURS = (  # nothing that a script or an operator does gives these
    "module 'swift_agent' has no attribute", "there is no rank", "has failed already", "rebuild of generation",
    "not connected yet", "dry_run() is for stopped groups: call", "split_ranks cannot be None or empty",
    "a rank is inside", "a rank stands at", "asks a running worker to start", "waits for iteration",
    "stands at iteration", "is no name of a file", "this snapshot is empty: nothing has", "malformed state manifest:",
    "not a state manifest of version", ": the manifest has no tensor", "without a secret", "this store was closed",
    "timeout_s must be positive, not", "this private etcd is not running", "this private etcd is running already",
    "is no name for the log",
)  # fmt: skip
NO_LINES = frozenset((*CODE, *OF_OTHERS, *MISTAKES_OF_OURS))


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def phrase(message: Message) -> str:
    """The first words of the longest piece of *message*; "" if it has too few."""
    longest = one_line(max((piece or "" for piece in message), key=len)).strip()
    if sum(bool(re.search(r"[A-Za-z]", word)) for word in longest.split()) < MIN_WORDS:
        return ""
    return " ".join(longest.split()[:NUM_WORDS])


@functools.cache
def wanted() -> list[tuple[str, Text, Message]]:
    """What the page must have: the words, the text, and that in one line."""
    found = []
    for text in texts():
        message = tuple(piece and one_line(piece) for piece in text.message)
        is_left_out = text.path.startswith(tuple(LEFT_OUT)) or any(map(NOT_PRINTED.fullmatch, text.calls))
        if not is_left_out and phrase(message) and phrase(message) not in NO_LINES:
            found.append((phrase(message), text, message))
    return found


def quoted() -> list[str]:
    """What the page quotes: of each row of a table of lines, the first cell."""
    cells = [cells[0] for head, cells in rows(PAGE) if head[0] in ("line", "clause")]
    return [span[1].strip() for cell in cells for span in re.findall(r"(`+)(.+?)\1(?!`)", cell)]


def parts(quotation: str) -> list[str]:
    return [part for part in (part.strip(" :();,.") for part in quotation.split("...")) if part]


def is_covered(words: str, message: Message, quotations: list[str]) -> bool:
    return any(words in one and any(is_part(part, message) for part in (one, *parts(one))) for one in quotations)


def missing(quotations: list[str]) -> list[str]:
    return [
        f"{text.path}:{text.line}: {words}"
        for words, text, message in wanted()
        if not is_covered(words, message, quotations)
    ]


def unknown(quotations: list[str]) -> list[str]:
    said = list(dict.fromkeys(tuple(piece and one_line(piece) for piece in text.message) for text in texts()))
    found = dict.fromkeys(part for one in quotations for part in parts(one))
    pieces = "\0".join(piece or "" for message in said for piece in message)  # of most a part is in one piece
    return [part for part in found if part not in pieces and not any(is_part(part, message) for message in said)]


def test_every_line_of_the_sources_is_on_the_page() -> None:
    found = missing(quoted())
    assert not found, "docs/messages.md has no line for:\n" + "\n".join(found)


def test_every_line_of_the_page_is_of_the_sources() -> None:
    found = unknown(quoted())
    assert not found, "nothing in the sources says:\n" + "\n".join(found)


def test_a_row_is_complete() -> None:
    for head, cells in rows(PAGE):
        assert len(cells) == len(head) and all(cells), cells
        assert head[0] not in ("line", "clause") or "`" in cells[0], cells


def test_what_is_left_out_is_there() -> None:
    """An entry that leaves nothing out any more goes."""
    found = texts()
    assert not [path for path in LEFT_OUT if not any(text.path.startswith(path) for text in found)]
    assert not NO_LINES - {phrase(tuple(piece and one_line(piece) for piece in text.message)) for text in found}


def test_a_gap_and_a_line_that_nobody_says_are_found_out() -> None:
    assert len(wanted()) > 500 and len(quoted()) > 400
    begun = ("all begin iteration ", None, " again: ", None)
    words = phrase(begun)
    assert words == "all begin iteration" and phrase(("a ", None, " b")) == phrase(("no lease",)) == ""
    assert is_covered(words, begun, ["all begin iteration 12 again: WHY"]) and is_covered(
        words, begun, ["all begin iteration 12 ..."]
    )
    assert not is_covered(words, begun, ["all begin iteration 12 anew", "begin iteration 12 again: WHY"])
    # The words alone are not enough: two texts may have them.
    assert not is_covered("cannot be written:", ("the record '", None, "' cannot be written: ", None),
                          ["the log in DIR cannot be written: WHY"])  # fmt: skip
    kept = [one for one in quoted() if "all begin iteration" not in one]
    assert [one.rpartition(": ")[2] for one in missing(kept)] == ["all begin iteration"]
    assert unknown(["all start iteration 12 again: WHY"]) and not unknown(["all begin iteration 12 again: WHY"])
