"""What logs of messages have done, summed over the workers that a node has and had."""

from __future__ import annotations

from pathlib import Path

from swift_agent.wire.log_counters import NAME, LogCounters, MyLogCounters
from swift_logging_store.log.rate import LogFigures

SOME = LogFigures(1000, 2, 3, 4, 5, 6, 7, 8, 9, 1)


def test_a_sum_does_not_fall_when_a_worker_is_replaced(tmp_path: Path) -> None:
    counters = LogCounters(str(tmp_path), 2)
    assert counters.total() == LogFigures()
    first, second = MyLogCounters(str(tmp_path), 0), MyLogCounters(str(tmp_path), 1)
    first.tell(SOME)
    second.tell(LogFigures(written_bytes=5))
    assert counters.total() == SOME._replace(written_bytes=1005)
    counters.retire(0)
    # Nobody has given up any more.
    assert counters.total() == SOME._replace(written_bytes=1005, num_given_up=0)
    MyLogCounters(str(tmp_path), 0).tell(LogFigures(written_bytes=1))
    assert counters.total().written_bytes == 1006
    counters.retire(0)
    counters.retire(0)
    assert counters.total().written_bytes == 1006


def test_a_helper_counts_for_nobody(tmp_path: Path) -> None:
    counters = LogCounters(str(tmp_path), 1)
    MyLogCounters(str(tmp_path), 7).tell(SOME)
    counters.retire(7)
    assert counters.total() == LogFigures()


def test_without_the_file_nothing_is_counted(tmp_path: Path) -> None:
    MyLogCounters(str(tmp_path), 0).tell(SOME)
    MyLogCounters().tell(SOME)
    (tmp_path / NAME).write_bytes(b"short")
    MyLogCounters(str(tmp_path), 0).tell(SOME)
    assert (tmp_path / NAME).read_bytes() == b"short"
