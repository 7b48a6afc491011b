"""What the chart of deploy/kubernetes makes of its values, as objects; and whether Kubernetes would take them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.job import ROOT

CHART = ROOT / "deploy" / "kubernetes" / "swift-agent"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "manifests"
# Where scripts/fetch_kubernetes.sh puts its programs; else they are the machine's own.
FETCHED = Path(os.environ.get("SWIFT_KUBERNETES", ROOT / ".cache" / "kubernetes")) / "bin"
PATH = f"{FETCHED}:{os.environ['PATH']}"
# With these the chart has all that it needs. To make certificates takes Helm half a second.
LEAST: dict[str, Any] = {
    "image": "train:1", "script": ["train.py"],
    "etcd": {"image": "etcd:3.5", "tls": {"source": "existing", "serverSecret": "server", "clientSecret": "client"}},
}  # fmt: skip
GENERATED = {"etcd": {"tls": {"source": "generated", "serverSecret": "", "clientSecret": ""}}}


def why_no_helm() -> str:
    """Why nothing can be rendered and looked at here; "" if it can."""
    if shutil.which("helm", path=PATH) is None:
        return "no helm: scripts/fetch_kubernetes.sh .cache/kubernetes"
    try:
        import kubeflow_trainer_api  # noqa: F401
        import kubernetes_validate  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install 'swift-agent[test]'"
    return ""


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """*other* counts; as Helm does it with values."""
    both = {
        key: merged(one[key], value) if isinstance(value, Mapping) and isinstance(one.get(key), Mapping) else value
        for key, value in other.items()
    }
    return {**one, **both}


def helm(*arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["helm", *arguments], input=stdin, env={**os.environ, "PATH": PATH, **(env or {})}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def template(values: Mapping[str, Any], namespace: str = "training") -> subprocess.CompletedProcess[str]:
    return helm(
        "template", "train", str(CHART), "--namespace", namespace, "--values", "-", stdin=json.dumps(values)
    )  # fmt: skip


def render(values: Mapping[str, Any] | None = None, namespace: str = "training") -> dict[tuple[str, str], Any]:
    """The objects, by kind and name. *values*: beside those that the chart needs."""
    return objects_of(_rendered(json.dumps(merged(LEAST, values or {})), namespace))


@functools.cache
def _rendered(values: str, namespace: str) -> str:
    done = template(json.loads(values), namespace)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects_of(text: str) -> dict[tuple[str, str], Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = [one for one in yaml.load_all(text, loader) if one]
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names), names
    return dict(zip(names, found, strict=True))


def wrong_with(thing: Mapping[str, Any], version: str) -> str:
    """Why a cluster of that version would refuse it or ignore a part of it; "" if it would not. Kinds of others: of
    JobSet and Kubeflow Trainer, as Trainer's own types say; of all others only that they have a name."""
    import kubernetes_validate

    group = thing["apiVersion"].partition("/")[0]
    if group in ("jobset.x-k8s.io", "trainer.kubeflow.org"):
        return _wrong_with_custom(thing, version)
    if group in ("cert-manager.io", "monitoring.coreos.com"):
        return ""
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{list(error.path)}: {error.message}"
    return ""


def _wrong_with_custom(thing: Mapping[str, Any], version: str) -> str:
    from kubeflow_trainer_api import models

    model = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }[thing["kind"]]
    try:
        read = model.from_dict(thing).to_dict()
    except ValueError as error:
        return str(error)
    if lost := [path for path in _paths(thing) if path not in set(_paths(read))]:
        return f"these fields are unknown: {lost}"
    spec = thing["spec"] if thing["kind"] == "JobSet" else thing["spec"].get("template", {}).get("spec", {})
    for job in spec.get("replicatedJobs", ()):
        metadata = {"name": job["name"], "labels": job["template"]["metadata"]["labels"]}
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]}
        if wrong := wrong_with(whole, version):
            return wrong
    return ""


def _paths(value: Any, at: str = "") -> list[str]:
    """Of all that is in it but empty values."""
    if isinstance(value, Mapping):
        return [path for key, inner in value.items() for path in _paths(inner, f"{at}.{key}")]
    if isinstance(value, list):
        return [path for number, inner in enumerate(value) for path in _paths(inner, f"{at}[{number}]")]
    return [at]
