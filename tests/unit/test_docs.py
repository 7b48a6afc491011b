"""What the docs quote of the product's words is what the sources say, and the tests that they name are there."""

from __future__ import annotations

import re

import pytest

from swift_agent.worker.checks import standstill
from swift_agent.worker.checks.standstill import Doing, Inside, Standing
from swift_recovery.state import deviation
from swift_recovery.state.deviation import Fingerprint
from tests.support.job import ROOT
from tests.support.texts import is_part, messages, rows

PAGE = ROOT / "docs" / "will-my-script-be-recovered.md"
IDIOMS = sorted((ROOT / "docs" / "idioms").glob("*.md"))
# Tables that quote, by what is over the column.
COLUMNS = {
    "what you see": IDIOMS,
    "you see": sorted((ROOT / "docs" / "models").glob("*.md")),
    "an operator sees": [ROOT / "docs" / "etcd.md"],
}
# Of somebody else (etcd, Python), or the name of a call.
FOREIGN = (
    "torch.load", "UnboundLocalError", "no space left on device",
    "etcd refused Txn: mvcc: database space exceeded",
)  # fmt: skip


def quotations() -> list[str]:
    found = {}
    for column, pages in COLUMNS.items():
        for head, cells in (row for page in pages for row in rows(page)):
            if column in head:
                quoted = re.findall(r"`([^`]+)`", cells[head.index(column)])
                found |= dict.fromkeys(part.strip(" :();") for one in quoted for part in one.split("..."))
    return [one for one in found if one and one not in FOREIGN]


def put_together() -> list[str]:
    """What comes out of parts in several places of the sources."""

    def at(inside: Inside, doing: Doing, iterations: int) -> Standing:
        return Standing(iterations, 0, inside, doing, "train.py:3", 60.0)

    def held(rate: str) -> Fingerprint:
        return Fingerprint({"hyper": {"lr of optimizer": rate}}, {"hyper lr of optimizer": rate}, frozenset())

    prints = {0: held("0.0034"), 1: held("0.1")}
    wrong, _ = deviation.compare(prints, undisturbed=False)
    return [
        "nobody can go on: " + standstill.describe({0: at("end", "waits", 10), 1: at("iteration", "waits", 10)}, 2),
        "nobody can go on: " + standstill.describe({0: at("section", "waits", 1), 1: at("", "works", 1)}, 2),
        "nothing has moved here for 60 s: " + standstill.describe({0: at("", "works", 1)}, 1),
        deviation.sentence(prints, wrong, iteration=29, equal_after=None, undisturbed=False, generation=2),
    ]


@pytest.mark.parametrize("quotation", quotations())
def test_what_is_quoted_is_said(quotation: str) -> None:
    said = any(is_part(quotation, message) for message in messages())
    assert said or any(quotation in text for text in put_together()), f"nothing in the sources says: {quotation}"


def test_beginnings_of_what_is_put_together_are_in_the_sources() -> None:
    for text in ("nobody can go on: ", "nothing has moved here for 60 s: "):
        assert any(is_part(text, message) for message in messages())


def test_another_text_is_found_out() -> None:
    message = ("has drawn ", None, " of ", None, " batches again, to get to the one that it needs")
    assert is_part("has drawn 300 of 1200 batches again", message) and is_part("of 1200 batches", message)
    for text in ("has drawn 300 of 1200 batches anew", "has drawn all of 1200 batches again", "drawn 300 from 1200"):
        assert not is_part(text, message)
    assert not any(is_part("was given other data than its predecessor had", one) for one in messages())
    assert len(quotations()) > 80


def test_what_shows_a_row_is_there() -> None:
    named = [cells[1] for head, cells in rows(PAGE) if head == ["row", "test"]]
    assert len(named) >= 8
    for text in named:
        directory = ROOT
        for one in re.findall(r"`([^`]+)`", text):
            # Without a directory: in that of the one before.
            path = directory / one if "/" not in one else ROOT / one
            if one == "idioms.py":
                path = ROOT / "tests" / "strangers" / one
            assert path.exists(), f"{one} in: {text}"
            directory = path.parent
    scripts = [one for page in IDIOMS for one in re.findall(r"\]\(\.\./\.\./(tests/[^)]+)\)", page.read_text())]
    assert len(scripts) > 3 and all((ROOT / one).exists() for one in scripts)
