"""Build the documentation as a site: `python scripts/docs_site.py DIR`, or `make docs`.

The pages link to each other and to files of the repository by relative paths, as they have to on a code host. So what
they link to is laid out in DIR/pages as it lies in the repository, and mkdocs makes DIR/html of that, in strict mode: a
link that leads nowhere, or a page that is in no menu (mkdocs.yml), is an error. It never writes elsewhere, and the site
needs no network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]+)?\))")
FENCE = re.compile(r" *(```|~~~)")


def first_pages() -> list[Path]:
    """From which all others are found."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def linked(page: Path) -> list[Path]:
    """What a page links to in this repository, outside of blocks of code."""
    found, fence = [], False
    for line in page.read_text().splitlines():
        if FENCE.match(line):
            fence = not fence
        elif not fence:
            found += [page.parent / path for _, path, _ in LINK.findall(line) if "://" not in path]
    return [path.resolve() for path in found]


def pages_and_files() -> set[Path]:
    """All that is reached from the first pages; of a directory, its README."""
    todo, found = first_pages(), set[Path]()
    while todo:
        path = todo.pop()
        if path.is_dir():
            path = path / "README.md"
        if path in found or not path.is_file() or ROOT not in path.parents:
            continue
        found.add(path)
        if path.suffix == ".md":
            todo += linked(path)
    return found


def in_site(page: Path) -> str:
    """Its text, where links to directories lead to what a site can show: their README, or nothing."""

    def instead(link: re.Match[str]) -> str:
        target = page.parent / link[2]
        if "://" in link[2] or not target.is_dir():
            return link[0]
        return f"{link[1]}{link[2].rstrip('/')}/README.md{link[3]}" if (target / "README.md").exists() else "]()"

    text = LINK.sub(instead, page.read_text())
    return re.sub(r"\[([^]]*)\]\(\)", r"\1", text)


def lay_out(target: Path) -> None:
    for path in pages_and_files():
        to = target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            to.write_text(in_site(path))
        else:
            shutil.copyfile(path, to)


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} DIR", file=sys.stderr)
        return 2
    out = Path(sys.argv[1]).resolve()
    shutil.rmtree(out / "pages", ignore_errors=True)
    lay_out(out / "pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    where = {"SWIFT_DOCS_PAGES": str(out / "pages"), "SWIFT_DOCS_SITE": str(out / "html")}
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **where}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code == 0:
        print(out / "html" / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
