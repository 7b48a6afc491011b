"""What is shown of the end of a worker's standard error."""

from __future__ import annotations

from swift_agent.wire.root_cause import SAID, last_words, place_of

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 6, in <module>
    load()
ValueError: bad batch"""


def test_a_traceback_is_all_that_is_shown() -> None:
    assert last_words(f"epoch 1\nepoch 2\n{TRACEBACK}\n") == TRACEBACK


def test_torch_puts_the_rank_before_each_line() -> None:
    marked = "\n".join(f"[rank13]: {line}" for line in TRACEBACK.splitlines())
    assert last_words(f"hello\n{marked}\n") == TRACEBACK
    assert place_of(last_words(marked)) == "ValueError at train.py:6"


def test_an_error_that_came_of_another_is_shown_with_it() -> None:
    both = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    assert last_words(both) == both


def test_without_a_traceback_the_last_lines() -> None:
    said = "\n".join(f"line {number}" for number in range(100))
    assert last_words(said).splitlines() == [SAID, *(f"line {number}" for number in range(80, 100))]


def test_a_progress_bar_is_shown_as_it_was_last() -> None:
    assert last_words("10%|#   |\r20%|##  |\r30%|### |\nkilled\r\n") == f"{SAID}\n30%|### |\nkilled"


def test_nothing_is_nothing() -> None:
    assert last_words("") == last_words("\n \n\r\n") == ""


def test_a_long_traceback_ends_with_its_error() -> None:
    deep = "Traceback (most recent call last):\n" + "  File\n" * 500 + "RecursionError: too deep"
    found = last_words(deep).splitlines()
    assert len(found) == 60 and found[-1] == "RecursionError: too deep"
