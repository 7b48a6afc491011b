"""Which errors of user code may come from the loss of a peer."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from swift_agent.errors import PeerFailure, UsageError
from swift_agent.running import is_communication_error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistStoreError("store at a:1 cannot be reached"), True),
        (PeerFailure("generation 3 was stopped"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42197"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection"), False),
        # Asked about, it would keep the script for 30 s, and then be called a failed collective.
        (UsageError("swift_agent.init() was called twice"), False),
    ],
)
def test_only_what_torch_raises_when_a_connection_breaks_is_asked_about(error: Exception, expected: bool) -> None:
    assert is_communication_error(error) is expected
