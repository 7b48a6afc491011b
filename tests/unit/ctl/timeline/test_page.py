"""The page: it loads nothing, a name is never more than a name, and what a picture shows is in words, too."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from swift_agent.ctl.timeline import markup
from swift_agent.ctl.timeline.assemble import Known, assemble
from swift_agent.ctl.timeline.figures import nice
from swift_agent.ctl.timeline.markup import Markup, escaped, tag
from swift_agent.ctl.timeline.model import Loss
from swift_agent.ctl.timeline.page import MOST_INCIDENTS, POLICY, page
from swift_agent.ctl.timeline.style import STYLE
from swift_agent.ctl.timeline.text import lines
from tests.support.timelines import T, known

EVIL = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "');alert(1)//{}\u202e\x00&amp;")


class Reader(HTMLParser):
    """Collects elements; void ones are closed. *text*: all that a reader sees."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    def all(self, name: str) -> list[dict[str, Any]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def made(known: Known, **options: Any) -> str:
    return page(assemble(known), written_s=T + 400, version="1.2.3", **options)


def test_it_is_whole_and_says_what_happened() -> None:
    content = made(known(), gpu_hour_cost=36.0)
    reader = Reader(content)
    assert content.startswith("<!doctype html>") and not reader.open
    for said in ("Job gpt", "rank 3 on b lost", "node a lost", "its connection was closed", "slot 0: a \u2192 c",
                 "all trained again after 2.0 s, going on with iteration 182", "1.5 s had been predicted", "97.7 %",
                 "28 rank seconds", "0.28 in money", "state of a replica", "Rank 1 sends its state to rank 3.",
                 "Nothing else.", "swift-agent 1.2.3"):  # fmt: skip
        assert said in reader.text, said
    # What is drawn is in tables.
    assert len(reader.all("table")) == 4
    assert all("aria-label" in svg or svg.get("aria-hidden") for svg in reader.all("svg"))


def test_it_loads_nothing_from_anywhere() -> None:
    content = made(known())
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", re.sub(r"<!doctype html>", "", content)), "a reference"
    reader = Reader(content)
    assert {name for name, _ in reader.elements} & {"link", "img", "iframe", "object", "embed", "base", "form"} == set()
    policies = [one["content"] for one in reader.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [POLICY] and POLICY.startswith("default-src 'none';")
    assert all("src" not in attributes for _, attributes in reader.elements)
    assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)


def test_every_link_leads_somewhere_on_the_page_and_every_incident_can_be_reached_by_keys() -> None:
    reader = Reader(made(known()))
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in reader.all("a")]
    assert {"#incident-2", "#incident-3"} <= set(links) and all(link[1:] in ids for link in links)
    assert [one["tabindex"] for one in reader.all("article")] == ["0", "0"]
    assert {one["aria-labelledby"] for one in reader.all("article")} <= set(ids)


@pytest.mark.parametrize("evil", EVIL)
def test_a_name_is_harmless_wherever_it_comes_from(evil: str) -> None:
    loss = Loss(1, evil, "node", (), evil)
    changes: dict[str, Any] = {"job": evil, "source": evil, "why": evil, "state": evil, "notes": (evil,)}
    harmful = known((evil, evil + "b", evil + "c"), **changes, failing_s=T + 290, failing=(loss,), strategy=(evil,))
    content, plain = made(harmful), made(known(failing_s=T + 290, failing=(replace(loss, node="b"),), strategy=("x",)))
    reader, harmless = Reader(content), Reader(plain)
    assert len(reader.all("script")) == 1 and not reader.all("img")
    assert [name for name, _ in reader.elements].count("article") == 3
    assert {name for name, _ in reader.elements} == {name for name, _ in harmless.elements}
    for _, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on")]
    assert "\x00" not in content and "\u202e" not in content
    if evil.isprintable():
        assert evil in reader.text


def test_a_long_past_is_shown_in_part() -> None:
    whole = known()
    first, worker, _ = whole.chapters
    many = [first]
    for number in range(2, MOST_INCIDENTS + 12):
        at_s = T + 100 + 10 * number
        many.append(replace(worker, number=number, begin_s=at_s, failed_s=at_s, resumed_s=at_s + 1))
    content = made(replace(whole, chapters=tuple(many), end_s=T + 5000))
    reader = Reader(content)
    assert len(reader.all("article")) == MOST_INCIDENTS and f"last {MOST_INCIDENTS}" in reader.text
    ids = {attributes.get("id") for _, attributes in reader.elements}
    assert all(link["href"][1:] in ids for link in reader.all("a"))


def test_nothing_to_show() -> None:
    reader = Reader(made(Known("gpt", "a test", "starting", T)))
    assert "Nothing was lost" in reader.text and "not known" in reader.text
    unknown = Reader(made(known(points=())))
    assert "there are no times of iterations around it" in unknown.text


def test_only_markup_is_markup() -> None:
    assert tag("p", "<b>", Markup("<i>x</i>"), class_="a\"b") == '<p class="a&quot;b">&lt;b&gt;<i>x</i></p>'
    assert tag("rect", x=1.0, y=0.126, data_name=None) == '<rect x="1" y="0.13"/>'
    assert escaped(None) == "" and escaped(3) == "3" and type(escaped("x")) is Markup
    with pytest.raises(AssertionError):
        tag("p onclick")
    assert markup.number(-0.001) in ("0", "-0")


def test_scales() -> None:
    assert [nice(value) for value in (0, 0.9, 1.2, 7, 9, 120)] == [1, 1, 1.5, 8, 10, 150]


def test_the_text_says_the_same() -> None:
    said = "\n".join(lines(assemble(known(state="succeeded")), 36.0))
    for part in ("job gpt: succeeded, generation 3, 4 ranks", "goodput      97.7 %", "generation 3: node a lost",
                 "strategy: state of a replica", "agree 500 ms", "note: Nothing else.", "cost: 8 rank seconds"):
        assert part in said, said
    open_end = "\n".join(lines(assemble(known(failing_s=T + 290, failing=(Loss(1, "b", "node", (), "silent"),)))))
    assert "not over yet, after 10.0 s" in open_end


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_in_both_colour_schemes() -> None:
    """WCAG 2.2: 4.5 for text, 3 for what is not text."""
    schemes = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for ground in ("page", "card"):
            for ink in ("ink", "soft", "bad", "good", "trains"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, colours[ink])
            assert contrast(colours["focus"], colours[ground]) >= 3
        assert contrast(colours["waits-ink"], colours["waits"]) >= 2.5  # what is hatched is told by its shape, too
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
