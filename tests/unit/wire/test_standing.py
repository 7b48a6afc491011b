"""What is known of a worker that was killed: how far it was, and where in the script it raised."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from swift_agent.wire.root_cause import place_of
from swift_agent.wire.standing import NAME, MyStanding, Standing, Standings

CAUSED = """Traceback (most recent call last):
  File "/home/ann/train.py", line 7, in load
    return json.loads(line)
  File "/usr/lib/site-packages/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
json.decoder.JSONDecodeError: Expecting value: line 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "<frozen runpy>", line 98, in _run_module_code
  File "/home/ann/train.py", line 31, in <module>
    train(batch)
    ~~~~~^^^^^^^
  File "/usr/lib/site-packages/torch/nn/functional.py", line 99, in linear
    return _linear(x)
RuntimeError: mat1 and mat2
note: of two lines
"""


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    standings = Standings(str(tmp_path), 3)
    assert standings.of(2) == Standing()
    mine = MyStanding(str(tmp_path), 2)
    mine.replaces(20)
    assert standings.of(2) == Standing(20)
    mine.begins(20)
    assert standings.of(2) == Standing(20, True)
    mine.finishes()
    mine.begins(21)
    mine.excuse()
    assert standings.of(2) == Standing(21, True, 1, True)
    assert standings.of(1) == Standing()
    standings.clear(2)
    assert standings.of(2) == Standing()


def test_until_when_they_may_go_on_is_told_to_all(tmp_path: Path) -> None:
    standings = Standings(str(tmp_path), 2)
    first, second, alone = MyStanding(str(tmp_path), 0), MyStanding(str(tmp_path), 1), MyStanding()
    assert first.left_s() == second.left_s() == alone.left_s() == math.inf
    standings.vouch(time.monotonic() + 100)
    for one in (first, second):
        assert 90 < one.left_s() <= 100
    assert alone.left_s() == math.inf
    standings.vouch(time.monotonic() - 1)
    assert first.left_s() < 0
    second.stand(True)
    assert standings.stands(1) and not standings.stands(0) and standings.of(1) == Standing()
    standings.clear(1)
    assert not standings.stands(1) and second.left_s() < 0


@pytest.mark.parametrize("content", [None, b"", b"x" * 48])
def test_a_worker_without_the_file_trains_all_the_same(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / NAME).write_bytes(content)
    for standing in (MyStanding(str(tmp_path), 1), MyStanding()):
        standing.begins(3)
        standing.finishes()


def test_the_place_of_an_exception() -> None:
    assert place_of(CAUSED) == "RuntimeError at train.py:31"


@pytest.mark.parametrize("text", ["", "Signal 9", 'File "x", line 3', "ValueError: x", "Traceback\n  File"])
def test_no_place(text: str) -> None:
    assert place_of(text) == ""


def test_an_exception_in_a_library_alone() -> None:
    text = 'Traceback:\n  File "/usr/lib/site-packages/a.py", line 3, in f\n    g()\nKeyError\n'
    assert place_of(text) == "KeyError at a.py:3"
