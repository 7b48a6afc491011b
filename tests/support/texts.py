"""The texts of the sources, and whether what a page quotes is one of them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.job import ROOT

# In a quotation: what stands for something else in each case.
FIELDS = re.compile(r"\d+ (?:nodes? (?:is|are)|parts?)|\d[\d.]*|\b[A-Z]{3,}\d?\b|\w+ \(\w+, \w+\.py:\d+\)|rank 0's")
_FORMATS = re.compile(r"%(?:\.\d)?[dfgrsx]\b")

Message = tuple[str | None, ...]
"""Pieces of a text; None: something is put in there."""


@dataclass(frozen=True)
class Text:
    path: str
    """Of the module, below the root of the project."""
    line: int
    message: Message
    calls: tuple[str, ...]
    """What it is an argument of, the outermost call first: `log.debug`, for one."""


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


@functools.cache
def texts() -> list[Text]:
    """All of the sources, but for their docstrings."""
    found: list[Text] = []
    for name in ("swift_agent", "recovery", "rendezvous", "logging_store"):
        for path in sorted((ROOT / name).rglob("*.py")):
            found += _texts_of(ast.parse(path.read_text()), str(path.relative_to(ROOT)), ())
    return found


@functools.cache
def messages() -> list[Message]:
    return list(dict.fromkeys(text.message for text in texts()))


def _texts_of(node: ast.AST, path: str, calls: tuple[str, ...]) -> Iterator[Text]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield Text(path, node.lineno, _pieces(node.value), calls)
        return
    inside = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.JoinedStr):
        pieces: Message = ()
        for value in node.values:
            pieces += _pieces(str(value.value)) if isinstance(value, ast.Constant) else (None,)
        yield Text(path, node.lineno, pieces, calls)
        inside = [value for value in node.values if not isinstance(value, ast.Constant)]
    if isinstance(node, ast.Call):
        calls = (*calls, ast.unparse(node.func))
    for one in inside:
        yield from _texts_of(one, path, calls)


def _pieces(text: str) -> Message:
    """With None for each `%s`."""
    first, *others = _FORMATS.split(text)
    return (first, *(piece for other in others for piece in (None, other)))


def is_part(text: str, message: Message) -> bool:
    """Whether *text* is a part of *message*, in which only `FIELDS` of it are put in."""
    free = _free(text)
    for begin, piece in enumerate(message):
        if piece is not None and text in piece:
            return True
        # So much of the text comes before the next piece.
        ends = {0} if piece is None else _ends(text, piece)
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


def _ends(text: str, piece: str) -> set[int]:
    """How much of the begin of *text* may be the end of *piece*."""
    last = piece[-1:]
    longest = min(len(text), len(piece))
    return {end for end in range(1, longest + 1) if text[end - 1] == last and piece.endswith(text[:end])}


@functools.cache
def _free(text: str) -> frozenset[int]:
    return frozenset(at for field in FIELDS.finditer(text) for at in range(*field.span()))
