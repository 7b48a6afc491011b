"""The layout: a README at the door of each room that names what is inside; no room or module too large to look over."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.job import ROOT

ROOTS = [ROOT / path for path in (
    "swift_agent", "recovery/swift_recovery", "logging_store/swift_logging_store", "rendezvous/swift_rendezvous",
)]  # fmt: skip
# Their README lies beside the package.
DOORS = {root: root.parent / "README.md" if root.name != "swift_agent" else root / "README.md" for root in ROOTS}
ROOMS = [path.parent for root in ROOTS for path in sorted(root.rglob("__init__.py"))]
MAX_MODULES = 13
MAX_LINES = 400


def modules_of(room: Path) -> list[Path]:
    return [path for path in sorted(room.glob("*.py")) if not path.name.startswith("__")]


@pytest.mark.parametrize("room", ROOMS, ids=[str(room.relative_to(ROOT)) for room in ROOMS])
def test_a_room_says_what_is_inside(room: Path) -> None:
    text = DOORS.get(room, room / "README.md").read_text()
    names = [path.stem for path in modules_of(room)]
    names += [path.parent.name for path in room.glob("*/__init__.py")]
    missing = [name for name in names if f"`{name}`" not in text and f"`{name}/`" not in text]
    if room in DOORS:  # the rooms inside may be named by their modules
        missing = [name for name in missing if f"`{name}/" not in text]
    assert not missing, f"{DOORS.get(room, room / 'README.md').relative_to(ROOT)} does not name {missing}"
    assert len(modules_of(room)) <= MAX_MODULES


def test_no_module_is_large() -> None:
    modules = [path for room in ROOMS for path in room.glob("*.py")]
    found = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    large = {path: lines for path, lines in found.items() if lines > MAX_LINES}
    assert not large, f"larger than they may be: {large}"


def says_never(source: str) -> bool:
    says = ast.get_docstring(ast.parse(source)) or ""
    return re.search(r"\bnever\b", says, re.IGNORECASE) is not None


def test_a_module_says_what_it_must_never_do() -> None:
    """In its docstring, beside what it is for. What a package is for is said at its door."""
    modules = [path for room in ROOMS for path in room.glob("*.py") if path.name != "__init__.py"]
    silent = [str(path.relative_to(ROOT)) for path in modules if not says_never(path.read_text())]
    assert len(modules) > 200 and not silent
    assert not says_never('"""Adds."""\n\ndef add() -> None:\n    """Never."""') and not says_never("never = 1")


def test_a_worker_reads_once_what_its_agent_has_told_it() -> None:
    """In `init`, into a `WorkerEnvironment`; what needs it gets it from there."""
    ours = re.compile(r"\bENV_\w+|environ.*SWIFT_")
    found = {path.name: set(ours.findall(path.read_text())) for path in (ROOT / "swift_agent/worker").rglob("*.py")}
    # Of its docstring: the variable is described there.
    assert {name: names for name, names in found.items() if names} == {
        "init.py": {"ENV_SOCKET"}, "injection.py": {"ENV_INJECTION"},
    }  # fmt: skip
