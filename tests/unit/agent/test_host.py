"""What an agent knows of its own machine before it joins a job."""

from __future__ import annotations

from dataclasses import replace

from swift_agent.host import mistaken_address
from tests.support.records import node


def test_loopback_is_an_address_only_among_neighbours() -> None:
    here, near, far = (replace(node(name), host=host) for name, host in
                       (("n0", "127.0.0.1"), ("n1", "127.0.1.1"), ("n2", "10.0.0.2")))
    assert mistaken_address(here, [here, near]) == ""
    assert "--local-addr" in mistaken_address(here, [here, near, far])
    assert mistaken_address(far, [here, near, far]) == ""
    assert mistaken_address(replace(here, host="::1"), [far])
    assert mistaken_address(replace(here, host="localhost"), [far])
    assert mistaken_address(replace(here, host="node7"), [far]) == ""
