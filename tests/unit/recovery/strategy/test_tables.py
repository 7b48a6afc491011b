"""docs/reproduction.md shows what `make tables` prints; --figures draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.job import ROOT, SOURCE_ROOTS


def tables(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_page_shows_what_is_computed(tmp_path: Path) -> None:
    found = tables("--figures", str(tmp_path / "figures"))
    assert found.returncode == 0, found.stderr
    printed = found.stdout
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert printed.startswith("## Table 3") and page.endswith(printed.rstrip() + "\n")
    drawn = sorted((tmp_path / "figures").iterdir())
    assert len(drawn) == 9 and all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert all(f"`{path.name}`" in page for path in drawn), "the page does not name each figure"


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = tables("--figures", str(tmp_path / "file"))
    assert found.returncode == 2 and "--figures" in found.stderr and not found.stdout
