"""docs/reproduction.md shows what `make tables` prints."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.job import ROOT, SOURCE_ROOTS


def test_the_page_shows_what_is_computed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert printed.startswith("## Table 3") and page.endswith(printed.rstrip() + "\n")
