"""What the docs quote of the product's words is what the sources say, and the tests that they name are there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_agent.worker.loop import standstill
from swift_agent.worker.loop.standstill import Doing, Inside, Standing
from swift_recovery.state import deviation
from swift_recovery.state.deviation import Fingerprint
from tests.support.job import ROOT

PAGE = ROOT / "docs" / "will-my-script-be-recovered.md"
# Tables that quote, by what is over the column.
COLUMNS = {"what you see": PAGE, "an operator sees": ROOT / "docs" / "operations.md"}
# Of somebody else (etcd, Python), or the name of a call.
FOREIGN = (
    "torch.load", "UnboundLocalError", "no space left on device",
    "etcd refused Txn: mvcc: database space exceeded",
)  # fmt: skip
# In a quotation: what stands for something else in each case.
FIELDS = re.compile(r"\d[\d.]*|\b[A-Z]{3,}\d?\b|\w+ \(\w+, \w+\.py:\d+\)|rank 0's")

Message = tuple[str | None, ...]
"""Pieces of a text; None: something is put in there."""


def rows(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """The head of its table, and each row."""
    head: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not head:
            head = cells
        elif not set(line) <= set("|- "):
            yield head, cells


def quotations() -> list[str]:
    found = {}
    for column, path in COLUMNS.items():
        for head, cells in rows(path):
            if column in head:
                quoted = re.findall(r"`([^`]+)`", cells[head.index(column)])
                found |= dict.fromkeys(part.strip(" :();") for one in quoted for part in one.split("..."))
    return [one for one in found if one and one not in FOREIGN]


@functools.cache
def messages() -> list[Message]:
    """All texts of the sources."""
    found: list[Message] = []
    for name in ("swift_agent", "recovery", "rendezvous", "logging_store"):
        for path in (ROOT / name).rglob("*.py"):
            tree = ast.parse(path.read_text())
            parts = set()
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts |= {id(value) for value in node.values}
                    found.append(
                        tuple(str(one.value) if isinstance(one, ast.Constant) else None for one in node.values)
                    )
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    found.append((node.value,))
    return found


def is_part(text: str, message: Message) -> bool:
    """Whether *text* is a part of *message*, in which only `FIELDS` of it are put in."""
    free = {at for field in FIELDS.finditer(text) for at in range(*field.span())}
    for begin, piece in enumerate(message):
        if piece is not None and text in piece:
            return True
        # So much of the text comes before the next piece.
        ends = {0} if piece is None else {len(piece) - at for at in range(len(piece)) if text.startswith(piece[at:])}
        for following in message[begin if piece is None else begin + 1 :]:
            if following is None:
                for end in list(ends):
                    while end in free:
                        end += 1
                        ends.add(end)
                if len(text) in ends:
                    return True
                continue
            if any(end < len(text) and following.startswith(text[end:]) for end in ends):
                return True
            ends = {end + len(following) for end in ends if text.startswith(following, end)}
    return False


def put_together() -> list[str]:
    """What comes out of parts in several places of the sources."""

    def at(inside: Inside, doing: Doing, iterations: int) -> Standing:
        return Standing(iterations, 0, inside, doing, "train.py:3", 60.0)

    def held(rate: str) -> Fingerprint:
        return Fingerprint({"hyper": {"lr of optimizer": rate}}, {"hyper lr of optimizer": rate}, frozenset())

    prints = {0: held("0.0034"), 1: held("0.1")}
    wrong, _ = deviation.compare(prints, undisturbed=False)
    return [
        "nobody can go on: " + standstill.describe({0: at("end", "waits", 10), 1: at("iteration", "waits", 10)}, 2),
        "nobody can go on: " + standstill.describe({0: at("section", "waits", 1), 1: at("", "works", 1)}, 2),
        "nothing has moved here for 60 s: " + standstill.describe({0: at("", "works", 1)}, 1),
        deviation.sentence(prints, wrong, iteration=29, equal_after=None, undisturbed=False, generation=2),
    ]


@pytest.mark.parametrize("quotation", quotations())
def test_what_is_quoted_is_said(quotation: str) -> None:
    said = any(is_part(quotation, message) for message in messages())
    assert said or any(quotation in text for text in put_together()), f"nothing in the sources says: {quotation}"


def test_beginnings_of_what_is_put_together_are_in_the_sources() -> None:
    for text in ("nobody can go on: ", "nothing has moved here for 60 s: "):
        assert any(is_part(text, message) for message in messages())


def test_another_text_is_found_out() -> None:
    message = ("has drawn ", None, " of ", None, " batches again, to get to the one that it needs")
    assert is_part("has drawn 300 of 1200 batches again", message) and is_part("of 1200 batches", message)
    for text in ("has drawn 300 of 1200 batches anew", "has drawn all of 1200 batches again", "drawn 300 from 1200"):
        assert not is_part(text, message)
    assert not any(is_part("was given other data than its predecessor had", one) for one in messages())
    assert len(quotations()) > 30


def test_what_shows_a_row_is_there() -> None:
    named = [cells[1] for head, cells in rows(PAGE) if head == ["row", "test"]]
    assert len(named) >= 8
    for text in named:
        directory = ROOT
        for one in re.findall(r"`([^`]+)`", text):
            # Without a directory: in that of the one before.
            path = directory / one if "/" not in one else ROOT / one
            if one == "idioms.py":
                path = ROOT / "tests" / "strangers" / one
            assert path.exists(), f"{one} in: {text}"
            directory = path.parent
    scripts = re.findall(r"\]\(\.\./(tests/[^)]+)\)", PAGE.read_text())
    assert len(scripts) > 3 and all((ROOT / one).exists() for one in scripts)
