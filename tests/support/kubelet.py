"""The kubelet of one node: runs what is bound to it as processes (`kube_pod`), asks their probes, tells how they are.

    python -m tests.support.kubelet CONFIG NODE

As a real one: preStop hooks, SIGTERM, the time until SIGKILL, restart policies, startup, liveness and readiness probes
over HTTP, exit codes. When this process is killed its containers go on, as on a machine whose kubelet has died.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kube_api import Api, ApiError, path_of
from tests.support.kube_pod import Container

TICK_S = 0.1
BEAT_S = 2.0


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Probe:
    """One that is asked every so often; *wanted*: whether its last answers, `failureThreshold` of them, were good."""

    def __init__(self, probe: Mapping[str, Any] | None, container: Container) -> None:
        self._probe, self._container = probe, container
        self._next_s, self._failures = 0.0, 0
        self.is_good = probe is None
        self.has_failed = False

    def ask(self) -> None:
        if self._probe is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._probe.get("periodSeconds", 10)
        if self._answers():
            self._failures, self.is_good = 0, True
            return
        self._failures += 1
        if self._failures >= self._probe.get("failureThreshold", 3):
            self.is_good, self.has_failed = False, True

    def _answers(self) -> bool:
        get = self._probe["httpGet"]  # type: ignore[index]
        port = get["port"]
        if isinstance(port, str):
            port = next(one["containerPort"] for one in self._container.spec["ports"] if one["name"] == port)
        line = http.client.HTTPConnection(self._container.ip, port, timeout=self._probe.get("timeoutSeconds", 1))  # type: ignore[union-attr]
        try:
            line.request("GET", get["path"])
            return 200 <= line.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            line.close()


class Pod(threading.Thread):
    """From its first container to its end."""

    def __init__(self, kubelet: Kubelet, pod: Mapping[str, Any], ip: str) -> None:
        super().__init__(daemon=True)
        self._kubelet, self._api, self._pod = kubelet, kubelet.api, pod
        metadata = pod["metadata"]
        self._path = path_of("Pod", metadata["namespace"], metadata["name"])
        directory = kubelet.directory / "pods" / metadata["uid"]
        log = kubelet.directory / "log" / f"{metadata['name']}.log"
        self.container = Container(kubelet.api, pod, ip, directory, log, kubelet.hosts, kubelet.image)
        self._restarts = 0
        self._began = now()
        self._said: Any = None
        self.grace_s: float | None = None
        """It shall go, within so long."""
        self.is_forgotten = False
        """There is no such pod any more."""

    def run(self) -> None:
        try:
            while True:
                code = self._run_once()
                if self.grace_s is not None or self.is_forgotten or self._pod["spec"]["restartPolicy"] != "Always":
                    break
                self._restarts += 1
                time.sleep(1.0)  # 10 s at first, and longer and longer, in a real one
            self._kubelet.say(f"{self._pod['metadata']['name']}: ended with {code}")
            state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error",
                                    "startedAt": self._began, "finishedAt": now()}}  # fmt: skip
            if not self.is_forgotten:
                self._say("Succeeded" if code == 0 else "Failed", False, state)
            while self.grace_s is None and not self.is_forgotten:
                time.sleep(TICK_S)
            if not self.is_forgotten:
                self._delete()
        finally:
            self.container.kill()
            self.container.remove()

    def _run_once(self) -> int:
        """Until the container has ended; its exit code."""
        while True:
            try:
                self.container.start()
                break
            except ApiError:  # a secret that is not there yet
                if self.grace_s is not None or self.is_forgotten:
                    return 137
                time.sleep(0.5)
        spec = self.container.spec
        startup, liveness, readiness = (
            Probe(spec.get(f"{name}Probe"), self.container) for name in ("startup", "liveness", "readiness")
        )
        running = {"running": {"startedAt": now()}}
        while (code := self.container.exit_code()) is None:
            if self.is_forgotten:
                self.container.kill()
            elif self.grace_s is not None:
                self._end(self.grace_s)
            elif not startup.is_good:
                startup.ask()
            else:
                liveness.ask()
                readiness.ask()
            if startup.has_failed or liveness.has_failed:
                self._kubelet.say(f"{self._pod['metadata']['name']}: its probe has failed, it is ended")
                self._end(self._pod["spec"]["terminationGracePeriodSeconds"])
            self._say("Running", startup.is_good and readiness.is_good, running)
            time.sleep(TICK_S)
        return code

    def _end(self, grace_s: float) -> None:
        """As a kubelet does it. Readiness is asked no more."""
        deadline_s = time.monotonic() + grace_s
        self._say("Running", False, {"running": {"startedAt": self._began}})
        hook = self.container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook:
            self.container.run(hook["command"], grace_s)
        self._kubelet.say(f"{self._pod['metadata']['name']}: SIGTERM")
        self.container.send(signal.SIGTERM)
        while self.container.exit_code() is None and time.monotonic() < deadline_s and not self.is_forgotten:
            time.sleep(TICK_S)
        if self.container.exit_code() is None:
            self._kubelet.say(f"{self._pod['metadata']['name']}: SIGKILL")
            self.container.kill()

    def _say(self, phase: str, is_ready: bool, state: Mapping[str, Any]) -> None:
        if (phase, is_ready, self._restarts) == self._said:
            return
        told = "True" if is_ready else "False"
        container = {
            "name": self.container.spec["name"], "image": self.container.spec["image"], "imageID": "",
            "ready": is_ready, "restartCount": self._restarts, "state": state,
        }  # fmt: skip
        conditions = [
            {"type": name, "status": value, "lastTransitionTime": now()}
            for name, value in (("Initialized", "True"), ("Ready", told), ("ContainersReady", told))
        ]
        try:
            self._api.patch_status(self._path, {
                "phase": phase, "podIP": self.container.ip, "podIPs": [{"ip": self.container.ip}],
                "startTime": self._began, "conditions": conditions, "containerStatuses": [container],
            })  # fmt: skip
        except (ApiError, OSError) as error:
            self._kubelet.say(f"{self._path}: {error}")
            return
        self._said = (phase, is_ready, self._restarts)

    def _delete(self) -> None:
        try:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._pod["metadata"]["uid"]}}
            self._api("DELETE", self._path, options)
        except (ApiError, OSError) as error:
            self._kubelet.say(f"{self._path}: {error}")


class Kubelet:
    def __init__(self, config: Mapping[str, Any], node: str) -> None:
        self.node, self.api = node, Api(config["port"], config["token"])
        self.directory, self.image = Path(config["directory"]), config["image"]
        self.hosts = self.directory / "hosts"
        self._prefix = f"127.{config['net']}.{config['nodes'].index(node) + 1}"
        self._pods: dict[str, Pod] = {}
        self._made = 0

    def say(self, text: str) -> None:
        print(f"{time.time():.3f} {text}", flush=True)

    def run(self) -> None:
        self._register()
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            try:
                self._look()
            except (ApiError, OSError) as error:
                self.say(f"{error}")
            time.sleep(TICK_S)

    def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self.node}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node, "labels": labels}}
        try:
            self.api("POST", path_of("Node", ""), node)
        except ApiError as error:
            if error.code != 409:  # it is back
                raise
        self._say_alive()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._say_alive()
            except (ApiError, OSError) as error:
                self.say(f"{error}")

    def _say_alive(self) -> None:
        size = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.node}]
        status = {"capacity": size, "allocatable": size, "conditions": [ready], "addresses": addresses}
        self.api.patch_status(path_of("Node", "", self.node), status)

    def _look(self) -> None:
        found = self.api("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.node}")["items"]
        there = {pod["metadata"]["uid"]: pod for pod in found}
        for uid, pod in there.items():
            metadata = pod["metadata"]
            if uid in self._pods:
                if "deletionTimestamp" in metadata:
                    self._pods[uid].grace_s = float(metadata.get("deletionGracePeriodSeconds", 30))
            elif pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in metadata:
                self._made += 1
                ip = f"{self._prefix}.{self._made}"
                self._name(pod, ip)
                self._pods[uid] = Pod(self, pod, ip)
                self._pods[uid].start()
            elif "deletionTimestamp" in metadata:  # of an earlier life of this kubelet
                path = path_of("Pod", metadata["namespace"], metadata["name"])
                self.api("DELETE", path, {"gracePeriodSeconds": 0})
        for uid in [uid for uid in self._pods if uid not in there]:
            self._pods.pop(uid).is_forgotten = True

    def _name(self, pod: Mapping[str, Any], ip: str) -> None:
        """In the file of hosts that all pods see."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        names = [name]
        if "subdomain" in spec:
            names.append(f"{spec['hostname']}.{spec['subdomain']}.{pod['metadata']['namespace']}.svc")
        with self.hosts.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            kept = [line for line in file.read().splitlines() if name not in line.split()[1:]]
            file.seek(0)
            file.write("\n".join([*kept, " ".join([ip, *names])]) + "\n")
            file.truncate()


if __name__ == "__main__":
    Kubelet(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]).run()
