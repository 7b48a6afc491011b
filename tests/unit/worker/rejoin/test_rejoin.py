"""Who repeats iterations before it joins the others."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from swift_agent.wire import messages as msg
from swift_agent.worker.groups.errors import GroupsAborted
from swift_agent.worker.rejoin import rejoin
from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_logging_store.errors import LinkLost


def rejoin_of(supervisor: Any = None, **place: Any) -> Rejoin:
    made = (SimpleNamespace(**place), supervisor or SimpleNamespace(note=print), SimpleNamespace(), SimpleNamespace())
    return Rejoin(*cast(Any, made), torch.device("cpu"), lambda: None)


def test_a_lone_replacement_that_is_stopped_once_it_has_joined_repeats_first() -> None:
    entered: list[int] = []
    supervisor = SimpleNamespace(
        note=print,
        peek_go=lambda: SimpleNamespace(generation=len(entered) + 2, leaves=False, keeps=False, share=0),
        enter_go=lambda go: True,
        interrupted=True,
    )
    rejoin = rejoin_of(supervisor, replays=True, replays_alone=True)
    rejoin._enter = lambda go: entered.append(go.generation)  # type: ignore[method-assign]
    assert rejoin.run() and entered == [2]


def test_who_finds_no_room_to_keep_its_state_lives_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*what: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rejoin.node_file, "keep", full)
    sent: list[object] = []
    one = rejoin_of(SimpleNamespace(note=print, send=sent.append), offer=dict)
    one._tracked = cast(Any, SimpleNamespace(updates=None, state=None))
    one._keep(cast(Any, SimpleNamespace(kept="/tmp/swift-agent-x", plan=SimpleNamespace(iteration=3, sections=0))))
    (unfit,) = sent
    assert isinstance(unfit, msg.Unfit) and not unfit.hopeless
    assert unfit.why.startswith("its state cannot be kept in /tmp/swift-agent-x (No space left on device)")


@pytest.mark.parametrize(
    ("error", "is_asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (GroupsAborted("a peer is lost"), True),
        (LinkLost("the connection broke"), True),
    ],
)
def test_only_what_a_peer_may_have_caused_is_asked_about(error: Exception, is_asked: bool) -> None:
    """All others wait for this rank, and the agent takes 30 s to say that it knows nothing."""
    asked: list[BaseException] = []
    supervisor = SimpleNamespace(
        note=print, peek_go=lambda: SimpleNamespace(leaves=False, keeps=False, share=0), enter_go=lambda go: True,
        interrupted=False, confirm=asked.append,
    )  # fmt: skip
    one = rejoin_of(supervisor)

    def enter(go: Any) -> None:
        raise error

    one._enter = enter  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        one.run()
    assert asked == ([error] if is_asked else [])


def test_what_fails_once_the_generation_was_stopped_is_no_error_of_its_own() -> None:
    supervisor = SimpleNamespace(note=print, interrupted=True, confirm=lambda error: True)
    assert rejoin_of(supervisor)._hears_of_another(RuntimeError("shapes of what was cut"))
