"""The shell commands of the pages: of fenced blocks, and of inline code that begins with a program and has arguments.

A test that runs what a page says takes its text from here, with `command` or `blocks`, and puts in what has to differ
with `put_in`: unit/test_docs_commands.py finds these calls, and fails for a command that no test takes.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.job import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
SHELLS = ("sh", "bash", "shell", "console")
# What begins with one of them is a command, or with a script: *.sh.
PROGRAMS = (
    "aws", "curl", "docker", "etcdctl", "hdfs", "helm", "journalctl", "kill", "kubectl", "make", "openssl", "pip",
    "podman", "promtool", "python", "python3", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "swift-run",
    "swiftctl", "systemctl", "torchrun",
)  # fmt: skip
# Messages that a page quotes.
NO_COMMANDS = (
    "make a copy of it", "sinfo has named no node", "sinfo has not ended within 20 s", "swift-run cannot start",
)  # fmt: skip
FENCE = re.compile(r" *(```+|~~~+)\s*(\w*)")
_OPERATORS = set("();<>|&")


@dataclass(frozen=True)
class Command:
    """*text*: in one line, without prompt and comment."""

    page: str
    line: int
    text: str
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def words(text: str) -> list[str]:
    """Operators of the shell (`|`, `&&`, `<(`) are words, too."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def calls(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of each call of *program* in a command, also behind another one (`srun swift-run ...`)."""
    found: list[str] | None = None
    for word in [*words(text), ";"]:
        if set(word) <= _OPERATORS:
            if found is not None:
                yield found
            found = None
        elif found is not None:
            found.append(word)
        elif word.rpartition("/")[2] == program:
            found = []


def put_in(text: str, values: dict[str, str]) -> str:
    """*text*, with other words in the place of these. After an option (`--nodes`): in the place of its value; so the
    options stay those of the page.

    Each has to be there.
    """
    for old, new in values.items():
        word = re.escape(old)
        place = rf"(?<=(?<!\S){word}[ =])\S+" if old.startswith("-") else rf"(?<![\w-]){word}(?![\w-])"
        assert re.search(place, text), f"{old} is not in the command of the page: {text}"
        text = re.sub(place, new.replace("\\\\", r"\\\\"), text)
    return text


def command(page: str, beginning: str) -> str:
    """The one of *page* (`docs/slurm.md`) that is *beginning*, or else the only one that begins so."""
    texts = {one.text for one in commands_of(page)}
    found = {text for text in texts if text == beginning} or {text for text in texts if text.startswith(beginning)}
    assert len(found) == 1, f"{page} has {len(found)} commands that begin with: {beginning}"
    return found.pop()


def blocks(page: str, section: str, but: str = "") -> list[str]:
    """The blocks of shell lines below that heading; "": of the whole page. *but*: without the one that begins so."""
    lines = (ROOT / page).read_text().splitlines()
    begin = lines.index(f"## {section}") + 1 if section else 0
    headings = [number for number, line in enumerate(lines) if line.startswith("## ") and number > begin]
    end = headings[0] if section and headings else len(lines)
    found = [code for first, _, code in _shell_blocks(page) if begin < first <= end]
    kept = [code for code in found if not but or not code.startswith(but)]
    assert kept and len(found) - len(kept) == bool(but), f"{page}, {section}: no block, or none that begins with: {but}"
    return [code + "\n" for code in kept]


def all_commands() -> list[Command]:
    return [one for page in PAGES for one in commands_of(str(page.relative_to(ROOT)))]


@functools.cache
def commands_of(page: str) -> tuple[Command, ...]:
    found = [one for first, prompt, code in _shell_blocks(page) for one in _lines(page, first, prompt, code)]
    return (*found, *_inline(page))


def _shell_blocks(page: str) -> Iterator[tuple[int, bool, str]]:
    """The number of the first line; whether commands are the lines behind a prompt, the others being output; the
    code."""
    for first, language, code in fenced((ROOT / page).read_text()):
        prompt = any(line.startswith("$ ") for line in code.splitlines())
        if language in SHELLS or (not language and (prompt or _begins_with_a_program(code))):
            yield first, prompt, code


def fenced(text: str) -> Iterator[tuple[int, str, str]]:
    """Blocks of code: the number of the first line, the language, the code."""
    fence, begin, language, code = "", 0, "", list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not fence:
            if found := FENCE.match(line):
                fence, language, begin, code = found[1], found[2], number + 1, []
        elif line.strip() == fence:
            yield begin, language, "\n".join(code)
            fence = ""
        else:
            code.append(line)
    assert not fence, f"a block of code that begins in line {begin} does not end"


def _lines(page: str, first: int, prompt: bool, code: str) -> Iterator[Command]:
    begin, text = 0, ""
    for number, line in enumerate(code.splitlines(), first):
        if prompt and not text:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        begin = begin if text else number
        # Of a comment shlex would take a quote for the begin of a word.
        text += re.sub(r"(^|\s)#\s.*$", "", line).strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text:
            yield Command(page, begin, text)
        text = ""


def _inline(page: str) -> Iterator[Command]:
    fence, paragraph, begin = "", "", 1
    for number, line in enumerate([*(ROOT / page).read_text().splitlines(), ""], 1):
        found = FENCE.match(line)
        is_code = bool(fence or found)
        if is_code:
            fence = (found[1] if found and not fence else fence) if line.strip() != fence else ""
        if line.strip() and not is_code:
            begin = begin if paragraph else number
            paragraph += line + "\n"
            continue
        for span in re.finditer(r"`([^`]+)`", paragraph):
            text = " ".join(span[1].replace("\\|", "|").split())
            if _begins_with_a_program(text) and " " in text and not text.startswith(NO_COMMANDS):
                yield Command(page, begin + paragraph.count("\n", 0, span.start()), text, inline=True)
        paragraph = ""


def _begins_with_a_program(text: str) -> bool:
    first = Path((text.split() or [""])[0]).name
    return first in PROGRAMS or first.endswith(".sh")
