"""What an agent knows of its own machine before it joins a job."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.errors import JobStopped
from swift_agent.launch import host
from swift_agent.launch.host import another_command, is_own, mistaken_address
from tests.support.records import node


def test_loopback_is_an_address_only_among_neighbours() -> None:
    here, near, far = (replace(node(name), host=place) for name, place in
                       (("n0", "127.0.0.1"), ("n1", "127.0.1.1"), ("n2", "10.0.0.2")))
    assert mistaken_address(here, [here, near]) == ""
    assert "--local-addr" in mistaken_address(here, [here, near, far])
    assert mistaken_address(far, [here, near, far]) == ""
    assert mistaken_address(replace(here, host="::1"), [far])
    assert mistaken_address(replace(here, host="localhost"), [far])
    assert mistaken_address(replace(here, host="node7"), [far]) == ""


def test_nodes_may_run_another_script_and_say_so() -> None:
    here, same, other = (replace(node(name), fingerprint=text) for name, text in
                         (("n0", "one"), ("n1", "one"), ("n2", "two")))
    assert another_command(here, [here, same]) == ""
    assert another_command(here, [here, same, other]).startswith("n2 runs another script than n0")


def test_what_is_of_this_machine() -> None:
    assert is_own("localhost") and is_own("127.0.0.1")
    assert not is_own("192.0.2.1") and not is_own("no-such-host.invalid")


def test_an_agent_that_begins_waits_for_a_way_to_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose network comes up a little later, or is away for a moment, is no mistake of the user's."""
    config: Any = SimpleNamespace(local_addr="", etcd=SimpleNamespace(endpoints=("127.0.0.1:2379",)))
    left = ["EINVAL", "ENETUNREACH", "EINVAL"]

    class NoWayYet(socket.socket):
        def connect(self, address: Any) -> None:
            if left:
                raise OSError(getattr(errno, left.pop()), "no way")
            super().connect(address)

    monkeypatch.setattr(host, "_RETRY_S", 0.0)
    monkeypatch.setattr(host.socket, "socket", NoWayYet)
    with pytest.raises(JobStopped, match=r"on the way to etcd .127.0.0.1:2379: .* no way"):
        host.local_host(config)
    assert host.local_host(config, wait_s=60.0) == "127.0.0.1" and not left
