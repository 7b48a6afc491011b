"""A plug-in in the place of our client of HDFS: files in a real HDFS by Hadoop's own, `examples/hdfs_client`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import hdfs_native
import pytest

from swift_logging_store.stores import helper
from swift_logging_store.stores.hdfs import ENV_CLIENT
from swift_logging_store.stores.open import open_store
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.transfer.state_file import Written
from tests.support.hdfs_cluster import CLASSPATH, HdfsCluster, why_not
from tests.support.stores import (
    check_files_come_and_go,
    check_generations_are_kept_apart,
    first_part,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "hdfs_client"
LIBRARY = CLASSPATH.with_name("libhdfs.so")
_BUILD = f"no {LIBRARY}: run examples/hdfs_client/build_libhdfs.sh .cache/hdfs"
_missing = why_not() or ("" if LIBRARY.exists() else _BUILD)
pytestmark = pytest.mark.long
needs_library = pytest.mark.skipif(bool(_missing), reason=_missing)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a node has it on which Hadoop is installed."""
    monkeypatch.setenv(ENV_CLIENT, "libhdfs_client")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    monkeypatch.syspath_prepend(EXAMPLE)
    if not _missing:
        monkeypatch.setenv("ARROW_LIBHDFS_DIR", str(LIBRARY.parent))
        monkeypatch.setenv("CLASSPATH", ":".join(CLASSPATH.read_text().split()))
        java = shutil.which("java")
        assert java is not None
        monkeypatch.setenv("JAVA_HOME", str(Path(java).resolve().parents[1]))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("hdfs"), num_data_nodes=2) as made:
        yield made


@needs_library
def test_files_come_and_go(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.url}/some/files")
    check_files_come_and_go(store)
    with pytest.raises(ZeroDivisionError), store.writing("a/b") as stream:
        stream.write(b"%d" % (1 // 0))
    assert store.names("a") == []


@needs_library
def test_generations_are_kept_apart(cluster: HdfsCluster) -> None:
    check_generations_are_kept_apart(open_store(f"{cluster.url}/apart"))


@needs_library
def test_checkpoints_come_back_and_old_ones_go(cluster: HdfsCluster) -> None:
    directory = CheckpointDirectory(open_store(f"{cluster.url}/run"))
    content = os.urandom(9 << 20)  # in several requests
    for iteration in (10, 20, 30):
        path = directory.new_part(iteration, 0)
        directory.store.put(path, content)
        part = Part(path.rpartition("/")[2], (0,), Written(len(content), iteration))
        directory.check_parts(Checkpoint(iteration, 1, (part,)))
        directory.commit(Checkpoint(iteration, 1, (part,)))
    assert directory.remove(keep=2, newest=30) == [10] and directory.committed() == [20, 30]
    with directory.store.reading(first_part(directory, 30)) as stream:
        assert stream.read() == content


@needs_library
def test_a_frozen_name_node_and_a_dead_data_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HdfsCluster(tmp_path / "hdfs", num_data_nodes=2) as cluster:
        store = open_store(f"{cluster.url}/lost")
        content = os.urandom(5 << 20)
        store.put("a", content)
        cluster.freeze("nn")
        try:
            with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="no answer from HDFS within 2 s"):
                patch.setattr(helper, "ANSWER_TIMEOUT_S", 2.0)
                store.put("b", content)
        finally:
            cluster.thaw("nn")
        cluster.kill("dn0")
        for number in range(4):
            store.put(f"c{number}", content)
        for name in ("a", "c0", "c3"):
            with store.reading(name) as stream:
                assert stream.read() == content
        cluster.kill("nn")
        # Arrow takes any error for a file that is not there: a job would start over beside its checkpoints.
        for ask in (store.names, lambda: store.size("a"), lambda: store.exists("nothing"), lambda: store.remove("a")):
            with pytest.raises(ConnectionError, match=r"/lost.*: libhdfs has failed; why is in Java's trace"):
                ask()
        with pytest.raises(ConnectionError), store.reading("a"):
            raise AssertionError("it cannot be read")


@needs_library
def test_who_may_not_write_is_told_so(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(f"{cluster.url}/mine").put("run/a", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")
    with pytest.raises(OSError, match=r"/mine/run/b.*Permission denied"):
        open_store(f"{cluster.url}/mine").put("run/b", b"y")


@needs_library
def test_who_may_not_look_is_not_told_that_there_is_nothing(
    cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{cluster.url}/hidden")
    store.put("run/a", b"x")
    hdfs_native.Client(cluster.url).set_permission("/hidden/run", 0o000)
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")
    store = open_store(f"{cluster.url}/hidden")
    for ask in (lambda: store.names("run"), lambda: store.exists("run/a"), lambda: store.remove("run/a")):
        with pytest.raises(OSError, match=r"/hidden/run.*Permission denied"):
            ask()


@needs_library
def test_the_configuration_of_the_site_counts(
    cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = "<property><name>dfs.replication</name><value>1</value></property>"
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{setting}</configuration>")
    monkeypatch.setenv("CLASSPATH", f"{tmp_path}:{os.environ['CLASSPATH']}")
    open_store(f"{cluster.url}/site").put("a", b"x")
    assert hdfs_native.Client(cluster.url).get_file_info("/site/a").replication == 1


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("hdfs://MyCluster/runs", ("MyCluster", 0)), ("hdfs://node1", ("node1", 0)),
        ("hdfs://Node1:8020/runs:2", ("Node1", 8020)), ("hdfs://[::1]/a", ("[::1]", 0)),
        ("hdfs://[::1]:8020/a", ("[::1]", 8020)),
    ],
)  # fmt: skip
def test_names_are_taken_as_they_are_written(url: str, address: tuple[str, int]) -> None:
    from libhdfs_client import address_of

    assert address_of(url) == address


def test_no_jars_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLASSPATH", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    began_s = time.monotonic()
    with pytest.raises(OSError, match=r"no jars of Hadoop: set HADOOP_HOME, or CLASSPATH"):
        open_store("hdfs://127.0.0.1:1/run").names()
    assert time.monotonic() - began_s < 10.0
