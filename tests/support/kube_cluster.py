"""A real control plane of Kubernetes on this machine (API server, controllers, scheduler, an etcd), and nodes whose
pods are processes (`kubelet`, `kube_pod`).

It is 1.20: newer than that nothing can be had as packages. It has no Indexed Jobs, no policies for failures and
successes of pods, and budgets of `policy/v1beta1`. It finds a silent node after 8 s and not, as by default, after 40.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.etcd_cluster import etcd_binary
from tests.support.helm import FETCHED, PATH, why_no_helm
from tests.support.job import ROOT, SOURCE_ROOTS
from tests.support.kube_api import Api, ApiError, path_of
from tests.support.leftovers import TOKEN_NAME
from tests.support.ports import free_ports

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
TOKEN = "administrator"
NAMESPACE = "training"
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: lab, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: {token}}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: admin}}}}]
current-context: lab
"""


def why_not() -> str:
    """Why there can be no cluster here; "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"no {', '.join(missing)}: make kubernetes"
    if why := why_no_helm():
        return why
    if os.geteuid() != 0:
        return "containers need root"
    missing = [name for name in ("unshare", "nsenter", "setpriv", "openssl") if shutil.which(name) is None]
    return f"no {', '.join(missing)}" if missing else ""


class KubeCluster:
    """Of *num_nodes* nodes, named n1, n2 and so on; its files are in *directory*. Use as a context."""

    def __init__(self, directory: Path, num_nodes: int) -> None:
        self.directory, self.nodes = directory, [f"n{number}" for number in range(1, num_nodes + 1)]
        etcd, peer, port = free_ports(3)
        self._etcd, self._peer, self._port = etcd, peer, port
        self.api = Api(port, TOKEN)
        self._servers: list[subprocess.Popen[bytes]] = []
        self._kubelets: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> KubeCluster:
        for name in ("log", "pods", "certs"):
            (self.directory / name).mkdir()
        (self.directory / "kubeconfig").write_text(KUBECONFIG.format(port=self._port, token=TOKEN))
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n")
        (self.directory / "tokens").write_text(f'{TOKEN},admin,1,"system:masters"\n')
        (self.directory / "config.json").write_text(json.dumps({
            "directory": str(self.directory), "port": self._port, "token": TOKEN, "nodes": self.nodes,
            "net": random.randint(20, 250), "image": self._image(),
        }))  # fmt: skip
        try:
            self._start_api()
            self.wait(self._is_ready, "the API", 90.0)
            self._start_controllers()
            self.api("POST", path_of("Namespace", ""), {"metadata": {"name": NAMESPACE}})
            for node in self.nodes:
                self.start_node(node)
            self.wait(lambda: self.ready_nodes() == self.nodes, "all nodes are ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _image(self) -> dict[str, str]:
        """Variables of the image of all pods, which is this machine."""
        bins = f"{Path(etcd_binary()).parent}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        kept = {name: os.environ[name] for name in ("SWIFT_NATIVE_DIR", TOKEN_NAME) if name in os.environ}
        return {
            "PATH": bins, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1", **kept,
        }  # fmt: skip

    def _start_api(self) -> None:
        here, url = self.directory, f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{self._peer}"
        self._server(
            etcd_binary(), f"--data-dir={here}/etcd", f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--unsafe-no-fsync", "--log-level=warn",
        )  # fmt: skip
        key = here / "sa.key"
        for arguments in (["genrsa", "-out", str(key)], ["rsa", "-in", str(key), "-pubout", "-out", f"{here}/sa.pub"]):
            subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
        self._server(
            "kube-apiserver", f"--etcd-servers={url}", "--bind-address=127.0.0.1", f"--secure-port={self._port}",
            f"--cert-dir={here}/certs", "--service-cluster-ip-range=10.96.0.0/16", f"--token-auth-file={here}/tokens",
            "--authorization-mode=RBAC", "--service-account-issuer=https://lab", "--allow-privileged=true",
            f"--service-account-key-file={here}/sa.pub", f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip

    def _start_controllers(self) -> None:
        """They end by themselves if there is no API for a while."""
        here = self.directory
        shared = (f"--kubeconfig={here}/kubeconfig", "--leader-elect=false", "--port=0", "--secure-port=0")
        self._server(
            "kube-controller-manager", *shared, f"--service-account-private-key-file={here}/sa.key",
            "--node-monitor-grace-period=8s", "--node-monitor-period=2s",
            "--controllers=*,-nodeipam,-route,-service,-cloud-node-lifecycle",
        )  # fmt: skip
        self._server("kube-scheduler", *shared)

    def __exit__(self, *_: Any) -> None:
        left = [process for node in self._kubelets for process in self._processes_of(node)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for server in reversed(self._servers):
            server.kill()
        for server in (*self._servers, *self._kubelets.values()):
            server.wait(20)
        psutil.wait_procs(left, timeout=10)

    def _server(self, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=f"{FETCHED}:{PATH}")
        assert found is not None, program
        with (self.directory / "log" / f"{Path(program).name}.log").open("wb") as log:
            self._servers.append(
                subprocess.Popen([found, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def _is_ready(self) -> bool:
        try:
            return bool(self.api("GET", "/readyz") == "ok")
        except (ApiError, OSError):
            return False

    # ---- nodes ----

    def start_node(self, node: str) -> None:
        with (self.directory / "log" / f"{node}.log").open("ab") as log:
            self._kubelets[node] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.kubelet", str(self.directory / "config.json"), node],
                cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def crash(self, node: str) -> None:
        """The machine is gone, with all that runs on it."""
        for process in self._processes_of(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._kubelets[node].wait(20)

    def _processes_of(self, node: str) -> list[psutil.Process]:
        """Its kubelet first, which must not see its containers die."""
        try:
            kubelet = psutil.Process(self._kubelets[node].pid)
            return [kubelet, *kubelet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ready_nodes(self) -> list[str]:
        found = self.api("GET", path_of("Node", ""))["items"]
        ready = {"type": "Ready", "status": "True"}
        return sorted(
            node["metadata"]["name"] for node in found
            if not node["spec"].get("taints")
            and any(ready.items() <= one.items() for one in node["status"].get("conditions", ()))
        )  # fmt: skip

    # ---- objects ----

    def create(self, things: Mapping[tuple[str, str], Any]) -> None:
        for (kind, _), thing in things.items():
            version = "policy/v1beta1" if kind == "PodDisruptionBudget" else thing["apiVersion"]
            self.api("POST", path_of(kind, NAMESPACE), {**thing, "apiVersion": version})

    def get(self, kind: str, name: str) -> Any:
        return self.api("GET", path_of(kind, NAMESPACE, name))

    def pods(self, component: str = "node") -> dict[str, Any]:
        """By name; those of this component of the chart."""
        selector = f"?labelSelector=app.kubernetes.io%2Fcomponent%3D{component}"
        return {pod["metadata"]["name"]: pod for pod in self.api("GET", path_of("Pod", NAMESPACE) + selector)["items"]}

    def delete(self, kind: str, name: str, **options: Any) -> None:
        self.api("DELETE", path_of(kind, NAMESPACE, name), options)

    def evict(self, pod: str) -> None:
        """Raises `ApiError` 429 if a budget forbids it."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        self.api("POST", f"{path_of('Pod', NAMESPACE, pod)}/eviction", body)

    def kill(self, pod: str) -> None:
        """Its first process, and all others with it."""
        self._first_process(pod).kill()

    def run_in(self, pod: str, *command: str) -> str:
        """As `kubectl exec` does it; what it prints."""
        first = self._first_process(pod)
        return subprocess.run(
            ["nsenter", "--target", str(first.pid), "--mount", "--pid", "--root", "--wd", *command],
            env=first.environ(), capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip

    def _first_process(self, pod: str) -> psutil.Process:
        node = self.pods()[pod]["spec"]["nodeName"]
        for process in self._processes_of(node):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()  # which is outside of it
                is_first = parent is not None and parent.ppid() == self._kubelets[node].pid
                if is_first and process.environ().get("SWIFT_POD") == pod:
                    return process
        raise AssertionError(f"no process of {pod} on {node}")

    def log(self, pod: str) -> str:
        path = self.directory / "log" / f"{pod}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def secret(self, name: str, **values: str) -> None:
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.api("POST", path_of("Secret", NAMESPACE), {"metadata": {"name": name}, "data": data})

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"timed out: {what}\n{self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        """The last lines of all logs."""
        logs = sorted((self.directory / "log").iterdir())
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)
