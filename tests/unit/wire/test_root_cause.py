"""What is shown of the end of a worker's standard error."""

from __future__ import annotations

from swift_agent.wire.root_cause import SAID, last_words, line_of, place_of

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


def test_a_traceback_that_was_handled_explains_nothing() -> None:
    later = "\n".join(f"epoch {number}" for number in range(15))
    assert last_words(f"{TRACEBACK}\n{later}\nFATAL: no space left").startswith(SAID)
    # Nor one before that which ended it, unless it led to it.
    other = TRACEBACK.replace("bad batch", "handled")
    assert last_words(f"{other}\n{later}\n{TRACEBACK}") == TRACEBACK
    assert last_words(f"{TRACEBACK}\nException ignored in: <x>") == f"{TRACEBACK}\nException ignored in: <x>"


def test_a_signal_needs_no_traceback() -> None:
    assert last_words(f"{TRACEBACK}\nSegmentation fault", was_killed=True).startswith(SAID)


def test_nothing_steers_a_terminal() -> None:
    assert last_words("\x1b[31mred\x1b[0m \x1b]0;title\x07 a\x00b\x1b[2J\tc\x7f") == f"{SAID}\nred  ab\tc"


def test_the_line_that_says_it() -> None:
    assert line_of(TRACEBACK) == "ValueError: bad batch"
    cuda = TRACEBACK.replace("ValueError: bad batch", "RuntimeError: CUDA error: x\nCompile with `TORCH_USE_CUDA_DSA`")
    assert line_of(cuda) == "RuntimeError: CUDA error: x"
    assert line_of(f"{SAID}\none\ntwo\n") == "two"
    assert line_of("") == "" and len(line_of("x" * 9999)) == 300


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
