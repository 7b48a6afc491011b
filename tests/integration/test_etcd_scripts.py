"""deploy/etcd: what its scripts say and leave if something is wrong, with a real etcd and openssl.

It must never need a systemd: with one they run in tests/faults/test_bare_metal.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd_cluster import EtcdCluster, etcd_binary
from tests.support.job import ROOT

SCRIPTS = ROOT / "deploy" / "etcd"
PATH = f"{Path(etcd_binary()).parent}:{os.environ['PATH']}"


def run(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *args], env={**os.environ, "PATH": PATH, **variables}, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip


# ---- certificates ----


def test_a_certificate_without_an_authority_says_so(tmp_path: Path) -> None:
    done = run("certificates.sh", "client", str(tmp_path / "none"), "gpt")
    assert done.returncode == 1 and f"{tmp_path}/none has no authority" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("days", ["abc", "0", "-1", "1.5"])
def test_days_that_are_no_number_are_told_before_anything_is_made(days: str, tmp_path: Path) -> None:
    done = run("certificates.sh", "cluster", str(tmp_path / "pki"), "etcd1", DAYS=days)
    assert done.returncode == 2 and f"DAYS={days}: " in done.stderr
    assert not (tmp_path / "pki").exists()


def test_what_openssl_says_is_shown(tmp_path: Path) -> None:
    assert run("certificates.sh", "cluster", str(tmp_path), "etcd1").returncode == 0
    (tmp_path / "ca.key").write_text("no key")
    done = run("certificates.sh", "client", str(tmp_path), "gpt")
    assert done.returncode != 0 and re.search(r"CA private key|PEM|decoder", done.stderr), done.stderr


def test_a_member_with_an_address_is_found_by_it(tmp_path: Path) -> None:
    assert run("certificates.sh", "cluster", str(tmp_path), "10.0.0.1", "fd00::1", "etcd3").returncode == 0
    for name, told in (("10.0.0.1", "IP Address:10.0.0.1,"), ("fd00::1", "IP Address:FD00:0:0:0:0:0:0:1,"),
                       ("etcd3", "DNS:etcd3,")):  # fmt: skip
        text = subprocess.run(
            ["openssl", "x509", "-in", str(tmp_path / name / "member.crt"), "-noout", "-ext", "subjectAltName"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert told in text
    variables = (tmp_path / "fd00::1" / "member.env").read_text()
    assert "ETCD_ADVERTISE_CLIENT_URLS=https://[fd00::1]:2379\n" in variables
    assert "10.0.0.1=https://10.0.0.1:2380,fd00::1=https://[fd00::1]:2380,etcd3=https://etcd3:2380\n" in variables


# ---- backups ----


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    (tmp_path / "etcd").mkdir()
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def member(cluster: EtcdCluster, data: Path) -> Path:
    """A file of variables for a member whose data are there."""
    (data / "member" / "snap").mkdir(parents=True)
    (data / "member" / "snap" / "db").write_text("its data")
    path = data.parent / "member.env"
    path.write_text(
        f"ETCD_NAME=m0\nETCD_DATA_DIR={data}\nETCD_INITIAL_CLUSTER=m0=http://127.0.0.1:1\n"
        "ETCD_INITIAL_ADVERTISE_PEER_URLS=http://127.0.0.1:1\nETCD_INITIAL_CLUSTER_TOKEN=t\n"
    )
    return path


def test_a_snapshot_is_put_back_and_the_data_before_it_are_kept(cluster: EtcdCluster, tmp_path: Path) -> None:
    cluster.ctl("put", "a", "b")
    saved = run("backup.sh", str(tmp_path / "kept"), ETCDCTL_ENDPOINTS=cluster.endpoints[0])
    snapshot = saved.stdout.split()[-1]
    data = tmp_path / "data"
    variables = member(cluster, data)
    done = run("restore.sh", snapshot, str(variables))
    assert done.returncode == 0, done.stderr
    (kept,) = data.glob("before-*/member/snap/db")
    assert kept.read_text() == "its data" and (data / "member" / "snap" / "db").stat().st_size > 1000
    assert sorted(path.name[:6] for path in data.iterdir()) == ["before", "member"]


def test_a_snapshot_that_is_damaged_leaves_the_data_where_they_are(cluster: EtcdCluster, tmp_path: Path) -> None:
    """An etcd that is started then would find no data, and begin an empty cluster."""
    saved = run("backup.sh", str(tmp_path / "kept"), ETCDCTL_ENDPOINTS=cluster.endpoints[0])
    snapshot = Path(saved.stdout.split()[-1])
    snapshot.write_bytes(snapshot.read_bytes()[:-1000])
    data = tmp_path / "data"
    done = run("restore.sh", str(snapshot), str(member(cluster, data)))
    assert done.returncode != 0 and done.stderr
    assert (data / "member" / "snap" / "db").read_text() == "its data"
    assert [path.name for path in data.iterdir()] == ["member"]


@pytest.mark.parametrize("how", ["a process", "the unit"])
def test_an_etcd_that_runs_keeps_its_data(how: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    saved = run("backup.sh", str(tmp_path / "kept"), ETCDCTL_ENDPOINTS=cluster.endpoints[0])
    data = tmp_path / "data"
    variables, path = member(cluster, data), PATH
    if how == "the unit":
        (tmp_path / "systemctl").write_text("#!/bin/sh\necho activating; exit 3\n")
        (tmp_path / "systemctl").chmod(0o755)
        path = f"{tmp_path}:{PATH}"
    with open(data / "member" / "snap" / "db", "r+b") as db:
        if how == "a process":  # as etcd does it
            fcntl.flock(db, fcntl.LOCK_EX)
        done = run("restore.sh", saved.stdout.split()[-1], str(variables), PATH=path)
    assert done.returncode == 1 and "stop it first: systemctl stop swift-etcd" in done.stderr
    assert [one.name for one in data.iterdir()] == ["member"]


@pytest.mark.parametrize("keep", ["0", "-1", "all"])
def test_a_backup_keeps_at_least_itself(keep: str, tmp_path: Path) -> None:
    done = run("backup.sh", str(tmp_path / "kept"), KEEP=keep)
    assert done.returncode == 2 and f"KEEP={keep}: " in done.stderr and not (tmp_path / "kept").exists()


def test_a_snapshot_that_is_no_good_does_not_stay(cluster: EtcdCluster, tmp_path: Path) -> None:
    """Each hour would leave another one."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "etcdutl").write_text("#!/bin/sh\necho damaged >&2; exit 1\n")
    (tools / "etcdutl").chmod(0o755)
    kept = tmp_path / "kept"
    done = run("backup.sh", str(kept), ETCDCTL_ENDPOINTS=cluster.endpoints[0], PATH=f"{tools}:{PATH}")
    assert done.returncode == 1 and "damaged" in done.stderr and not list(kept.iterdir())
