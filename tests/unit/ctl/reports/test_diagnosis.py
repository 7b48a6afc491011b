"""Verdicts and remedies of `swiftctl doctor`, from made-up measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_agent.ctl.reports.diagnosis import Etcd, Finding, Machine, Member, Torch, diagnose, worst

ETCD = Etcd(
    (Member("a:2379", version="3.5.16", ahead_s=0.2), Member("b:2379", version="3.5.16", ahead_s=-0.4)),
    read_s=(0.001, 0.001, 0.2), write_s=(0.002, 0.003, 0.2), lease_ttl_s=5,
)  # fmt: skip
MACHINE = Machine(
    address="10.0.0.5", interfaces=(("eth0", ("10.0.0.5",)), ("lo", ("127.0.0.1",))), num_ports=28000, max_files=65536,
    max_processes=None, shm_bytes=8 << 30, shm_free_bytes=8 << 30, etcd_binary="/usr/bin/etcd",
)  # fmt: skip
TORCH = Torch("2.13.0+cpu", has_gloo=True, native_path="/cache/forward.so")


def finding(name: str, etcd: Etcd | None = ETCD, machine: Machine = MACHINE, torch: Torch = TORCH) -> Finding:
    found = [one for one in diagnose(etcd, machine, torch) if one.name == name]
    assert len(found) == 1, found
    return found[0]


def test_a_good_machine() -> None:
    findings = diagnose(ETCD, MACHINE, TORCH)
    assert {one.verdict for one in findings} == {"ok"} and worst(findings) == "ok"
    assert not any(one.remedy for one in findings)
    assert finding("etcd latency").found == "get 1.0 ms, put 3.0 ms (median of 3)"
    assert finding("clock").found.startswith("within 1 s")


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("etcd", "fail", {"error": "no answer"}),
        ("etcd", "warn", {"members": (Member("a:1", error="connection refused"), Member("b:2"))}),
        ("etcd latency", "warn", {"write_s": (0.06,)}),
        ("etcd latency", "fail", {"write_s": (1.5,)}),
        ("etcd latency", "fail", {"write_s": (), "write_error": "no space"}),
        ("etcd latency", "ok", {"write_s": (), "write_denied": True}),
        ("etcd version", "fail", {"members": (Member("a:1", version="3.3.10"),)}),
        ("etcd version", "ok", {"members": (Member("a:1"),)}),
        ("etcd lease", "fail", {"lease_ttl_s": None, "lease_error": "denied"}),
        ("etcd lease", "warn", {"lease_ttl_s": 15}),
        ("clock", "warn", {"members": (Member("a:1", ahead_s=-60.0),)}),
    ],
)
def test_etcd(name: str, verdict: str, changes: dict[str, Any]) -> None:
    found = finding(name, etcd=replace(ETCD, **changes))
    assert found.verdict == verdict and bool(found.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("local address", "fail", {"address": "", "address_error": "no route"}),
        ("local address", "fail", {"bind_error": "cannot assign requested address"}),
        ("local address", "warn", {"address": "127.0.0.1"}),
        ("interfaces", "fail", {"address": "10.9.9.9"}),
        ("interfaces", "ok", {"address": "node7"}),  # a name: bound and reached, that is all that can be said
        ("loopback", "fail", {"loopback_error": "down"}),
        ("ports", "warn", {"num_ports": 100}),
        ("ports", "fail", {"num_ports": 0}),
        ("open files", "warn", {"max_files": 1024}),
        ("open files", "fail", {"max_files": 64}),
        ("processes", "fail", {"max_processes": 100}),
        ("/dev/shm", "warn", {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}),
        ("/dev/shm", "warn", {"shm_free_bytes": 1 << 20}),
        ("/dev/shm", "warn", {"shm_bytes": None, "shm_free_bytes": None}),
        ("pidfd", "fail", {"has_pidfd": False}),
        ("setpriv", "warn", {"has_setpriv": False}),
    ],
)
def test_machine(name: str, verdict: str, changes: dict[str, Any]) -> None:
    found = finding(name, machine=replace(MACHINE, **changes))
    assert found.verdict == verdict and bool(found.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("torch", "fail", {"error": "ImportError: no torch"}),
        ("torch", "fail", {"version": "2.6.0"}),
        ("gloo", "fail", {"has_gloo": False}),
        ("GPUs, NCCL", "ok", {"gpus": ("H200", "H200"), "has_nccl": True}),
        ("GPUs, NCCL", "warn", {"gpus": ("H200",)}),
        ("native forwarder", "warn", {"native_path": ""}),
        ("native forwarder", "warn", {"native_off": True}),
    ],
)
def test_torch(name: str, verdict: str, changes: dict[str, Any]) -> None:
    found = finding(name, torch=replace(TORCH, **changes))
    assert found.verdict == verdict and bool(found.remedy) == (verdict != "ok")


def test_without_an_etcd_a_machine_alone_is_judged() -> None:
    assert finding("etcd", etcd=None).verdict == "warn"
    assert finding("etcd", etcd=None, machine=replace(MACHINE, etcd_binary="")).verdict == "fail"
    assert finding("local address", etcd=None, machine=replace(MACHINE, address="127.0.0.1")).verdict == "ok"


def test_the_worst_counts() -> None:
    ok, warn, fail = Finding("a", "ok", ""), Finding("b", "warn", ""), Finding("c", "fail", "")
    assert (worst([]), worst([ok, warn]), worst([warn, fail, ok])) == ("ok", "warn", "fail")
    both = replace(TORCH, gpus=("H200", "H200"), has_nccl=True)
    assert finding("GPUs, NCCL", torch=both).found == "2 x H200, NCCL there"
