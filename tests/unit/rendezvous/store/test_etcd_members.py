"""Whether a refused connection proves that no server runs there."""

from __future__ import annotations

import socket

import pytest

from swift_rendezvous.store import _etcd_members as members


@pytest.mark.parametrize(
    ("release", "expected"),
    [("5.8.0", True), ("6.1.0-18-amd64", True), ("5.15.0-1051-aws", True), ("5.7.19", False), ("4.18.0-513.el8", False),
     ("unknown", False)],
)  # fmt: skip
def test_which_kernels_tell_who_has_refused(release: str, expected: bool) -> None:
    assert members._is_told_who_refuses(release) is expected


def test_a_refusal_counts_only_where_the_kernel_tells_who_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for tells in (True, False):
            monkeypatch.setattr(members, "_TELLS_ICMP", tells)
            assert members.reach(address, 1.0) == "connected"
    for tells in (True, False):
        monkeypatch.setattr(members, "_TELLS_ICMP", tells)
        assert members.reach(address, 1.0) == ("refused" if tells else "")
