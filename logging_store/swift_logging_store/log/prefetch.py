"""Items of an iterator that are made in a thread of their own while those before them are used.

Must never drop an item, or an error: it comes where the item would have.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The items are not waited for any more."""


def ahead(
    make: Callable[[Callable[[], None]], Generator[T, None, None]], num: int, *, filler: T | None = None,
    filler_s: float | None = None,
) -> Generator[T, None, None]:  # fmt: skip
    """What *make* yields, which is up to *num* items ahead of their use; while there is none, *filler* every *filler_s*
    seconds, if that is given. *make* gets a function that raises `Stopped` when this is closed, to be called in what
    takes long: closing this waits for the thread."""
    changed = threading.Condition()
    items: deque[T] = deque()
    errors: list[BaseException] = []
    is_over = is_closed = False

    def check() -> None:
        if is_closed:
            raise Stopped

    def work() -> None:
        nonlocal is_over
        try:
            with contextlib.closing(make(check)) as made:
                for item in made:
                    with changed:
                        items.append(item)
                        changed.notify_all()
                        changed.wait_for(lambda: len(items) < num or is_closed)
                    check()
        except BaseException as error:  # raised where the items are taken
            if not is_closed:
                errors.append(error)
        finally:
            with changed:
                is_over = True
                changed.notify_all()

    thread = threading.Thread(target=work, name="swift-ahead", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: items or is_over, filler_s if filler is not None else None)
                if not items and is_over:
                    break
                item = items.popleft() if items else filler
                changed.notify_all()
            assert item is not None
            yield item
        if errors:
            raise errors.pop()
    finally:
        with changed:
            is_closed = True
            changed.notify_all()
        thread.join()
