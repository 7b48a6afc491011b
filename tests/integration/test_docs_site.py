"""`make docs`: the pages as a site. Nothing in it leads nowhere, nothing is fetched from elsewhere, and it is searched.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.job import ROOT

for needed in ("mkdocs", "material", "mkdocstrings", "mdx_truly_sane_lists"):
    pytest.importorskip(needed, reason="needs the extra docs: pip install 'swift-agent[docs]'")

PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))


def build(out: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = root / "scripts" / "docs_site.py"
    return subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stdout + done.stderr
    yield out / "html"


class Fetched(HTMLParser):
    """What a browser fetches to show the page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        name = "href" if tag == "link" else "src" if tag in ("script", "img", "iframe", "source") else ""
        if name and (value := given.get(name)):
            self.found.append(value)


def test_every_page_is_in_the_menu_and_in_the_site(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert len(PAGES) > 40 and not [str(page) for page in PAGES if f"- {page}\n" not in menu]
    assert not [str(page) for page in PAGES if not (site / page.with_suffix(".html")).is_file()]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    fetched = {one for page in pages for one in Fetched(page).found}
    assert len(pages) > 60 and any("assets/javascripts" in one for one in fetched)
    assert not {one for one in fetched if "//" in one and not one.startswith("data:")}
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?://|@import", style.read_text()), style


def test_it_is_searched(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in entries)
    for word in ("SWIFT_ETCD_ENDPOINTS", "consensus iteration", "ReplicaMismatch", "TimeoutStopSec", "overlap_update"):
        assert word in text, word


def test_the_reference_is_that_of_the_docstrings(site: Path) -> None:
    page = (site / "docs" / "docstrings.html").read_text()
    for name in ("init.init", "Job.track", "Job.iteration", "Job.checkpoint", "JobPosition"):
        assert f"{name}\"" in page, name
    assert "swift_agent.errors.UsageError" in page and "_begin" not in page


def test_lists_and_tables_are_such(site: Path) -> None:
    """What a code host and the site would show differently: what stands inside a bullet."""
    page = (site / "docs" / "design-notes.html").read_text()
    assert re.search(r"<li>(?:(?!</li>).)*<table>", page, re.DOTALL), "a table in a bullet"
    assert not [page for page in site.rglob("*.html") if re.search(r"<p>\|[^<]*\|</p>|<p>- ", page.read_text())]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[a](etcd.md#a-pause)", ""),
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](etcd.md#no-such-heading)", "no-such-heading"),
        ("::: swift_agent.nobody", "nobody"),
    ],
    ids=["all is well", "page", "heading", "docstring"],
)
def test_what_leads_nowhere_is_an_error(line: str, told: str, tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "site", "build")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=left_out)
    page = tmp_path / "copy" / "docs" / "glossary.md"
    page.write_text(f"{page.read_text()}\n{line}\n")
    done = build(tmp_path / "out", tmp_path / "copy")
    assert (done.returncode == 0) is (not told), done.stdout + done.stderr
    assert told in done.stdout + done.stderr, done.stdout + done.stderr
