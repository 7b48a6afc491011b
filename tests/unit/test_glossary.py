"""The glossary holds: its words are those that the docs use, and words of which it gets rid do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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
CODE = ("swift_agent", "recovery", "rendezvous", "logging_store")
PAGES = sorted([
    ROOT / "README.md", ROOT / "deploy" / "README.md", *(ROOT / "docs").rglob("*.md"),
    *(page for room in CODE for page in (ROOT / room).rglob("README.md")),
])  # fmt: skip
MODULES = sorted(path for room in CODE for path in (ROOT / room).rglob("*.py"))
NATIVE = sorted(path for ending in ("cpp", "h") for path in (ROOT / "swift_agent" / "native").glob(f"*.{ending}"))
# Texts that still have one of these words, by module: none may be added, and one that is mended is taken out.
TEXTS = {
    "recovery/swift_recovery/planning/reports.py": 2,  # the name of a field, kept for agents of both versions
}


def prose(path: Path) -> str:
    """Without what is code, or quotes a line of the log."""
    return plain(re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))


def plain(text: str) -> str:
    return re.sub(r"`[^`]*`", "", text)


def comments(source: str) -> Iterator[str]:
    """And docstrings of a module, without code and without names of fields (*unwinds*)."""
    nodes = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [token.string for token in tokens if token.type == tokenize.COMMENT]
    yield from (re.sub(r"\*\w+\*", "", plain(text)) for text in found)


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
    for path in MODULES:
        found[str(path.relative_to(ROOT))] += sum(bool(UNWANTED.search(text)) for text in texts(path))
    assert +found == Counter(TEXTS)


def test_comments_and_docstrings_are_plain() -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in MODULES
        if (words := [word for text in comments(path.read_text()) for word in UNWANTED.findall(text)])
    }
    assert not found, f"say instead: {PLAIN}"


@pytest.mark.parametrize("path", NATIVE, ids=[path.name for path in NATIVE])
def test_a_native_source_is_plain(path: Path) -> None:
    assert not UNWANTED.findall(path.read_text())


def test_an_unwanted_word_of_a_comment_or_docstring_is_found_out() -> None:
    source = '"""It begins anew, *unwinds* and `whoever`."""\nunwinds = "ghost"  # for whoever asks\n'
    assert [word for text in comments(source) for word in UNWANTED.findall(text)] == ["anew", "whoever"]


def test_an_unwanted_word_is_found_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A `newcomer` begins.\n\n```\nanew\n```\n\nIt begins Anew.\n")
    assert UNWANTED.findall(prose(page)) == ["Anew"]
