"""The agent's records: repeated while the store is away, dropped when the world has moved on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from swift_agent.agent.record_writer import Write, Writer
from swift_rendezvous.store.kv import Compare, Op, Put, RequestRefused, StoreUnavailable, TransactionResult
from tests.support.memory_store import MemoryStore

PUT = [Put("k", b"1")]


class Shaky(MemoryStore):
    """Raises *error*, if set, for every transaction."""

    error: Exception | None = None
    num_tries = 0

    def transaction(
        self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TransactionResult:
        self.num_tries += 1
        if self.error is not None:
            raise self.error
        return super().transaction(compare, success, failure)


@pytest.fixture
def store() -> Shaky:
    return Shaky()


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def writer(store: Shaky, refused: list[str]) -> Iterator[Writer]:
    made = Writer(store, refused.append)
    yield made
    made.stop()


def test_a_record_is_repeated_until_the_store_is_back(store: Shaky, writer: Writer) -> None:
    store.error = StoreUnavailable("away")
    writer.submit(Write("w", [], PUT, lambda: True))
    assert not writer.flush(0.3) and store.num_tries > 0
    store.error = None
    assert writer.flush(5.0) and store.get("k") is not None


def test_what_is_not_wanted_any_more_is_dropped_and_told(store: Shaky, writer: Writer) -> None:
    store.error = StoreUnavailable("away")
    wanted, dropped = threading.Event(), threading.Event()
    wanted.set()
    writer.submit(Write("w", [], PUT, wanted.is_set, dropped.set))
    assert not writer.flush(0.3) and not dropped.is_set()
    wanted.clear()
    assert dropped.wait(5.0)
    store.error = None
    assert writer.flush(5.0) and store.get("k") is None


def test_a_record_that_will_never_be_taken_does_not_hold_up_the_others(
    store: Shaky, writer: Writer, refused: list[str]
) -> None:
    store.error = RequestRefused("request is too large")
    writer.submit(Write("large", [], PUT, lambda: True))
    assert writer.flush(5.0) and len(refused) == 1 and "large" in refused[0]
    store.error = None
    writer.submit(Write("w", [], PUT, lambda: True))
    assert writer.flush(5.0) and store.get("k") is not None


def test_a_guard_that_does_not_hold_drops_the_record(store: Shaky, writer: Writer) -> None:
    writer.submit(Write("w", [Compare.exists("absent")], PUT, lambda: True))
    assert writer.flush(5.0) and store.num_tries == 1 and store.get("k") is None


def test_the_answer_of_the_store_is_told(store: Shaky, writer: Writer) -> None:
    answers: list[bool] = []
    store.error = StoreUnavailable("away")
    writer.submit(Write("w", [], PUT, lambda: True, answered=answers.append))
    writer.submit(Write("w", [Compare.exists("absent")], PUT, lambda: True, answered=answers.append))
    assert not writer.flush(0.3) and answers == []
    store.error = None
    assert writer.flush(5.0) and answers == [True, False]


def test_what_is_outdated_when_the_store_answers_again_is_not_written(
    store: Shaky, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request for it may lie in a broken line, and arrive when that is healed: so the line is tried first."""
    fresh, dropped = threading.Event(), threading.Event()
    fresh.set()
    get = store.get

    def late(key: str, **options: object) -> object:
        fresh.clear()  # meanwhile
        return get(key)

    monkeypatch.setattr(store, "get", late)
    writer.submit(Write("w", [], PUT, fresh.is_set, dropped=dropped.set, read_first="generation"))
    assert dropped.wait(5.0) and writer.flush(5.0)
    assert get("k") is None
    writer.submit(Write("w", [], PUT, lambda: True, read_first="generation"))
    assert writer.flush(5.0) and get("k") is not None


def test_a_writer_that_ends_by_an_error_says_so(store: Shaky, refused: list[str]) -> None:
    told = threading.Event()
    reasons: list[str] = []

    def hear(why: str) -> None:
        reasons.append(why)
        told.set()

    writer = Writer(store, refused.append, hear)
    store.error = ZeroDivisionError("a defect")
    writer.submit(Write("w", [], PUT, lambda: True))
    assert told.wait(5.0)
    assert reasons == ["its thread swift-writer has ended by ZeroDivisionError: a defect"] and not refused
    writer.stop()
