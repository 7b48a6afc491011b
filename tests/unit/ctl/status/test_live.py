"""The screen: what is on it, and that it fits."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from swift_agent.ctl.status.live import Heard, draw, heard
from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, GenerationRecord, KernelsRecord, RateRecord
from swift_rendezvous.store.kv import KeyValue
from tests.support import records

KEYS = Keys("gpt")


def entries(*more: tuple[str, Any], slots: tuple[str, ...] = ("n0", "n1"), mode: Any = "start") -> list[KeyValue]:
    made: GenerationRecord = replace(records.generation(2 if mode != "start" else 1, mode, slots), why="[red]why")
    told = [
        (KEYS.job, records.view().job), (KEYS.generation, made),
        *((KEYS.node(name), records.node(name)) for name in (*slots, "n9")),
        (KEYS.event(1), EventRecord(1, "generation (start)", "all here", 1000.0)),
        (KEYS.pace(1), RateRecord(41, 2.0, 1, 1020.0, {i: 1000.0 + i / 2 for i in range(41)})),
        (KEYS.rate, RateRecord(41, 2.0, 1, 1020.0)), *more,
    ]  # fmt: skip
    return [KeyValue(key, encode(record), index, index) for index, (key, record) in enumerate(told, 1)]


def shown(what: Heard, width: int = 120, height: int = 30, now_s: float = 60.0, **options: Any) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(draw(what, width, height, now_s, 1021.0, **options))
    return out.getvalue().splitlines()


def test_a_job_that_trains() -> None:
    lines = shown(heard("gpt", entries(), None, 50.0))
    text = "\n".join(lines)
    assert "job gpt  training  generation 1 (start)" in text and "heard 10.0 s ago" in text
    assert "iteration 41, 2 per second" in text and "\u2588" in text and "2 min" in text
    assert "[red]why" in text and "recovery for" not in text
    assert [line.split()[:2] for line in lines if line.startswith(("0 ", "1 ", "- "))] == [
        ["0", "n0"], ["1", "n1"], ["-", "n9"]
    ]  # fmt: skip
    assert "LAST EVENTS" in text and "generation (start): all here" in text


def test_machines_of_several_kinds_are_told() -> None:
    kernels = (KEYS.kernels, KernelsRecord(("torch 2, AVX2", "torch 2, AVX512"), (0, 0, 1, 1)))
    assert "not all ranks compute alike: ranks 0, 1 with AVX2; ranks 2, 3 with AVX512" in shown(
        heard("gpt", entries(kernels), None, 50.0)
    )
    assert "compute alike" not in "\n".join(shown(heard("gpt", entries(), None, 50.0)))


def test_a_recovery_that_is_under_way() -> None:
    failing = (KEYS.failure(1, 1), records.failure("node", 1))
    first = heard("gpt", entries(failing), None, 50.0)
    text = "\n".join(shown(first))
    assert "recovery for 10.0 s  phase agree" in text and "evidence node 1" in text and " lost" in text
    # The next phase has its own time; the recovery goes on.
    second = heard("gpt", entries(mode="replace"), first, 54.0)
    text = "\n".join(shown(second))
    assert "recovery for 10.0 s  phase plan, for 6.0 s" in text and "0 of 2 nodes" in text
    third = heard("gpt", entries(mode="replace"), second, 58.0)
    assert (third.phase_s, third.recovering_s) == (54.0, 50.0)
    over = heard("gpt", entries(), third, 59.0)
    assert over.recovering_s is None and over.phase is None


@pytest.mark.parametrize(("width", "height"), [(120, 30), (60, 12), (40, 8), (200, 60), (20, 5)])
def test_it_fits(width: int, height: int) -> None:
    slots = tuple(f"node-with-a-long-name-{index}" for index in range(100))
    events = [EventRecord(number, "generation (replace)", "w" * 300, 1.0) for number in range(2, 40)]
    more = [(KEYS.event(event.generation), event) for event in events]
    failing = (KEYS.failure(1, 1), replace(records.failure("node", 1, name=slots[1]), evidence="e" * 500))
    lines = shown(heard("gpt", entries(failing, *more, slots=slots), None, 50.0), width, height)
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    if height >= 12:
        assert any("more nodes" in line for line in lines)
        assert any(line.startswith("1 ") for line in lines), "\n".join(lines)  # what is in trouble comes first


def test_a_terminal_without_unicode() -> None:
    failing = (KEYS.failure(1, 1), records.failure("node", 1))
    for one in (entries(failing), entries(mode="replace")):
        text = "\n".join(shown(heard("gpt", one, None, 50.0), is_plain=True))
        assert not set(text) & set("\u2581\u2588\u2591")


def test_a_job_that_has_not_begun() -> None:
    kept = [kv for kv in entries() if kv.key.startswith((KEYS.job, KEYS.nodes))]
    text = "\n".join(shown(heard("gpt", kept, None, 50.0)))
    assert "starting" in text and "waits for others" in text and "iteration -, ? per second" in text
