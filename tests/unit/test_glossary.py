"""The glossary holds: its words are those that the docs use, and words of which it gets rid do not come back."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_WORDS = 16
MAX_SENTENCES = 2
# Words that only we understand, and what to say instead.
PLAIN = {
    "newcomer": "replacement, or node that joins",
    "newcomers": "replacements, or nodes that join",
    "anew": "again, from the start",
    "whoever": "the rank that, the process that",
    "ghost": "dry run",
    "ghosts": "dry runs",
    "unwinds": "starts the iteration again",
}
UNWANTED = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
ROOMS = ("", "swift_agent", "deploy")
PAGES = sorted([*(ROOT / room / "README.md" for room in ROOMS), *(ROOT / "docs").rglob("*.md")])
# Texts that still have one of these words, by module: none may be added, and one that is mended is taken out.
TEXTS = {
    "recovery/swift_recovery/planning/reports.py": 2,  # the name of a field, kept for agents of both versions
}


def prose(path: Path) -> str:
    """Without what is code, or quotes a line of the log."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))


def words() -> dict[str, str]:
    """Each word of the glossary, and what it means."""
    first = re.split(r"^## ", GLOSSARY.read_text(), flags=re.MULTILINE)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first.splitlines() if line.startswith("| ")]
    assert rows[0] == ["word", "what it means", "in torch"]
    return {word: meaning for word, meaning, _ in rows[1:]}


def texts(path: Path) -> Iterator[str]:
    """What a module may print: its strings, but for docstrings."""
    tree = ast.parse(path.read_text())
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


@pytest.mark.parametrize("word", words())
def test_a_word_of_the_glossary_is_used(word: str) -> None:
    plural = f"{word[:-1]}ies" if word.endswith("y") else f"{word}(s|ted)?"
    used = re.compile(rf"\b({word}|{plural})\b", re.IGNORECASE)
    assert any(used.search(prose(page)) for page in PAGES if page != GLOSSARY), f"no page says {word}: take it out"


def test_the_glossary_is_short() -> None:
    found = words()
    assert list(found) == sorted(found) and len(found) <= MAX_WORDS
    for word, meaning in found.items():
        sentences = re.findall(r"[.:](?:\s|$)", re.sub(r"`[^`]*`", "", meaning).replace(":", ""))
        assert 1 <= len(sentences) <= MAX_SENTENCES, word


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_is_plain(page: Path) -> None:
    found = {one.lower(): PLAIN[one.lower()] for one in UNWANTED.findall(prose(page))}
    assert not found, f"say instead: {found}"


def test_no_text_of_the_sources_gets_less_plain() -> None:
    found: Counter[str] = Counter()
    for name in ("swift_agent", "recovery", "rendezvous", "logging_store"):
        for path in (ROOT / name).rglob("*.py"):
            found[str(path.relative_to(ROOT))] += sum(bool(UNWANTED.search(text)) for text in texts(path))
    assert +found == Counter(TEXTS)


def test_an_unwanted_word_is_found_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A `newcomer` begins.\n\n```\nanew\n```\n\nIt begins Anew.\n")
    assert UNWANTED.findall(prose(page)) == ["Anew"]
