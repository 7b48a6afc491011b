"""The page of `swiftctl timeline` in a headless Chromium: nothing on its console, nothing loaded, light and dark, wide
and narrow, by keys alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from swift_agent.ctl.timeline.assemble import assemble
from swift_agent.ctl.timeline.page import page
from tests.support.browser import Browser, chromium
from tests.support.timelines import T, known

NO_BROWSER = "no Chromium: scripts/fetch_chromium.sh .cache/chromium (or make chromium, or SWIFT_CHROMIUM=PATH)"
EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"

pytestmark = pytest.mark.skipif(chromium() is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(page(assemble(known()), written_s=T + 400, version="1"), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_it_looks_as_it_should(browser: Browser, shown: Path, tmp_path: Path, width: int, is_dark: bool) -> None:
    browser.said.clear()
    browser.requests.clear()
    browser.show(shown, width, is_dark=is_dark)
    assert browser.said == [] and browser.requests == [shown.as_uri()]
    assert browser.value("document.documentElement.scrollWidth") == width, "the page is wider than its window"
    # Each text of a picture is as large as that of the page, whatever the window.
    sizes = browser.value(
        "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height).filter(h => h > 0)"
    )
    assert len(sizes) > 20 and min(sizes) >= 11, min(sizes)
    widths = browser.value("[...document.querySelectorAll('svg.wide, svg.narrow')].map(s => s.clientWidth)")
    assert len(widths) == 6 and sum(one > 0 for one in widths) == 3, "of each picture the one for that width"
    picture = tmp_path / "page.png"
    browser.screenshot(picture)
    with Image.open(picture) as image:
        assert image.width == width and image.height > 1000
        brightness = ImageStat.Stat(image.convert("L")).mean[0]
        assert brightness < 70 if is_dark else brightness > 200, brightness
        colours = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 22) or []}
    assert ((91, 155, 224) if is_dark else (47, 111, 179)) in colours, "nobody trains in the picture"


def test_by_keys_alone(browser: Browser, shown: Path) -> None:
    browser.show(shown, 1280)
    focus = "document.activeElement.id || document.activeElement.getAttribute('href')"
    browser.press("Tab")
    assert browser.value(focus) == "#incidents", "the way past the picture comes first"
    browser.press("Tab")
    assert browser.value(focus) == "#incident-2", "then the first incident in the picture"
    for key, there in (("ArrowRight", "incident-2"), ("ArrowRight", "incident-3"), ("ArrowRight", "incident-3"),
                       ("ArrowLeft", "incident-2")):  # fmt: skip
        if (key, there) == ("ArrowRight", "incident-2"):
            browser.value("document.activeElement.blur()")
        browser.press(key)
        assert browser.value(focus) == there
    seen = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.value(seen) != "none", "the focus cannot be seen"
    assert browser.value("document.activeElement.getBoundingClientRect().top") < 100, "it is not in the window"


def test_names_that_are_markup_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    harmful = assemble(known((EVIL, EVIL + "b", EVIL + "c"), job=EVIL, why=EVIL, notes=(EVIL,), state="failed"))
    path.write_text(page(harmful, written_s=T, version="1"), encoding="utf-8")
    browser.said.clear()
    browser.requests.clear()
    browser.show(path, 1280)
    assert browser.value("document.title") == f"Timeline of job {EVIL}"
    assert browser.said == [] and browser.requests == [path.as_uri()]
    assert browser.value("document.scripts.length") == 1 and browser.value("document.images.length") == 0


def test_this_browser_would_tell(browser: Browser, tmp_path: Path) -> None:
    """The tests above can fail: what they look for is told where it is."""
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('one'); nothing.here</script><img src='missing.png'>")
    browser.said.clear()
    browser.requests.clear()
    browser.show(path, 400)
    told = "\n".join(browser.said)
    assert "console.error" in told and "uncaught" in told and "missing.png" in "\n".join(browser.requests), told
