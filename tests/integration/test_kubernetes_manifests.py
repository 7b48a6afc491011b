"""What the chart of deploy/kubernetes renders, for many values: as several versions of Kubernetes understand it, and as
docs/kubernetes.md says it. The plain manifests are the chart's."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_agent.launch.options import get_args_parser
from swift_agent.launch.outcome import EXIT_CODES
from tests.support.helm import (
    CHART,
    GENERATED,
    LEAST,
    MANIFESTS,
    PATH,
    helm,
    merged,
    objects_of,
    render,
    template,
    why_no_helm,
    wrong_with,
)
from tests.support.job import ROOT
from tests.support.pages import calls, command, put_in, words

pytestmark = pytest.mark.skipif(bool(why_no_helm()), reason=why_no_helm())

PAGE = ROOT / "docs" / "kubernetes.md"
VERSIONS = ("1.29", "1.33", "1.37")
# Fields of a Job that came later: a cluster before that is given values without them.
SINCE = {"1.29": {"job": {"successPolicy": False}}}
VARIANTS: dict[str, dict[str, Any]] = {
    "least": {},
    "certificates by Helm": GENERATED,
    "jobset": {"kind": "JobSet"},
    "runtime": {"kind": "TrainingRuntime", "image": "", "script": []},
    "runtime of all namespaces": {"kind": "ClusterTrainingRuntime", "options": ["--strategy", "log"]},
    "old cluster": {"job": {"indexed": False, "podFailurePolicy": False, "successPolicy": False}},
    "elastic": {"nodes": 4, "minNodes": 2, "spares": 0, "nprocPerNode": 8},
    "an existing etcd": {
        "etcd": {
            "enabled": False, "image": "", "endpoints": ["https://a:2379", "https://b:2379"],
            "tls": {"clientSecret": "etcd"}, "clientCertificate": False, "user": "swift", "passwordSecret": "login",
        }
    },
    "an existing etcd without TLS": {
        "etcd": {"enabled": False, "image": "", "endpoints": ["a:2379"], "tls": {"clientSecret": ""}}
    },
    "certificates by cert-manager": {
        "etcd": {"tls": {"source": "certManager", "serverSecret": "", "clientSecret": ""}}
    },
    "an issuer": {
        "etcd": {
            "tls": {
                "source": "certManager", "serverSecret": "", "clientSecret": "",
                "issuer": {"name": "site", "kind": "ClusterIssuer"},
            }
        }
    },
    "everything": {
        "nodes": 16, "spares": 2, "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "1Ti"}},
        "rdma": {"resource": "rdma/hca", "count": 4}, "hostNetwork": True, "antiAffinity": "required",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway",
             "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "swift-agent"}}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"pool": "train"}, "priorityClassName": "high", "schedulerName": "own",
        "imagePullSecrets": [{"name": "pull"}], "podLabels": {"team": "a"}, "podAnnotations": {"note": "b"},
        "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}], "options": ["--preload", "transformers"],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}], "tmp": {"sizeLimit": "100Gi"},
        "job": {"suspend": True, "activeDeadlineSeconds": 86400, "labels": {"kueue.x-k8s.io/queue-name": "q"}},
        "metrics": {"port": 9500, "podMonitor": {"enabled": True, "labels": {"release": "p"}}},
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
        "etcd": {"members": 5, "persistence": {"storageClassName": "fast"}, "antiAffinity": "preferred"},
        "operators": [{"kind": "Group", "name": "ml", "apiGroup": "rbac.authorization.k8s.io"}],
    },
    "little": {
        "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}, "antiAffinity": "none",
        "serviceAccount": {"create": False, "name": "default"}, "jobSecret": {"existingSecret": "mine"},
        "etcd": {"members": 1, "persistence": {"enabled": False}},
    },
}  # fmt: skip


def pod_templates(things: dict[tuple[str, str], Any]) -> Iterator[dict[str, Any]]:
    """Of the pods that train."""
    for (kind, _), thing in things.items():
        if kind == "Job":
            yield thing["spec"]["template"]
        elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
            spec = thing["spec"] if kind == "JobSet" else thing["spec"]["template"]["spec"]
            yield from (job["template"]["spec"]["template"] for job in spec["replicatedJobs"])


def pod_of(things: dict[tuple[str, str], Any]) -> dict[str, Any]:
    [pod] = pod_templates(things)
    spec: dict[str, Any] = pod["spec"]
    return spec


def variables(things: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Their values, or the field that they come from."""
    return {
        one["name"]: one["value"] if "value" in one else one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in pod_of(things)["containers"][0]["env"]
    }


# ---- what Kubernetes says ----


def test_helm_finds_nothing_wrong() -> None:
    done = helm("lint", str(CHART), "--strict", "--values", "-", stdin=json.dumps(merged(LEAST, {})))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cluster_takes_it(variant: str, version: str) -> None:
    values = VARIANTS[variant]
    if version in SINCE and "job" not in values:
        values = {**values, **SINCE[version]}
    elif version in SINCE:
        values = {**values, "job": {**values["job"], **SINCE[version]["job"]}}
    things = render(values)
    wrong = {name: why for name, thing in things.items() if (why := wrong_with(thing, version))}
    assert things and not wrong


@pytest.mark.parametrize(("kind", "at", "value"), [
    ("Job", ("spec", "podFailurePolicy", "rules", 0, "action"), 7),
    ("Job", ("spec", "template", "spec", "containers", 0, "livenessprobe"), {}),
    ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "backofflimit"), 1),
    ("JobSet", ("spec", "failurePolicy", "maxrestarts"), 1),
    ("ClusterTrainingRuntime", ("spec", "mlPolicy", "torch", "procs"), "auto"),
    ("StatefulSet", ("spec", "serviceName"), ["a"]),
])  # fmt: skip
def test_what_a_cluster_would_not_take_is_found(kind: str, at: tuple[Any, ...], value: Any) -> None:
    things = render({"kind": kind if kind != "StatefulSet" else "Job"})
    thing = next(thing for (found, _), thing in things.items() if found == kind)
    assert not wrong_with(thing, "1.37")
    part = thing
    for step in at[:-1]:
        part = part[step]
    part[at[-1]] = value
    assert wrong_with(thing, "1.37")


# ---- what the pages say ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_pod_can_do_more_than_it_needs(variant: str) -> None:
    things = render(VARIANTS[variant])
    pods = [pod_of(things), *(thing["spec"]["template"]["spec"] for (kind, _), thing in things.items()
                              if kind == "StatefulSet")]  # fmt: skip
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert set(rights["capabilities"]) == {"drop"} or variant == "everything"
            assert not [one for one in container.get("env", ()) if "secretKeyRef" in one.get("valueFrom", {})]
            assert "envFrom" not in container
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
        assert "hostPID" not in pod and "hostIPC" not in pod
        assert pod.get("hostNetwork", False) is (variant == "everything" and pod is pods[0])


def test_all_rights_in_the_api_are_those_of_people() -> None:
    assert not [kind for kind, _ in render() if "Role" in kind]
    things = render(VARIANTS["everything"])
    rules = things["Role", "train-operator"]["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch", "create"}
    assert not [rule for rule in rules if "secrets" in rule["resources"] or "*" in rule["resources"]]
    assert things["RoleBinding", "train-operator"]["subjects"][0]["name"] == "ml"


@pytest.mark.parametrize("variant", VARIANTS)
def test_variables_are_those_that_swift_run_reads(variant: str) -> None:
    options = {f"PET_{action.dest.upper()}" for action in get_args_parser()._actions}
    known = {
        "SWIFT_POD", "SWIFT_NAMESPACE", "SWIFT_POD_IP", "SWIFT_JOB",  # of the manifest itself
        "SWIFT_JOB_SECRET_FILE", "SWIFT_ETCD_ENDPOINTS", "SWIFT_ETCD_CACERT", "SWIFT_ETCD_CERT", "SWIFT_ETCD_KEY",
        "SWIFT_ETCD_USER", "SWIFT_ETCD_PASSWORD_FILE", "HOME", "USER", "NCCL_SOCKET_IFNAME",
    }  # fmt: skip
    assert set(variables(render(VARIANTS[variant]))) <= options | known


def test_each_pod_is_a_node_of_its_own() -> None:
    found = variables(render())
    assert found["PET_NODE_ID"] == "$(SWIFT_POD)" and found["SWIFT_POD"] == "metadata.name"
    assert found["PET_LOCAL_ADDR"] == found["PET_METRICS_ADDR"] == "$(SWIFT_POD_IP)"
    assert found["PET_NNODES"] == "2" and found["PET_SPARES"] == "1"
    assert found["PET_NODE_RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["PET_RDZV_ID"] == "$(SWIFT_NAMESPACE)-train"
    elastic = variables(render(VARIANTS["elastic"]))
    assert elastic["PET_NNODES"] == "2:4" and elastic["PET_NPROC_PER_NODE"] == "8"
    assert "PET_NODE_RANK" not in variables(render(VARIANTS["old cluster"]))


@pytest.mark.parametrize("kind", ["Job", "JobSet", "ClusterTrainingRuntime"])
def test_exit_codes_end_a_job_or_begin_it_again(kind: str) -> None:
    things = render({"kind": kind, "nodes": 4, "spares": 2, "job": {"restarts": 2}})
    thing = next(thing for (found, _), thing in things.items() if found == kind)
    spec = thing["spec"]
    if kind != "Job":
        spec = (spec if kind == "JobSet" else spec["template"]["spec"])["replicatedJobs"][0]["template"]["spec"]
    rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]]
    code = EXIT_CODES
    assert rules == [
        ("FailJob", sorted([code["script"], code["usage"], code["operator"]])),
        ("Ignore", [code["preempted"]]),
        ("Ignore", None),
        ("Count", [code["infrastructure"]]),
    ]
    # A pod that was drained by order is made again as well, and is no success of the Job.
    assert variables(things)["PET_DRAINED_EXIT_CODE"] == str(code["preempted"])
    assert spec["parallelism"] == spec["completions"] == 6 and spec["backoffLimit"] == 12
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which podFailurePolicy needs
    if kind == "Job":
        assert spec["successPolicy"] == {"rules": [{"succeededCount": 4}]}
    else:
        jobs = thing["spec"] if kind == "JobSet" else thing["spec"]["template"]["spec"]
        assert jobs["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_probes_ask_the_agent() -> None:
    [container] = pod_of(render({"probes": {"startSeconds": 60, "aliveSeconds": 30}}))["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 60
    assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] == 30
    assert container["ports"] == [{"name": "metrics", "containerPort": 9108, "protocol": "TCP"}]


@pytest.mark.parametrize(("mask", "caught"), [(1 << 14, True), (0x10002, False), (0x4A02, True), (0xBFFF, False)])
def test_the_order_to_drain_waits_for_its_handler(mask: int, caught: bool) -> None:
    command = pod_of(render())["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    pattern = re.findall(r"grep -qE '(.*?)'", command)[0]
    done = subprocess.run(["grep", "-qE", pattern], input=f"SigIgn:\t0\nSigCgt:\t{mask:016x}\n", text=True, check=False)
    assert (done.returncode == 0) is caught


def test_a_node_may_wait_for_a_spare_before_it_is_killed() -> None:
    things = render()
    grace = float(variables(things)["PET_PREEMPT_GRACE"])
    assert pod_of(things)["terminationGracePeriodSeconds"] >= grace + 25  # 15 s more where etcd does not answer


@pytest.mark.parametrize(("nodes", "spares", "stay"), [(2, 1, 2), (2, 0, 1), (16, 2, 16), (4, 3, 4)])
def test_so_many_pods_may_be_evicted_as_there_are_spares(nodes: int, spares: int, stay: int) -> None:
    things = render({"nodes": nodes, "spares": spares})
    assert things["PodDisruptionBudget", "train"]["spec"]["minAvailable"] == stay
    assert things["PodDisruptionBudget", "train-etcd"]["spec"]["minAvailable"] == 2


def test_etcd_is_three_members_that_know_each_other() -> None:
    things = render()
    etcd = things["StatefulSet", "train-etcd"]
    arguments = etcd["spec"]["template"]["spec"]["containers"][0]["args"]
    hosts = [f"train-etcd-{number}.train-etcd.training.svc" for number in range(3)]
    members = ",".join(f"train-etcd-{number}=https://{host}:2380" for number, host in enumerate(hosts))
    assert f"--initial-cluster={members}" in arguments and "--client-cert-auth" in arguments
    assert "--peer-client-cert-auth" in arguments and not [one for one in arguments if "client-urls=http:" in one]
    assert variables(things)["SWIFT_ETCD_ENDPOINTS"] == ",".join(f"https://{host}:2379" for host in hosts)
    assert etcd["spec"]["replicas"] == 3 and etcd["spec"]["serviceName"] == "train-etcd"
    assert things["Service", "train-etcd"]["spec"]["publishNotReadyAddresses"] is True


def test_certificates_are_good_for_servers_and_for_clients(tmp_path: Path) -> None:
    things = render(GENERATED)
    for who in ("server", "client"):
        for name, value in things["Secret", f"train-etcd-{who}"]["data"].items():
            (tmp_path / f"{who}.{name}").write_bytes(base64.b64decode(value))
    hosts = ["localhost", *(f"train-etcd-{number}.train-etcd.training.svc" for number in range(3))]

    def openssl(*arguments: str) -> str:
        return subprocess.run(
            ["openssl", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    for who, purposes in (("server", ("sslserver", "sslclient")), ("client", ("sslclient",))):
        for purpose in purposes:
            assert "OK" in openssl("verify", "-CAfile", f"{who}.ca.crt", "-purpose", purpose, f"{who}.tls.crt")
    for host in hosts:
        assert "OK" in openssl("verify", "-CAfile", "client.ca.crt", "-verify_hostname", host, "server.tls.crt")
    # etcd compares the names of a client with its address, if it has any.
    assert "DNS:" not in openssl("x509", "-in", "client.tls.crt", "-noout", "-text")


def test_an_existing_etcd_is_only_referred_to() -> None:
    things = render(VARIANTS["an existing etcd"])
    assert not [name for name in things if "etcd" in name[1]]
    found = variables(things)
    assert found["SWIFT_ETCD_ENDPOINTS"] == "https://a:2379,https://b:2379" and "SWIFT_ETCD_CERT" not in found
    secrets = {one["secret"]["secretName"] for one in pod_of(things)["volumes"] if "secret" in one}
    assert secrets == {"etcd", "login", "train-job-secret"}
    assert "SWIFT_ETCD_CACERT" not in variables(render(VARIANTS["an existing etcd without TLS"]))


def test_only_pods_of_the_job_reach_its_ports_and_etcd() -> None:
    things = render(VARIANTS["least"] | {"networkPolicy": {"metricsFrom": [{"podSelector": {}}]}})
    job, etcd = (things["NetworkPolicy", name]["spec"] for name in ("train", "train-etcd"))
    labels = {kind: pod["metadata"]["labels"] for kind, pod in (
        ("job", next(pod_templates(things))), ("etcd", things["StatefulSet", "train-etcd"]["spec"]["template"])
    )}  # fmt: skip
    assert job["podSelector"]["matchLabels"] == labels["job"] and etcd["podSelector"]["matchLabels"] == labels["etcd"]
    inside, metrics = job["ingress"]
    assert inside["from"] == [{"podSelector": {"matchLabels": labels["job"]}}] and "ports" not in inside
    assert [one["port"] for one in metrics["ports"]] == [9108]
    clients, peers, of_etcd = etcd["ingress"]
    assert clients["from"] == [{"podSelector": {"matchLabels": labels["job"]}}]
    assert [one["port"] for one in clients["ports"]] == [2379]
    assert peers["from"] == [{"podSelector": {"matchLabels": labels["etcd"]}}]
    assert [one["port"] for one in of_etcd["ports"]] == [2381]


def test_labels_of_two_jobs_select_no_pod_of_each_other() -> None:
    things = render()
    for _, thing in things.items():
        selector = thing.get("spec", {}).get("selector") or thing.get("spec", {}).get("podSelector")
        if selector:
            labels = selector.get("matchLabels", selector)
            assert labels["app.kubernetes.io/instance"] == "train" and "app.kubernetes.io/component" in labels


def test_a_trainjob_gives_the_rest() -> None:
    """PET_NNODES counts all pods of a TrainJob."""
    things = render({"kind": "ClusterTrainingRuntime", "image": "", "script": [], "nodes": 4, "spares": 1})
    runtime = things["ClusterTrainingRuntime", "train"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 5
    [container] = pod_of(things)["containers"]
    assert container["name"] == "node" and container["command"][0] == "sh"
    assert not {"PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR"} & set(variables(things))
    script = container["command"][2].replace("exec swift-run", "echo")
    done = subprocess.run(
        ["sh", "-c", script, "x", "train.py", "a b"], capture_output=True, text=True, check=True,
        env={"PET_NNODES": "5", "PET_SPARES": variables(things)["PET_SPARES"]},
    )  # fmt: skip
    assert done.stdout == "--nnodes 4 train.py a b\n"
    [policy] = [thing for (kind, _), thing in things.items() if kind == "NetworkPolicy"]
    assert policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"] == {}
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    assert job["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"


@pytest.mark.parametrize("kind", ["TrainingRuntime", "ClusterTrainingRuntime"])
def test_arguments_of_a_trainjob_leave_the_options(kind: str) -> None:
    """They take the place of all of `args`, and of nothing else."""
    things = render({"kind": kind, "image": "", "script": [], "options": ["--strategy", "log"]})
    [container] = pod_of(things)["containers"]
    assert "args" not in container
    command = [word.replace("exec swift-run", "echo") for word in container["command"]]
    done = subprocess.run(
        [*command, "train.py"], capture_output=True, text=True, check=True, env={"PET_NNODES": "3", "PET_SPARES": "1"}
    )
    assert done.stdout == "--nnodes 2 --strategy log train.py\n"


def test_etcd_listens_at_addresses_of_any_kind() -> None:
    etcd = render()["StatefulSet", "train-etcd"]["spec"]["template"]["spec"]["containers"][0]
    listens = [one for one in etcd["args"] if one.startswith("--listen")]
    assert len(listens) == 3 and all("//0.0.0.0:" in one for one in listens)


def test_a_member_that_is_alone_may_be_drained() -> None:
    assert ("PodDisruptionBudget", "train-etcd") not in render({"etcd": {"members": 1}})


def test_metrics_of_trainjobs_are_asked_for_in_all_namespaces() -> None:
    monitor = {"metrics": {"podMonitor": {"enabled": True}}}
    things = render({"kind": "ClusterTrainingRuntime", **monitor})
    assert things["PodMonitor", "train"]["spec"]["namespaceSelector"] == {"any": True}
    things = render({"networkPolicy": {"enabled": False}, **monitor})
    assert "namespaceSelector" not in things["PodMonitor", "train"]["spec"]


# ---- mistakes ----


@pytest.mark.parametrize(("values", "told"), [
    ({"kind": "TrainingRuntime", "minNodes": 1}, "minNodes: a TrainJob says"),
    ({"kind": "ClusterTrainingRuntime", "nprocPerNode": 8}, "nprocPerNode: a TrainJob says"),
    ({"metrics": {"podMonitor": {"enabled": True}}}, "metricsFrom: name the pods of Prometheus"),
    ({"etcd": {"tls": {"source": "generated", "serverSecret": ""}}}, "are of source existing, not of generated"),
    ({"podLabels": {"app.kubernetes.io/component": "mine"}}, "podLabels: app.kubernetes.io/component is the chart's"),
    ({"job": {"labels": {"app.kubernetes.io/name": "mine"}}}, "job.labels: app.kubernetes.io/name is the chart's"),
    ({"nodeSelector": {"gpu": True}}, "/nodeSelector/gpu"),
    ({"etcd": {"nodeSelector": {"gpu": True}}}, "/etcd/nodeSelector/gpu"),
    ({"podAnnotations": {"number": 5}}, "/podAnnotations/number"),
    ({"env": [{"name": "A", "value": 5}]}, "/env/0/value"),
    ({"etcd": {"persistence": {"size": ""}}}, "/etcd/persistence/size"),
])  # fmt: skip
def test_what_would_fail_later_is_told_now(values: dict[str, Any], told: str) -> None:
    done = template(merged(LEAST, values))
    assert done.returncode != 0 and told in done.stderr, done.stderr


@pytest.mark.parametrize(("name", "good"), [
    ("gpt", True), ("a", True), ("gpt-7b", True), ("x" * 45, True), ("7b", False), ("gpt.v2", False),
])  # fmt: skip
def test_names_that_no_service_may_have(name: str, good: bool) -> None:
    done = helm("template", name, str(CHART), "--values", "-", stdin=json.dumps(LEAST))
    assert (done.returncode == 0) is good, done.stderr
    assert good or f"release {name}: its name must" in done.stderr



def test_all_that_is_missing_is_told_at_once() -> None:
    done = template({"terminationGracePeriodSeconds": 30, "minNodes": 3, "env": [{"name": "SWIFT_JOB_SECRET"}]})
    assert done.returncode != 0
    for told in ("image: ", "script: ", "etcd.image: ", "10 or more below", "minNodes: must", "is a secret"):
        assert told in done.stderr


def test_what_is_not_understood_is_told_at_once() -> None:
    done = template(
        {"kind": "Deployment", "nodes": 0, "spare": 1, "etcd": {"members": 2}, "shm": {"sizeLimit": "8 GB"}}
    )
    assert done.returncode != 0
    for told in ("/kind", "/nodes", "spare", "/etcd/members", "/shm/sizeLimit"):
        assert told in done.stderr


def test_the_schema_knows_every_value() -> None:
    import yaml

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def names(part: dict[str, Any], at: str = "") -> Iterator[str]:
        for key, inner in part.items():
            yield f"{at}{key}"
            if isinstance(inner, dict) and "properties" in inner:
                yield from names(inner["properties"], f"{at}{key}.")

    known = set(names(schema["properties"]))
    free = ("resources", "podSecurityContext", "etcd.resources")

    def used(part: dict[str, Any], at: str = "") -> Iterator[str]:
        for key, inner in part.items():
            yield f"{at}{key}"
            if isinstance(inner, dict) and f"{at}{key}" not in free:
                yield from used(inner, f"{at}{key}.")

    assert set(used(values)) == known - {"global"}


# ---- plain manifests ----


def test_plain_manifests_are_those_of_the_chart(tmp_path: Path) -> None:
    subprocess.run(
        [str(MANIFESTS / "render.sh"), str(tmp_path)], env={"PATH": PATH}, check=True, timeout=60, capture_output=True
    )
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in MANIFESTS.glob("*.yaml") if path.name != "values.yaml"}
    assert made == kept, "run deploy/kubernetes/manifests/render.sh"
    assert len(made) == 5


def test_what_plain_manifests_mount_can_be_made() -> None:
    line = put_in(command("docs/kubernetes.md", "secrets.sh training"), {"secrets.sh": str(MANIFESTS / "secrets.sh")})
    [arguments] = calls(line, "secrets.sh")
    assert arguments == ["training"] and list(calls(line, "kubectl")) == [["apply", "-f", "-"]]
    text = subprocess.run(
        [str(MANIFESTS / "secrets.sh"), *arguments], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    made = objects_of(text)
    assert not [why for thing in made.values() if (why := wrong_with(thing, "1.37"))]
    mounted = set()
    for path in MANIFESTS.glob("*.yaml"):
        if path.name == "values.yaml":
            continue
        things = objects_of(path.read_text())
        pods = [pod["spec"] for pod in pod_templates(things)]
        pods += [thing["spec"]["template"]["spec"] for (kind, _), thing in things.items() if kind == "StatefulSet"]
        mounted |= {volume["secret"]["secretName"] for pod in pods for volume in pod["volumes"] if "secret" in volume}
    assert {name for _, name in made} == mounted


# ---- the page ----


def test_commands_of_the_page_render() -> None:
    """Without a cluster: what `helm install` would make. With one: faults/test_kubernetes.py."""
    install = command("docs/kubernetes.md", "helm install")
    done = helm(*words(put_in(install, {"install": "template", "deploy/kubernetes/swift-agent": str(CHART)}))[1:])
    assert done.returncode == 0, done.stderr
    things = objects_of(done.stdout)
    [container] = pod_of(things)["containers"]
    assert container["args"] == ["train.py", "--lr", "0.1"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}  # a number is refused by some clusters
    assert things["Job", "gpt"]["spec"]["completions"] == 17
    found = variables(things)
    assert found["PET_RDZV_ID"] == "$(SWIFT_NAMESPACE)-gpt" and found["PET_NPROC_PER_NODE"] == "8"
    # As swiftctl of the page names the job.
    [arguments] = calls(command("docs/kubernetes.md", "kubectl -n training exec"), "swiftctl")
    assert arguments == ["status", "training-gpt"]


def test_the_trainjob_of_the_page_is_one() -> None:
    [job] = objects_of(code_of("yaml")).values()
    assert not wrong_with(job, "1.37")
    assert job["spec"]["runtimeRef"] == {"name": "train", "kind": "ClusterTrainingRuntime"}


def test_values_that_the_page_names_are_there() -> None:
    import yaml

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)+)[=`]", PAGE.read_text())
    named = [name for name in named if not name.endswith((".yaml", ".sh", ".crt", ".key", ".py"))]
    named = [name for name in named if not name.startswith(("node.kubernetes", "nvidia."))]
    assert len(named) > 15
    for name in named:
        part = values
        for step in name.split("."):
            assert step in part, name
            part = part[step]


def code_of(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)[0]
