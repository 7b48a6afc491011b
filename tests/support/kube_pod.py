"""One container as processes of this machine, in namespaces of their own: its first process has number 1, its root is
this machine's with a layer over it, volumes are mounted, and it runs as the user of its security context.

Not as in a real one: it shares the network, where each pod has a loopback address; names come from a file of hosts;
limits and seccomp profiles do not hold. Needs root.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kube_api import Api, path_of

# What a container finds in the image: the tests' Python and its libraries, wherever they are.
_SETUP = """set -e
mount --make-rprivate /
mount -t tmpfs layer {dir}/layer
mkdir {dir}/layer/up {dir}/layer/work
mount -t overlay overlay -o lowerdir=/,upperdir={dir}/layer/up,workdir={dir}/layer/work {dir}/root
mount -t proc proc {dir}/root/proc
mount --rbind /dev {dir}/root/dev
mount --rbind /sys {dir}/root/sys
for way in {ways}; do chmod o+x {dir}/root/$way; done
{mounts}
mount --bind {hosts} {dir}/root/etc/hosts
{read_only}
hostname {name}
cd /
exec chroot {dir}/root setpriv {user} --no-new-privs --inh-caps=-all --bounding-set=-all -- {command}
"""


class Container:
    """The first container of *pod*, at the address *ip*; its files are in *directory*, what it prints is in *log*.
    *image*: variables of the image."""

    def __init__(
        self, api: Api, pod: Mapping[str, Any], ip: str, directory: Path, log: Path, hosts: Path,
        image: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.pod, self.spec = pod, pod["spec"]["containers"][0]
        self.ip, self.directory = ip, directory
        self._api, self._log, self._hosts, self._image = api, log, hosts, image
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises `ApiError` if a secret is not there."""
        for name in ("layer", "root"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        mounts = "\n".join(self._mount(mount) for mount in self.spec.get("volumeMounts", ()))
        environment = self._environment()
        words = [expanded(word, environment) for key in ("command", "args") for word in self.spec.get(key, ())]
        # All addresses of the pod: here these are one, and the others are those of other pods.
        words = [word.replace("//0.0.0.0:", f"//{self.ip}:") for word in words]
        rights = self.spec.get("securityContext", {})
        of_pod = self.pod["spec"].get("securityContext", {})
        user, group, extra = (of_pod.get(key, 0) for key in ("runAsUser", "runAsGroup", "fsGroup"))
        script = _SETUP.format(
            dir=self.directory, mounts=mounts, hosts=self._hosts, name=self.pod["metadata"]["name"],
            ways=" ".join(ways_to([*self._image["PATH"].split(":"), self._image["PYTHONPATH"].split(":")[0]])),
            read_only=f"mount -o remount,ro {self.directory}/root" if rights.get("readOnlyRootFilesystem") else "",
            user=f"--reuid {user} --regid {group} --groups {extra}", command=shlex.join(words),
        )  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # The shell is outside the namespace of processes, its child is the first one inside.
                ["unshare", "--mount", "--pid", "--uts", "--ipc", "sh", "-c", 'sh -c "$1"; exit $?', "pod", script],
                env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def first_process(self) -> int:
        """Its number on this machine; 0 if there is none."""
        assert self._process is not None
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        try:
            found = path.read_text().split()
        except OSError:
            return 0
        return int(found[0]) if found else 0

    def exit_code(self) -> int | None:
        """As a runtime says it: 128 and the number of the signal; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def send(self, signum: int) -> None:
        if pid := self.first_process:
            os.kill(pid, signum)

    def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()

    def run(self, command: list[str], timeout_s: float) -> None:
        """In it, as `kubectl exec` does."""
        if pid := self.first_process:
            inside = ["nsenter", "--target", str(pid), "--mount", "--pid", "--root", "--wd", *command]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(inside, env=self._environment(), timeout=timeout_s, check=False, capture_output=True)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        found = dict(self._image)
        for one in self.spec.get("env", ()):
            if "value" in one:
                found[one["name"]] = expanded(one["value"], found)
            else:
                found[one["name"]] = self._field(one["valueFrom"]["fieldRef"]["fieldPath"])
        return found

    def _field(self, path: str) -> str:
        metadata = self.pod["metadata"]
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
            return str(metadata.get(found[1], {}).get(found[2], ""))
        known = {
            "metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"], "spec.nodeName": self.pod["spec"]["nodeName"],
            "status.podIP": self.ip, "status.hostIP": self.ip,
        }  # fmt: skip
        return str(known[path])

    def _mount(self, mount: Mapping[str, Any]) -> str:
        """Commands that mount it."""
        volume = next(one for one in self.pod["spec"]["volumes"] if one["name"] == mount["name"])
        source, target = self.directory / f"volume-{mount['name']}", f"{self.directory}/root{mount['mountPath']}"
        group = self.pod["spec"].get("securityContext", {}).get("fsGroup", 0)
        lines = [f"mkdir -p {target}"]
        if "secret" in volume:
            self._write_secret(volume["secret"], source, group)
        elif "hostPath" in volume:
            source = Path(volume["hostPath"]["path"])
        elif volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"].get("sizeLimit", "1G").replace("i", "")
            return "\n".join([*lines, f"mount -t tmpfs -o size={size},mode=2777,gid={group} memory {target}"])
        elif not source.exists():  # it stays when the container is started again
            source.mkdir()
            os.chown(source, -1, group)
            source.chmod(0o2777)
        lines.append(f"mount --bind {source} {target}")
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {target}")
        return "\n".join(lines)

    def _write_secret(self, secret: Mapping[str, Any], directory: Path, group: int) -> None:
        found = self._api("GET", path_of("Secret", self.pod["metadata"]["namespace"], secret["secretName"]))["data"]
        directory.mkdir(exist_ok=True)
        items = {one["key"]: one["path"] for one in secret.get("items", ())} or {name: name for name in found}
        for key, name in items.items():
            path = directory / name
            path.write_bytes(base64.b64decode(found[key]))
            os.chown(path, 0, group)
            path.chmod(secret["defaultMode"])


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """With $(NAME) replaced where there is such a variable, as Kubernetes does it."""
    return re.sub(r"\$\(([\w.-]+)\)", lambda found: environment.get(found[1], found[0]), text)


def ways_to(paths: list[str]) -> list[str]:
    """Directories above them (and above what they lead to), without a leading slash."""
    every = {Path(path).absolute() for path in paths} | {Path(path).resolve() for path in paths}
    programs = {(path / "python").resolve() for path in every if (path / "python").exists()}
    ways = {way for path in every | programs for way in [path, *path.parents] if way.is_dir()}
    return sorted({str(way).lstrip("/") for way in ways} - {""})
