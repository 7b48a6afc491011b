"""The signals that end a node, caught from the first moment on.

Until an agent looks after the signals there are a private etcd to stop and directories to remove. Raising in the middle
of their making would leave some of them, so a signal is only noted here, and looked at where nothing is half made.
Must never act on a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException


class CaughtSignals:
    """While entered, the signals named in *names* (``"SIGTERM,SIGINT"``) are noted instead of taking their effect.

    Names that the system lacks are left out, as torch does. Outside of the main thread nothing is caught: Python allows
    no handlers there. The former handlers are back at the end.
    """

    def __init__(self, names: str) -> None:
        found = (getattr(signal, name.strip(), None) for name in names.split(","))
        self._numbers = [number for number in found if isinstance(number, signal.Signals)]
        self._former: dict[int, Any] = {}
        self._listener: Callable[[signal.Signals], None] | None = None
        self.first: SignalException | None = None
        self.count = 0

    def __enter__(self) -> CaughtSignals:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._former:
            signal.signal(*self._former.popitem())

    def raise_first(self) -> None:
        """Raise torch's `SignalException` if a signal came."""
        if self.first is not None:
            raise self.first

    @contextlib.contextmanager
    def listening(self, listener: Callable[[signal.Signals], None]) -> Iterator[None]:
        """While entered, call *listener* with each signal, in a signal handler; at once with the first one if that came
        before. A signal that comes at the very beginning may be told twice.
        """
        self._listener = listener
        try:
            if self.first is not None:
                listener(self.first.sigval)
            yield
        finally:
            self._listener = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = SignalException(f"Process {os.getpid()} got signal: {number}", signal.Signals(number))
        if self._listener is not None:
            self._listener(signal.Signals(number))
