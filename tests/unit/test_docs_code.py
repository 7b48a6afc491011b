"""Code in the docs compiles, lines and bullets are short, and the rules quote what the sources say.

All by glob: a new page is held to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_recovery.state import deviation
from swift_recovery.state.deviation import Fingerprint
from tests.support.job import ROOT
from tests.support.pages import FENCE, fenced
from tests.support.texts import Message, messages

DOCS = ROOT / "docs"
# README.md and all of docs, models/ included.
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SHORT_PAGES = sorted(DOCS.rglob("*.md"))
# Of the rooms, and of rooms in rooms.
READMES = sorted(
    page
    for top in ROOT.glob("[!.]*")
    if top.is_dir() and top not in (DOCS, ROOT / "shared")
    for page in top.rglob("README.md")
    if not any(part.startswith(".") or part == "node_modules" for part in page.relative_to(ROOT).parts)
)
MAX_LINE = 140
MAX_LINES = 110
# Nobody reads them from the first line to the last: one looks something up in them.
REFERENCES = {
    "docs/api.md": "by the name of a call",
    "docs/cli.md": "by the name of an option",
    "docs/messages.md": "by a line of the output",
    "docs/reproduction.md": "by the number of a table; all of it is computed",
    "docs/rules.md": "by a rule, each with a wrong and a right example",
}
MAX_BULLET_WORDS = 60
BULLET = re.compile(r"( *)(?:[-*+]|\d+[.)]) +(.*)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> Iterator[tuple[int, str]]:
    """Its lines, by number, "" in the place of those of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if not fence and found:
            fence = found[1]
            yield number, ""
        elif fence:
            fence = "" if line.strip() == fence else fence
            yield number, ""
        else:
            yield number, line


def is_row(line: str) -> bool:
    return line.lstrip().startswith("|")


def bullets(text: str) -> Iterator[tuple[int, str]]:
    """The number of its first line, and all of it, without the bullets inside it."""
    begin, indent, words = 0, 0, list[str]()
    for number, line in [*without_code(text), (0, "")]:
        found = BULLET.match(line)
        goes_on = begin and not found and line.strip() and len(line) - len(line.lstrip()) > indent
        if goes_on:
            words.append(line.strip())
            continue
        if begin:
            yield begin, " ".join(words)
        begin = number if found else 0
        if found:
            indent, words = len(found[1]), [found[2]]


def too_long(text: str) -> list[int]:
    """Numbers of lines."""
    return [number for number, line in without_code(text) if len(line) > MAX_LINE and not is_row(line)]


def wordy(text: str) -> list[int]:
    """Numbers of the first lines of bullets."""
    return [number for number, words in bullets(text) if len(words.split()) > MAX_BULLET_WORDS]


PYTHON = [
    pytest.param(code, id=f"{name_of(page)}:{begin}")
    for page in PAGES
    for begin, language, code in fenced(page.read_text())
    if language in ("python", "py")
]


@pytest.mark.parametrize("code", PYTHON)
def test_code_compiles(code: str) -> None:
    lines = code.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    ast.parse("\n".join(line[indent:] for line in lines))


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_lines_and_bullets_are_short(page: Path) -> None:
    text = page.read_text()
    assert not too_long(text), f"lines of more than {MAX_LINE} characters: {too_long(text)}"
    assert not wordy(text), f"bullets of more than {MAX_BULLET_WORDS} words, by their first line: {wordy(text)}"


@pytest.mark.parametrize("page", SHORT_PAGES, ids=name_of)
def test_a_page_is_two_screens(page: Path) -> None:
    num_lines = len(page.read_text().splitlines())
    if name_of(page) in REFERENCES:
        assert num_lines > MAX_LINES, "it is short enough now: take it out of REFERENCES"
    else:
        assert num_lines <= MAX_LINES


def test_what_is_too_long_is_found() -> None:
    long, words = "x" * 141, "a " * 61
    table_and_code = f"| {long} |\n\n```python\n{long}\n- {words}\n```\n"
    assert not too_long(table_and_code) and not wordy(table_and_code)
    assert too_long(f"{table_and_code}{long}\n") == [7]
    halves = f"- {'a ' * 31}\n  {'a ' * 30}\n"
    assert wordy(halves) == [1] and wordy(f"text\n\n1. {words}\n") == [3]
    assert not wordy(f"- {'a ' * 60}\n- {'a ' * 60}\n\n{words}\n")
    assert wordy(f"- few\n  - {words}\n") == [2]
    assert [page for page in SHORT_PAGES if page.name == "rules.md"] and len(PYTHON) > 10


# ---- what the rules quote ----


def quoted() -> list[str]:
    """The messages that pages give as blocks of text, each in one line. The ends of jobs are several lines."""
    return [
        " ".join(code.split())
        for name in ("rules.md", "data.md", "comparisons.md")
        for _, language, code in fenced((DOCS / name).read_text())
        if language == "text"
    ]


def is_said(text: str, message: Message) -> bool:
    """Whether *text* is that message, most of which is not put in."""
    fixed = sum(map(len, filter(None, message)))
    pattern = "".join(".*" if piece is None else re.escape(piece) for piece in message)
    return fixed > 0.6 * len(text) and re.fullmatch(pattern, text) is not None


def put_together() -> list[str]:
    held = [
        Fingerprint({"hyper": {"lr of optimizer": rate}}, {"hyper lr of optimizer": rate}, frozenset(), began_in=began)
        for rate, began in (("0.0034", 1), ("0.1", 2))
    ]
    lr = dict(enumerate(held))
    weights = {rank: Fingerprint({"parameter": {"model.weight": str(rank)}}) for rank in (0, 1)}

    def told(prints: dict[int, Fingerprint], iteration: int, *, undisturbed: bool) -> str:
        wrong, _ = deviation.compare(prints, undisturbed=undisturbed)
        return deviation.sentence(
            prints, wrong, iteration=iteration, equal_after=None, undisturbed=undisturbed, generation=2
        )

    return [
        told(lr, 29, undisturbed=False),
        told(weights, 1, undisturbed=True),
        f"{deviation.OF_EACH_RANK}",
    ]


@pytest.mark.parametrize("text", quoted())
def test_messages_that_pages_quote_are_those_of_the_sources(text: str) -> None:
    assert text in put_together() or any(is_said(text, message) for message in messages())


def test_another_message_is_found_out() -> None:
    assert len(quoted()) >= 7
    for text in quoted():
        other = text.replace("replacement", "substitute").replace("optimizer", "updater").replace("workers", "ranks")
        assert other != text or "replicas" in text
        if other != text:
            assert other not in put_together() and not any(is_said(other, one) for one in messages()), other


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchor_of(heading: str) -> str:
    """As the usual viewers make it of a heading."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    lines = [line for _, line in without_code(page.read_text())]
    return {anchor_of(line.lstrip("#")) for line in lines if line.startswith("#")}


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for _, line in without_code(page.read_text()):
        for path, anchor in LINK.findall(line):
            if "://" in path:
                continue
            target = page.parent / path if path else page
            is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
            if not is_there:
                wrong.append(f"{path}#{anchor}" if anchor else path)
    assert not wrong
