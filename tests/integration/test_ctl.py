"""`swiftctl status` against a real etcd."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from swift_agent.ctl.main import cli
from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import GenerationRecord, JobRecord, NodeRecord, Owner
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.support.etcd_cluster import EtcdCluster


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd with two jobs, `gpt` and `bert`, and a key of somebody else."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster, EtcdStore(EtcdConfig(cluster.endpoints)) as store:
        for job, names in (("gpt", ("a", "b")), ("bert", ("[red]c",))):
            keys = Keys(job)
            owners = tuple(Owner(name, f"{name}.1", "host") for name in names)
            store.put(keys.job, encode(JobRecord(len(names), 2, "f", 1)))
            store.put(keys.generation, encode(GenerationRecord(1, "start", owners, 2, 0, "all there")))
            for name in names[:1]:
                store.put(keys.node(name), encode(NodeRecord(name, f"{name}.1", "host", 1, 2)))
        store.put("/elsewhere", b"not ours")
        yield ",".join(cluster.endpoints)


def swiftctl(*args: str, **environ: str) -> Result:
    variables: dict[str, str | None] = {"SWIFT_ETCD_ENDPOINTS": None, "COLUMNS": "120", **environ}
    return CliRunner().invoke(cli, list(args), env=variables)


def test_one_job_as_json(endpoints: str) -> None:
    result = swiftctl("status", "gpt", "--rdzv-endpoint", endpoints, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["job"], found["state"], found["num_nodes"], found["world_size"]) == ("gpt", "training", 2, 4)
    assert [entry["node"] for entry in found["nodes"]] == ["a"]
    assert [gap["last_owner"] for gap in found["missing_slots"]] == ["b"]


def test_all_jobs(endpoints: str) -> None:
    result = swiftctl("status", "--json", SWIFT_ETCD_ENDPOINTS=endpoints)
    assert [job["job"] for job in json.loads(result.stdout)] == ["bert", "gpt"]
    shown = swiftctl("status", SWIFT_ETCD_ENDPOINTS=endpoints).stdout
    assert "gpt" in shown and "1 of 2" in shown and "elsewhere" not in shown


def test_one_job_for_people(endpoints: str) -> None:
    shown = swiftctl("status", "gpt", "--rdzv-endpoint", endpoints).stdout
    assert "job gpt: training, generation 1" in shown and "missing" in shown
    # Names are shown as they are, not read as markup.
    assert "[red]c" in swiftctl("status", "bert", "--rdzv-endpoint", endpoints).stdout


def test_mistakes(endpoints: str, free_port: object) -> None:
    result = swiftctl("status", "nobody", "--rdzv-endpoint", endpoints)
    assert result.exit_code == 1 and "no job 'nobody'" in result.stderr
    result = swiftctl("status")
    assert result.exit_code == 2 and "SWIFT_ETCD_ENDPOINTS" in result.stderr
    result = swiftctl("status", "--rdzv-endpoint", "a:port")
    assert result.exit_code == 2 and "'a:port'" in result.stderr
    assert callable(free_port)
    result = swiftctl("status", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    assert result.exit_code == 1 and "127.0.0.1" in result.stderr and "Traceback" not in result.output
