"""Jobs of the chart of deploy/kubernetes on a real control plane, with pods that are processes in their own namespaces
(`tests/support/kube_cluster.py`): killed, evicted, told to go, and with their machines.

The control plane is 1.20: the chart is rendered without what that lacks (Indexed, podFailurePolicy, successPolicy); its
etcd has three members with TLS, without volumes of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.helm import CHART, GENERATED, LEAST, MANIFESTS, PATH, helm, merged, render
from tests.support.job import ROOT, SCRIPT
from tests.support.kube_api import ApiError
from tests.support.kube_cluster import NAMESPACE, KubeCluster, why_not
from tests.support.pages import command, put_in

ITERATIONS = 240
PAGE = "docs/kubernetes.md"

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(300)]


@pytest.fixture
def kube() -> Iterator[KubeCluster]:
    directory = Path(tempfile.mkdtemp(prefix="kube"))
    try:
        with KubeCluster(directory, 4) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Job:
    """One release of the chart, with two workers in each pod."""

    def __init__(self, kube: KubeCluster, results: Path, **orders: Any) -> None:
        self.kube, self.results = kube, results
        results.chmod(0o777)  # pods are other users
        told = {"dir": "/results", "iterations": ITERATIONS, "pace_s": 1.0, **orders}
        self._values: dict[str, Any] = {
            "nodes": 2, "spares": 1, "nprocPerNode": 2, "image": "this-machine", "script": [str(SCRIPT)],
            "job": {"indexed": False, "podFailurePolicy": False, "successPolicy": False},
            "nodeGoneSeconds": 1, "terminationGracePeriodSeconds": 50, "preemptGraceSeconds": 25,
            "shm": {"sizeLimit": "1Gi"}, "etcd": {"persistence": {"enabled": False}},
            "env": [
                {"name": "FAULT_ORDERS", "value": json.dumps(told)},
                {"name": "PET_START_METHOD", "value": "forkserver"},
            ],
            "volumes": [{"name": "results", "hostPath": {"path": str(results)}}],
            "volumeMounts": [{"name": "results", "mountPath": "/results"}],
        }  # fmt: skip

    def create(self, values: dict[str, Any] | None = None) -> Job:
        things = render(merged(merged(self._values, GENERATED), values or {}), NAMESPACE)
        self.kube.create(things)
        return self

    def train(self, values: dict[str, Any] | None = None) -> Job:
        """Until all ranks have trained for a while, and all pods are ready."""
        return self.create(values).wait_for_iteration(6).wait_until_ready(3 if values is None else 2)

    def text(self) -> str:
        """What all agents have said, of pods that are gone, too."""
        paths = sorted((self.kube.directory / "log").glob("train-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths if "-etcd-" not in path.name)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Job:
        self.kube.wait(condition, what, timeout_s)
        return self

    def iterations(self, rank: int) -> list[int]:
        path = self.results / f"calls.{rank}"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_iteration(self, number: int) -> Job:
        return self.wait(lambda: all(number in self.iterations(rank) for rank in range(4)), f"iteration {number}")

    def ready(self) -> set[str]:
        ready = {"type": "Ready", "status": "True"}
        return {
            name for name, pod in self.kube.pods().items()
            if "deletionTimestamp" not in pod["metadata"]
            and any(ready.items() <= one.items() for one in pod["status"].get("conditions", ()))
        }  # fmt: skip

    def wait_until_ready(self, number: int) -> Job:
        return self.wait(lambda: len(self.ready()) == number, f"{number} pods are ready")

    def pod_of_slot(self, slot: int) -> str:
        """The pod that the agents name as the one that has started these ranks last."""
        said = rf"\[swift-run (train-\w+) [^]]*\] generation (\d+): slot {slot} starts ranks"
        pod, _ = max(re.findall(said, self.text()), key=lambda found: int(found[1]))
        return str(pod)

    def go_on(self) -> Job:
        """At full speed."""
        (self.results / "free").touch()
        return self

    def conditions(self) -> set[str]:
        found = self.kube.get("Job", "train").get("status", {}).get("conditions", ())
        return {one["type"] for one in found if one["status"] == "True"}

    def end(self) -> set[str]:
        self.go_on().wait(self.conditions, "the end of the job")
        return self.conditions()

    def exit_codes(self) -> list[int]:
        """Of pods that are not deleted."""
        states = [pod["status"]["containerStatuses"][0]["state"] for pod in self.kube.pods().values()]
        return sorted(state["terminated"]["exitCode"] for state in states if "terminated" in state)

    def assert_result(self, expected: str, *, repeated: bool) -> None:
        found = {json.loads(path.read_text())["hash"] for path in self.results.glob("result.*.json")}
        assert found == {expected}, self.text()
        every = [self.iterations(rank) for rank in range(4)]
        assert [sorted(set(one)) for one in every] == [list(range(ITERATIONS))] * 4
        assert repeated or every == [list(range(ITERATIONS))] * 4, self.text()


def test_a_pod_is_killed(kube: KubeCluster, tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    job = Job(kube, tmp_path).train()
    lost, before = job.pod_of_slot(1), set(kube.pods())
    kube.kill(lost)
    job.wait(lambda: "recovered: generation 2" in job.text(), "the recovery")
    job.wait(lambda: set(kube.pods()) - before, "another pod").wait_until_ready(3)
    assert lost not in job.ready()
    told = kube.run_in(job.pod_of_slot(1), "swiftctl", "status", f"{NAMESPACE}-train")
    assert set(re.findall(r"^(?:0|1|spare) +(\S+)", told, re.M)) == job.ready(), told
    assert job.end() == {"Complete"}, kube.text()
    assert job.exit_codes() == [0, 0, 0, 137]
    job.assert_result(undisturbed(iterations=ITERATIONS), repeated=True)


def test_a_machine_is_gone_and_comes_back(
    kube: KubeCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """With a member of etcd on it, perhaps."""
    job = Job(kube, tmp_path).train()
    lost, before = job.pod_of_slot(1), set(kube.pods())
    node = kube.pods()[lost]["spec"]["nodeName"]
    began_s = time.monotonic()
    kube.crash(node)
    job.wait(lambda: "recovered: generation 2" in job.text(), "the recovery")
    assert time.monotonic() - began_s < 8.0 and node in kube.ready_nodes(), "the controllers have noticed it"
    job.wait(lambda: set(kube.pods()) - before, "another pod").wait_until_ready(3)
    kube.start_node(node)
    job.wait(lambda: lost not in kube.pods(), "the lost pod is gone for good")
    assert job.end() == {"Complete"}, kube.text()
    job.assert_result(undisturbed(iterations=ITERATIONS), repeated=True)


def test_evictions_wait_for_a_warm_spare(
    kube: KubeCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    job = Job(kube, tmp_path).train()
    first, second = job.pod_of_slot(1), job.pod_of_slot(0)
    kube.evict(first)
    with pytest.raises(ApiError, match="disruption budget"):
        kube.evict(second)
    job.wait(lambda: f"node {first} was drained" in job.text(), "the drain").wait_until_ready(3)

    def is_evicted() -> bool:
        try:
            kube.evict(second)
        except ApiError as error:
            assert error.code == 429
            return False
        return True

    job.wait(is_evicted, "the second eviction")
    job.wait(lambda: f"node {second} was drained" in job.text(), "the drain").wait_until_ready(3)
    assert job.end() == {"Complete"}, kube.text()
    job.assert_result(undisturbed(iterations=ITERATIONS), repeated=False)


@pytest.mark.long
@pytest.mark.parametrize("when", ["it starts", "it trains"])
def test_a_pod_is_told_to_go_and_there_is_no_spare(when: str, kube: KubeCluster, tmp_path: Path) -> None:
    """When it starts its first process does not catch signals yet, and would never see one: the preStop hook holds it
    back."""
    job = Job(kube, tmp_path).train({"spares": 0})
    known = set(kube.pods())
    kube.kill(job.pod_of_slot(1))
    job.wait(lambda: set(kube.pods()) - known, "another pod")
    [pod] = set(kube.pods()) - known
    if when == "it starts":
        job.wait(lambda: "running" in json.dumps(kube.pods()[pod]["status"]), "its start")
    else:
        job.wait(lambda: pod in job.ready(), "it is ready")
    began_s = time.monotonic()
    kube.delete("Pod", pod)
    job.wait(lambda: pod not in kube.pods(), "it is gone")
    assert time.monotonic() - began_s < 45.0  # of 50 until SIGKILL
    assert f"{pod}: ended with 75" in kube.text(), kube.text()


@pytest.mark.long
def test_a_replacement_takes_the_vacant_place(
    kube: KubeCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    job = Job(kube, tmp_path).train({"spares": 0})
    lost = job.pod_of_slot(0)
    kube.kill(lost)
    job.wait(lambda: "recovered: generation 2" in job.text(), "the recovery")
    assert job.pod_of_slot(0) != lost
    assert job.end() == {"Complete"}, kube.text()
    job.assert_result(undisturbed(iterations=ITERATIONS), repeated=True)


@pytest.mark.long
def test_all_pods_are_told_to_go_and_the_job_goes_on_later(
    kube: KubeCluster, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """What `suspend` does, which 1.20 lacks."""
    job = Job(kube, tmp_path, checkpoint=1000).train()
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/train"

    def size(number: int) -> None:
        kube.api("PATCH", path, {"spec": {"parallelism": number}}, "application/merge-patch+json")

    size(0)
    job.wait(lambda: not kube.pods(), "all are gone")
    told = re.search(r"all that was trained is in the checkpoint of iteration (\d+)", job.text())
    assert told, job.text()
    size(3)
    assert job.end() == {"Complete"}, kube.text()
    assert f"all ranks begin with the checkpoint of iteration {told[1]}" in job.text()
    job.assert_result(undisturbed(iterations=ITERATIONS), repeated=False)


@pytest.mark.long
def test_a_script_that_fails_fails_the_job(kube: KubeCluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('of the script')\n")
    job = Job(kube, tmp_path).create({"script": ["/results/fails.py"], "job": {"restarts": 0}})
    job.wait(job.conditions, "the end of the job")
    assert job.conditions() == {"Failed"}, kube.text()
    assert "ValueError: of the script" in job.text()
    job.wait(lambda: not [1 for pod in kube.pods().values() if pod["status"]["phase"] == "Running"], "all have ended")
    assert 1 in job.exit_codes() and set(job.exit_codes()) <= {1, 75}, job.exit_codes()


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """On a cluster without machines: its pods wait for one."""
    lacks = ("job.indexed", "job.podFailurePolicy", "job.successPolicy", "podDisruptionBudget.enabled")
    with KubeCluster(tmp_path, 0) as kube:
        environment = {
            **os.environ, "PATH": PATH, "KUBECONFIG": str(kube.directory / "kubeconfig"), "HOME": str(tmp_path),
        }  # fmt: skip

        def run(line: str) -> str:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            return done.stdout

        made = run(put_in(command(PAGE, "secrets.sh"), {"secrets.sh": str(MANIFESTS / "secrets.sh")}))
        assert made.count("secret/train-") == 3 and kube.get("Secret", "train-job-secret")["data"]
        # 1.20 does not have all that the chart makes by default.
        told = run(" ".join([command(PAGE, "helm install"), *(f"--set {name}=false" for name in lacks)]))
        assert command(PAGE, "kubectl -n training exec").partition(" -- ")[2] in told
        kube.wait(lambda: len(kube.pods()) == 17, "its pods")
        before = set(kube.pods())
        run(command(PAGE, "kubectl delete pod") + f" {min(before)} -n training")
        kube.wait(lambda: len(set(kube.pods()) - before) == 1, "another one")
        run(command(PAGE, "kubectl -n training delete job"))
        assert not kube.pods()
        run(command(PAGE, "helm uninstall") + " gpt --namespace training")
        with pytest.raises(ApiError, match="not found"):
            kube.get("Secret", "gpt-job-secret")


@pytest.mark.long
def test_helm_installs_a_job_and_keeps_its_secrets(kube: KubeCluster, tmp_path: Path) -> None:
    """An upgrade that made others would cut running pods off from etcd. Without budgets, which 1.20 has elsewhere."""
    lacks = {"job": {"indexed": False, "podFailurePolicy": False, "successPolicy": False}}
    values = merged(merged(LEAST, GENERATED), {**lacks, "podDisruptionBudget": {"enabled": False}})
    environment = {"KUBECONFIG": str(kube.directory / "kubeconfig"), "HOME": str(tmp_path)}
    where = ("train", "--namespace", NAMESPACE)

    def secrets() -> list[Any]:
        names = ("train-job-secret", "train-etcd-server", "train-etcd-client")
        return [kube.get("Secret", name)["data"] for name in names]

    found = []
    for verb in ("install", "upgrade"):
        done = helm(verb, *where[:1], str(CHART), *where[1:], "-f", "-", stdin=json.dumps(values), env=environment)
        assert done.returncode == 0 and "swiftctl status training-train" in done.stdout, done.stderr
        found.append(secrets())
    assert found[0] == found[1]
    assert kube.get("Job", "train")["spec"]["completions"] == 3
    # One of two certificates is gone, and nobody can sign another that the other side would take.
    kube.delete("Secret", "train-etcd-client")
    done = helm("upgrade", *where[:1], str(CHART), *where[1:], "-f", "-", stdin=json.dumps(values), env=environment)
    assert done.returncode != 0 and "secret train-etcd-client is gone; delete train-etcd-server, too" in done.stderr
    done = helm("uninstall", *where, env=environment)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ApiError, match="not found"):
        secrets()
