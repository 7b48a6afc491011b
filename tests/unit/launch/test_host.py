"""What an agent knows of its own machine before it joins a job."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from typing import NoReturn

import pytest

from swift_agent.errors import JobStopped
from swift_agent.launch import host
from swift_agent.launch.host import another_command, is_own, mistaken_address
from swift_rendezvous.store.etcd_config import EtcdConfig
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


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EINVAL, "a route that leads nowhere"), True),
        (OSError(errno.ENETUNREACH, "no route"), True),
        (socket.gaierror(socket.EAI_AGAIN, "no name server answers"), True),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), False),
    ],
)
def test_whether_there_may_be_a_way_to_etcd_in_a_moment(
    error: OSError, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(JobStopped, match=r"on the way to etcd .etcd1:2379: .*name it with --local-addr") as caught:
        host.local_host(None, EtcdConfig(("etcd1:2379",)))
    assert isinstance(caught.value, host.NoWay) is passes
