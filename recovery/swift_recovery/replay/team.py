"""The processes that repeat a lost stage together: who is there, what they exchange in a step, and what follows when
one of them is lost.

    hub (the replacement)  <--control link--  each helper:  hello, form, ready, computed, totals, lost
    0 --> 1 --> ... --> d-1 --> 0             gradients: each adds its own to what comes, and passes the sum on

What is lost of a step costs only that step: `Reformed` is raised, and those that are left make it again. Nothing that
comes is unpickled: heads are JSON, tensors are bytes. This module must never wait for ever, nor decide which
micro-batches are whose.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swift_logging_store.errors import LinkLost
from swift_recovery.replay.kernels import computes_with
from swift_recovery.replay.parallel import SUMS, Sum
from swift_recovery.replay.ring import Frame, Pieces, Ring, is_readable, pass_on, recv_frame, send_frame
from swift_recovery.transfer.socket_link import Listener, SocketLink

# A helper that has been silent for so long, or for so many times what a step took here, is left out.
SILENT_S = 5.0
SILENT_STEPS = 4.0
# For all to have new connections. A helper says after half of it that it has not come to that.
FORM_S = 2.0
# Where nobody is lost and steps break all the same.
MAX_BROKEN = 10

class Reformed(Exception):
    """Some process is not there any more, or has not come through the step: it has to be made again, by those that are
    left."""


class Dismissed(Exception):
    """A helper is not needed any more."""


# ---- a helper ----


class Helper:
    """A process that helps, connected with the hub by *hub*; it listens at *address*. *check* raises when there is no
    reason to go on. `Dismissed` is raised where it is not needed, or the hub is gone.

    *index*, *size*: its place among the processes; *sum*: see `Sum`; known after `form`."""

    def __init__(
        self, hub: SocketLink, address: str, check: Callable[[], None], device: torch.device | None = None
    ) -> None:
        self._hub, self._check = hub, check
        self._listener = Listener(address)
        self._ring = Ring(self._listener)
        self.index, self.size = 0, 1
        self.sum: Sum = SUMS[0]
        with _hub_is_there():
            send_frame(hub, {"op": "hello", "where": self._listener.where, "computes": computes_with(device)})

    def form(self) -> None:
        """Wait until the hub has formed a team, and be in it."""
        with _hub_is_there():
            self._form(recv_frame(self._hub)[0])

    def _form(self, head: dict[str, Any]) -> None:
        while True:
            if head.get("op") != "form":
                raise LinkLost(f"{head.get('op')!r} in place of a new team")
            deadline_s = time.monotonic() + FORM_S / 2

            def check(deadline_s: float = deadline_s) -> None:
                self._called()
                if time.monotonic() > deadline_s:
                    raise LinkLost("a neighbour does not come")

            self.index, self.size, self.sum = int(head["index"]), int(head["size"]), str(head["sum"])
            try:
                self._ring.connect(head["left"], int(head["attempt"]), check)
            except _Called as called:
                head = called.head
                continue
            except LinkLost:
                send_frame(self._hub, {"op": "lost", "attempt": head["attempt"]})
                head = self._next_form()
                continue
            send_frame(self._hub, {"op": "ready", "attempt": head["attempt"]})
            return

    def _next_form(self) -> dict[str, Any]:
        while (head := recv_frame(self._hub)[0]).get("op") != "form":
            pass
        return head

    def _called(self) -> None:
        self._check()
        if is_readable(self._hub):
            raise _Called(recv_frame(self._hub)[0])

    def meet(self) -> None:
        """A step begins. Raises `Reformed` if the team is another one by now."""
        with _hub_is_there():
            if is_readable(self._hub):
                self._form(recv_frame(self._hub)[0])
                raise Reformed

    def exchange(
        self, head: Mapping[str, Any], tensors: Sequence[Tensor], own: Pieces, parameters: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Frame]]:
        """Tell the hub what was computed here; returns the sums of all gradients, and what the hub tells of all."""
        with _hub_is_there():
            send_frame(self._hub, {**head, "op": "computed"}, tensors)
            try:
                self._ring_check()
                sums = pass_on(self._ring.left, self._ring.right, own, parameters)
            except _Called as called:
                self._form(called.head)
                raise Reformed from None
            except LinkLost:
                self._ring.close()
                send_frame(self._hub, {"op": "lost"})
                self._form(self._next_form())
                raise Reformed from None
            found, totals = recv_frame(self._hub)
            if found.get("op") == "form":
                self._form(found)
                raise Reformed
            for number, total in zip(found["has"], totals, strict=False):  # the last one has them, and gets none
                sums[number] = total.to(parameters[number].device)
            frames = [recv_frame(self._hub) for _ in range(int(found["num_frames"]))]
            return sums, frames

    def _ring_check(self) -> None:
        for link in (self._ring.left, self._ring.right):
            if link is None:
                raise LinkLost("a neighbour is gone")
            link.check = self._called

    def close(self) -> None:
        self._ring.close()
        self._listener.close()


class _Called(Exception):
    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head


@contextlib.contextmanager
def _hub_is_there() -> Iterator[None]:
    try:
        yield
    except (LinkLost, KeyError, TypeError, ValueError) as error:
        raise Dismissed(str(error)) from None


# ---- the hub ----


class _Member:
    def __init__(self, link: SocketLink, where: str) -> None:
        self.link, self.where = link, where


class Hub:
    """The replacement among those that help it; it listens at *address*. *note* tells people.

    It goes on alone if need be: *size* is 1 then."""

    def __init__(
        self, address: str, note: Callable[[str], None], how: Sum = SUMS[0], device: torch.device | None = None
    ) -> None:
        self._note, self.sum, self._computes = note, how, computes_with(device)
        self._listener = Listener(address)
        self._ring = Ring(self._listener)
        self._members: list[_Member] = []
        self._attempt = self._num_broken = 0
        self._is_formed = True
        self._step_s = 0.0
        self._deadline_s = 0.0

    @property
    def where(self) -> str:
        """For those that are to help; see `socket_link.connected`."""
        return self._listener.where

    @property
    def index(self) -> int:
        return 0

    @property
    def size(self) -> int:
        """How many processes there are, this one among them."""
        return 1 + len(self._members)

    def gather(self, number: int, within_s: float, is_cut: Callable[[], bool]) -> None:
        """Wait for so many helpers, not longer than that, nor once it *is_cut*, and form a team of those that came."""
        deadline_s = time.monotonic() + within_s
        num_here = 0
        for sock in self._listener.visitors():
            if sock is not None:
                num_here += 1
                self._meet(SocketLink(sock, self._impatient))
            if num_here == number or time.monotonic() >= deadline_s or is_cut():
                break
        self._is_formed = False
        self._form()

    def _meet(self, link: SocketLink) -> None:
        """Take in a helper, if it would come to the same bits."""
        self._deadline_s = time.monotonic() + FORM_S
        try:
            head, _ = recv_frame(link)
            member, computes = _Member(link, str(head["where"])), str(head["computes"])
        except (LinkLost, KeyError):
            link.close()
            return
        if computes != self._computes and self.sum == SUMS[0]:
            ours = self._computes
            self._note(f"a helper with {computes} is not taken: its results may differ from those with {ours}")
            link.close()
            return
        self._members.append(member)

    def _impatient(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise LinkLost("it is silent")

    def _form(self) -> None:
        """Those that are there and can be connected with each other are the team."""
        while self._members:
            if self._num_broken >= MAX_BROKEN:
                self._note(f"{self._num_broken} steps that were shared came to nothing: it goes on alone")
                self._drop(list(self._members))
                break
            self._attempt += 1
            self._deadline_s = time.monotonic() + FORM_S
            lost: list[_Member] = []
            lefts = [self.where, *(member.where for member in self._members)]
            for index, member in enumerate(self._members, 1):
                head = {"op": "form", "attempt": self._attempt, "index": index, "size": self.size, "sum": self.sum}
                try:
                    send_frame(member.link, {**head, "left": lefts[index - 1]})
                except LinkLost:
                    lost.append(member)
            with contextlib.suppress(LinkLost):
                self._ring.connect(lefts[-1], self._attempt, self._impatient)
            ready = {member: self._is_ready(member) for member in self._members if member not in lost}
            lost += [member for member, is_ready in ready.items() if is_ready is None]
            if not lost and all(ready.values()) and self._ring.right is not None:
                break
            self._num_broken += 1
            self._drop(lost)
        self._is_formed = True

    def _is_ready(self, member: _Member) -> bool | None:
        """Once it has said so: whether it is connected, None if it is lost. What it has said of a step that came to
        nothing is passed over."""
        try:
            while True:
                head, _ = recv_frame(member.link)
                if head.get("attempt") == self._attempt and head.get("op") in ("ready", "lost"):
                    return bool(head["op"] == "ready")
        except LinkLost:
            return None

    def _drop(self, lost: Sequence[_Member]) -> None:
        for member in lost:
            self._members.remove(member)
            member.link.close()
        if lost and self._members:
            self._note(f"{len(lost)} of its helpers are gone: {self.size} processes go on")
        elif lost:
            self._note(f"{len(lost)} of its helpers are gone: it goes on alone")

    def meet(self) -> None:
        """A step begins."""
        if not self._is_formed:
            self._form()

    def exchange(
        self, of: Sequence[int], computed_s: float, own: Pieces, parameters: Sequence[Tensor],
        tell: Callable[[Sequence[Frame]], Sequence[Frame]],
    ) -> tuple[list[Tensor | None], list[Frame]]:  # fmt: skip
        """Returns the sums of all gradients, and what the others have computed. *of*: what must be the same in all
        processes, the step and the state that it began with. *tell*: what is told to all. *computed_s*: how long this
        process took. Raises `Reformed`."""
        self._step_s = max(self._step_s, computed_s)
        patience_s = max(SILENT_S, SILENT_STEPS * self._step_s)
        self._deadline_s = time.monotonic() + patience_s
        frames: list[Frame] = []
        for member in list(self._members):
            try:
                frame = recv_frame(member.link)
            except LinkLost:
                self._drop([member])
                self._break()
            if frame[0].get("op") != "computed":
                self._break()
            if frame[0].get("of") != list(of):
                self._note("a helper is in another step, or has another state, than the replacement: it is not taken")
                self._drop([member])
                self._break()
            frames.append(frame)
        self._deadline_s = time.monotonic() + patience_s
        sums = self._around(own, parameters)
        has = [number for number, total in enumerate(sums) if total is not None]
        told, size = tell(frames), self.size
        self._deadline_s = time.monotonic() + patience_s
        everything = [total for total in sums if total is not None]
        for index, member in enumerate(list(self._members), 1):
            try:
                totals = everything if index + 1 < size else []
                send_frame(member.link, {"op": "totals", "has": has, "num_frames": len(told)}, totals)
                for head, tensors in told:
                    send_frame(member.link, head, tensors)
            except LinkLost:
                # The step has come through here. The others learn of it when the next one begins.
                self._drop([member])
                self._is_formed = False
        return sums, frames

    def _around(self, own: Pieces, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """What is sent to the right comes back from the left."""
        left, right = self._ring.left, self._ring.right
        if left is None or right is None:
            self._break()
        assert left is not None and right is not None
        failed: list[Exception] = []
        # Threads have streams of their own, which do not wait for what the script's still computes.
        streams = [torch.cuda.current_stream(one) for one in {p.device for p in parameters} if one.type == "cuda"]

        def send() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for stream in streams:
                        stack.enter_context(torch.cuda.stream(stream))
                    pass_on(None, right, own, parameters)
            except Exception as error:  # whatever it is: the other thread waits
                failed.append(error)

        def check() -> None:
            self._impatient()
            if failed:
                raise LinkLost(str(failed[0]))
            if any(is_readable(member.link) for member in self._members):
                raise LinkLost("a process of the team has lost its neighbour")

        left.check = right.check = check
        thread = threading.Thread(target=send, name="swift-sum", daemon=True)
        thread.start()
        try:
            # What comes back has been sent before. If it does not all come, the step begins again without these.
            sums = pass_on(left, None, [], parameters, into=own[0] if len(own) == 1 else {})
        except BaseException as error:
            self._ring.close()  # so that the thread ends, too
            thread.join()
            if not isinstance(error, LinkLost):
                raise
            self._break()
        thread.join()
        return sums

    def _break(self) -> None:
        self._num_broken += 1
        self._ring.close()
        self._form()
        raise Reformed

    def close(self) -> None:
        """Nobody helps any more."""
        self._ring.close()
        for member in self._members:
            member.link.close()
        self._members.clear()
        self._listener.close()
