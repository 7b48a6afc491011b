"""Every shell command of README.md, docs/ and deploy/ is run by a test, or NOT_RUN says why it cannot be.

Who runs a command is read from the tests: they take its text from the page (`tests.support.pages.command`, `blocks`).
Each `swift-run` and `swiftctl` of a page is parsed by these programs themselves, too.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from swift_agent.ctl.main import cli
from swift_agent.launch.checks import ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import build_parser, parse_args
from tests.support.job import ROOT
from tests.support.pages import (
    PROGRAMS,
    Command,
    all_commands,
    blocks,
    calls,
    command,
    commands_of,
    put_in,
    words,
)

TESTS = ROOT / "tests"
# The command, or how it begins, and why no test runs it.
NOT_RUN = {
    "python3 -m venv /opt/swift": "the machines of tests/faults/test_bare_metal.py have this working tree in its place",
    "systemctl edit swift-run@gpt": "it opens an editor",
    "docker ": "needs a daemon; tests/integration/test_image.py builds the image without one, and runs a job in it",
    "systemctl restart swift-run@gpt": "a stop and a start: tests/faults/test_bare_metal.py has both",
    "kubectl drain": "tests/faults/test_kubernetes.py asks for the evictions itself, as it does",
    "pip install 'swift-agent[": "needs an index that has swift-agent; the extras are looked up below",
    "python -m venv": "a part of a command",
}
# What a target runs, and the test that runs the same; None: it is what runs the tests and checks, or only installs.
MAKE: dict[str, tuple[str, str] | None] = {
    "bench": ("benchmarks/recovery.py", "integration/test_commands_of_pages.py"),
    "demo": ("examples/demo.py", "faults/test_demo.py"),
    "docs": ("scripts/docs_site.py", "integration/test_docs_site.py"),
    "experiments": ("benchmarks/experiments.py", "integration/test_commands_of_pages.py"),
    "image": ("scripts/build_image.sh", "integration/test_image.py"),
    "kubernetes": None,
    "lint": None,
    "soak": None,
    "tables": ("benchmarks/tables.py", "unit/recovery/strategy/test_tables.py"),
    "test": None,
    "test-all": None,
    "test-gpu": None,
}
WHAT_TO_DO = (
    "no test runs this command: have one take its text with tests.support.pages.command(PAGE, BEGINNING) and run it, "
    "or say in NOT_RUN why none can"
)


# ---- who runs what ----


def taken_in(path: Path) -> Iterator[tuple[str, str]]:
    """Commands that this test file takes from pages: page and text."""
    tree = ast.parse(path.read_text())
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    thrown_away = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("command", "blocks"):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        given = [*node.args, *(one.value for one in node.keywords)]
        texts = [one.value if isinstance(one, ast.Constant) else names.get(getattr(one, "id", "")) for one in given]
        assert all(isinstance(text, str) for text in texts), f"{where}: name page and command in the call, as texts"
        assert id(node) not in thrown_away, f"{where}: it takes a command, and does not run it"
        if node.func.id == "command":
            yield texts[0], command(*texts)
            continue
        inside = "".join(blocks(*texts))
        for one in commands_of(texts[0]):
            if not one.inline and one.text in re.sub(r" +", " ", inside.replace("\\\n", "")):
                yield one.page, one.text


@functools.cache
def runners() -> dict[tuple[str, str], list[str]]:
    """Page and text -> the test files that run it."""
    found: dict[tuple[str, str], list[str]] = {}
    for folder in ("faults", "integration", "unit"):
        for path in sorted((TESTS / folder).rglob("test_*.py")):
            text = path.read_text()
            if "tests.support.pages import" in text and path != Path(__file__):
                for one in taken_in(path):
                    found.setdefault(one, []).append(str(path.relative_to(TESTS)))
    return found


def why_not_run(text: str) -> str:
    return next((why for beginning, why in NOT_RUN.items() if text.startswith(beginning)), "")


def is_looked_after(one: Command) -> bool:
    if (one.page, one.text) in runners() or why_not_run(one.text):
        return True
    if one.text.startswith("make "):
        return words(one.text)[1] in MAKE
    if not one.inline:
        return False
    # A word in a sentence: of ours it is parsed below; of others it is the name of something that is run.
    if words(one.text)[0] in ("swift-run", "swiftctl"):
        return True
    return any(names(one.text, text) for _, text in runners())


def names(short: str, text: str) -> bool:
    """Whether all words of *short* come in *text*, in this order, the first one first."""
    left = iter(words(text))
    return words(short)[0] == words(text)[0] and all(word in left for word in words(short))


@pytest.mark.parametrize("page", sorted({one.page for one in all_commands()}))
def test_commands_are_run(page: str) -> None:
    left = [str(one) for one in commands_of(page) if not is_looked_after(one)]
    assert not left, f"{WHAT_TO_DO}\n" + "\n".join(left)


def test_what_is_not_run_is_on_a_page_and_not_run() -> None:
    texts = {one.text for one in all_commands()}
    for beginning in NOT_RUN:
        assert any(text.startswith(beginning) for text in texts), f"take it out of NOT_RUN: {beginning}"
    assert not [one for one in runners() if why_not_run(one[1])]


def test_a_new_command_is_found_out() -> None:
    assert len(all_commands()) > 150 and len(runners()) > 60
    for text in ("swift-run --spares 3 train.py", "etcdctl snapshot save x", "make coffee", "sbatch other.sh"):
        assert not is_looked_after(Command("docs/cli.md", 1, text))
    assert not is_looked_after(Command("docs/cli.md", 1, "etcdctl snapshot save", inline=True))
    assert "swift-run" in PROGRAMS and all(why for why in NOT_RUN.values())


# ---- what the programs say ----


def of(program: str) -> list[Command]:
    return [one for one in all_commands() if list(calls(one.text, program))]


FILES = ("train.py", "ca.crt", "client.crt", "client.key", "etcd-password", "job-secret")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of the pages."""
    for name in FILES:
        (tmp_path / name).write_text("a text that is long enough for a secret\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.chdir(tmp_path)
    for name in ("SWIFT_ETCD_ENDPOINTS", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def arguments_of_batch(text: str) -> list[str]:
    """Those of `swift-run` behind the name of something that hands them on."""
    for program, name in (("sbatch", "train.sbatch"), ("docker", "swift-agent")):
        for arguments in calls(text, program):
            if name in arguments[:-1] and arguments[0] != "build":
                return arguments[arguments.index(name) + 1 :]
    return []


def checked(arguments: list[str]) -> argparse.Namespace:
    """Parsed as `swift-run` does; raises `SystemExit` or `ConfigError` for what it would not start with."""
    ns = parse_args(arguments)
    AgentConfig.from_args(ns, {"SWIFT_ETCD_ENDPOINTS": "https://etcd1:2379"})
    return ns


RUNS = [
    (one, arguments)
    for one in all_commands()
    for arguments in [*calls(one.text, "swift-run"), *filter(None, [arguments_of_batch(one.text)])]
]


def test_swift_run_takes_what_pages_have(here: Path) -> None:
    known = {name for action in build_parser(None)._actions for name in action.option_strings}
    for one, arguments in RUNS:
        if one.inline:  # an option, perhaps without its value
            unknown = {word for word in arguments if word.startswith("-")} - known - {"--help"}
            assert not unknown, f"{one}: swift-run has no {unknown}"
            continue
        try:
            ns = checked([word for word in arguments if word != "..."])
        except (SystemExit, ConfigError) as error:
            pytest.fail(f"{one}: swift-run does not take it: {error}")
        assert ns.training_script == "train.py", one


# What has to be there, and numbers.
PLACEHOLDERS = {
    "H": "480", "DIR": "docs", "FILE": "page.svg", "PROFILE": "examples/profiles/vit.json",
    "/var/log/swift/gpt.a.0b58ffa5c60b0c6f.jsonl": "README.md",
}  # fmt: skip


def test_swiftctl_takes_what_pages_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for one in of("swiftctl"):
        for name, *arguments in calls(one.text, "swiftctl"):
            if name == "COMMAND":
                assert arguments == ["--help"]
                continue
            assert name in cli.commands, f"{one}: swiftctl has no such command"
            with click.Context(cli, info_name="swiftctl") as parent:
                found = cli.commands[name]
                if isinstance(found, click.Group):
                    assert arguments[0] in found.commands, one
                    continue
                try:
                    given = [PLACEHOLDERS.get(word, word) for word in arguments]
                    found.make_context(name, given, parent=parent).close()
                except click.MissingParameter:
                    assert one.inline, one
                except click.UsageError as error:
                    pytest.fail(f"{one}: swiftctl does not take it: {error.format_message()}")


USAGES = [
    " ".join(usage.split())
    for cell in re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for usage in re.findall(r"`([a-z][^`]*)`", cell)
]


def test_a_usage_names_a_command_with_its_options() -> None:
    for usage in USAGES:
        name, *others = re.sub(r"[\[\]]", "", usage).split()
        options = {option for one in cli.commands[name].params for option in (*one.opts, *one.secondary_opts)}
        assert {word for word in others if word.startswith("-")} <= options, usage


def test_wrong_options_are_found_out(here: Path) -> None:
    with pytest.raises(SystemExit):
        checked(["--nnode-count", "2", "train.py"])
    with pytest.raises(click.UsageError), click.Context(cli) as parent:
        cli.commands["status"].make_context("status", ["gpt", "--follow"], parent=parent)
    assert len(RUNS) > 20 and len(of("swiftctl")) > 50 and len(USAGES) > 20


# ---- make, pip ----


def test_targets_run_what_tests_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {words(one.text)[1] for one in of("make")}
    for target in targets:
        recipe = makefile.partition(f"\n{target}:")[2].partition("\n\n")[0]
        assert recipe, f"the Makefile has no target {target}"
        if (runs := MAKE[target]) is not None:
            script, test = runs
            assert script in recipe and Path(script).name in (TESTS / test).read_text(), target
    assert targets == set(MAKE)
    # Nothing of the `make test` that runs this.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_command_is_in_an_indented_block() -> None:
    """Where it would not be found."""
    for page in {one.page for one in all_commands()}:
        lines = (ROOT / page).read_text().splitlines()
        for before, line in itertools.pairwise(["", *lines]):
            is_code = line.startswith("    ") and not before.strip()
            assert not is_code or line.split()[0] not in PROGRAMS, f"{page}: put it into a fenced block: {line}"


def test_extras_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for one in of("pip") for name in re.findall(r"swift-agent\[(\w+)\]", one.text)}
    assert len(named) > 3 and named <= set(extras)


def test_other_words_are_put_in_where_they_are() -> None:
    text = "swift-run --nnodes 16 --rdzv-id gpt --signal=USR1 train.py"
    changed = put_in(text, {"--nnodes": "1", "--signal": "USR2", "train.py": "/t.py"})
    assert changed == "swift-run --nnodes 1 --rdzv-id gpt --signal=USR2 /t.py"
    with pytest.raises(AssertionError, match="--spares is not in the command of the page"):
        put_in(text, {"--spares": "1"})
    with pytest.raises(AssertionError, match="0 commands that begin with"):
        command("docs/slurm.md", "srun --nodes")
