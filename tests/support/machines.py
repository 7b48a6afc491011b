"""Machines for what systemd does: each has a real systemd as process 1, a network address, a name, and its own /etc,
/opt, /var, /srv, /usr/local and /tmp. All else of this machine it sees and cannot write, but the directory that
is shared. Needs root. All that a machine runs dies with its process 1.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.job import ROOT
from tests.support.network import Host, Network
from tests.support.network import why_not as why_no_network

SYSTEMD = Path("/lib/systemd/systemd")
OWN = ("etc", "opt", "var", "usr/local", "srv")
"""What is written there is seen on that machine only, and gone with it."""
SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
_CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()

# Process 1 is in a namespace of processes, mounts, names and a network: it is the machine's, and sees nothing of ours.
_BOOT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/lock
for directory in $OWN; do
    mkdir -p "/run/own/$directory" "/run/work/$directory"
done
# From where they lie before other directories are laid over them.
mkdir -p /run/python /run/site /run/source /run/shared /run/etcd
mount --bind "$PYTHON" /run/python
mount --bind "$SITE" /run/site
mount --bind "$SOURCE" /run/source
mount --bind "$SHARED" /run/shared
mount --bind "$ETCD" /run/etcd
for directory in python site source etcd; do mount -o remount,bind,ro /run/$directory; done
for directory in $OWN; do
    layers=lowerdir=/$directory,upperdir=/run/own/$directory,workdir=/run/work/$directory
    mount -t overlay overlay -o "$layers" "/$directory"
done
# Whatever systemd has for the start of a machine, removing temporary files or setting the kernel's variables: it may do
# none of that to this one. So it finds the units below only, and the rest is read-only.
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
mount -o remount,bind,ro /
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs none /etc/systemd/system
export SYSTEMD_UNIT_PATH=/etc/systemd/system
cp /lib/systemd/system/systemd-journald.service /lib/systemd/system/systemd-journald.socket /etc/systemd/system/
mkdir -p /opt/swift/bin /srv/gpt
for name in etcd etcdctl etcdutl; do
    [ ! -x "/run/etcd/$name" ] || ln -sf "/run/etcd/$name" "/usr/local/bin/$name"
done
for program in swift-run:swift_agent.run swiftctl:swift_agent.ctl.main; do
    cat >"/opt/swift/bin/${program%:*}" <<PROGRAM
#!/bin/sh
s=/run/source
export PYTHONPATH=\$s:\$s/rendezvous:\$s/recovery:\$s/logging_store:/run/site
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PYTHONDONTWRITEBYTECODE=1
exec /run/python/bin/python3 -c "from ${program#*:} import cli; cli()" "\$@"
PROGRAM
done
chmod +x /opt/swift/bin/*
echo "$NAME" >/etc/hostname
printf '%b' "$HOSTS" >/etc/hosts
# Of a whole system only these: what ours wants or waits for.
for target in sysinit basic shutdown network-online multi-user timers; do
    printf '[Unit]\nDefaultDependencies=no\n' >"/etc/systemd/system/$target.target"
done
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\nAudit=no\nReadKMsg=no\nForwardToSyslog=no\nRateLimitIntervalSec=0\n' \
    >/etc/systemd/journald.conf.d/ours.conf
exec env -i container=lxc PATH="$PATH" SYSTEMD_UNIT_PATH="$SYSTEMD_UNIT_PATH" "$TOKEN" \
    "$SYSTEMD" --system --unit=basic.target --show-status=no --log-target=null
"""


def why_not() -> str:
    """Why there can be no machine here, or ""."""
    if not SYSTEMD.exists():
        return "needs systemd: apt-get install systemd"
    wanted = ("unshare", "nsenter", "systemctl", "journalctl", "openssl")
    missing = [name for name in wanted if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if reason := why_no_network():
        return reason
    if not any((_CGROUPS / name / "cgroup.procs").exists() for name in ("systemd", "unified", "")):
        return "needs a hierarchy of cgroups"
    return "" if "overlay" in Path("/proc/filesystems").read_text() else "the kernel has no overlay file system"


class Machine:
    """One of them. *shared*: a directory that all see, as /run/shared."""

    def __init__(self, name: str, host: Host, hosts: str, shared: Path, etcd: Path) -> None:
        self.name, self.host, self.address = name, host, host.address
        self._groups: list[Path] = []
        self._log = shared / f"boot.{name}"
        self._started: subprocess.Popen[bytes] | None = None
        self._one = 0
        self._environment = {
            **os.environ, "OWN": " ".join(OWN), "NAME": name, "HOSTS": hosts, "SHARED": str(shared), "ETCD": str(etcd),
            "PYTHON": sys.base_prefix, "SITE": str(SITE), "SOURCE": str(ROOT), "SYSTEMD": str(SYSTEMD),
            "TOKEN": f"SWIFT_TEST_SESSION={os.environ.get('SWIFT_TEST_SESSION', '')}",
        }  # fmt: skip

    def boot(self) -> None:
        """Until its systemd answers."""
        group = f"swift-{os.getpid()}-{next(_numbers)}"
        self._groups = [
            path / group
            for path in (_CGROUPS, *(_CGROUPS / name for name in ("systemd", "unified", "memory", "pids")))
            if (path / "cgroup.procs").exists()
        ]
        for path in self._groups:
            path.mkdir()

        def enter() -> None:
            for path in self._groups:
                (path / "cgroup.procs").write_text("0")

        command = [
            *self.host.prefix, "unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts",
            "--ipc", "bash", "-c", _BOOT,
        ]  # fmt: skip
        with open(self._log, "wb") as log:
            self._started = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=enter
            )
        deadline_s = time.monotonic() + 20
        while True:
            assert self._started.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < deadline_s, f"the systemd of {self.name} does not start"
            with contextlib.suppress(OSError, StopIteration):
                children = Path(f"/proc/{self._started.pid}/task/{self._started.pid}/children").read_text().split()
                self._one = int(next(iter(children)))
                is_systemd = Path(f"/proc/{self._one}/comm").read_text().strip() == "systemd"
                if is_systemd and "running" in self.run("systemctl is-system-running", check=False):
                    break
            time.sleep(0.05)
        self.run("systemctl start systemd-journald.socket systemd-journald.service")

    def command(self, text: str) -> list[str]:
        """What runs *text* there, as root, where the documentation's files are."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "-t", str(self._one), "-m", "-p", "-i", "-u", "-n", "env", "-i", f"PATH={path}"]
        units = "SYSTEMD_UNIT_PATH=/etc/systemd/system"
        return [*enter, "HOME=/tmp", units, "bash", "-euo", "pipefail", "-c", f"cd /run/source\n{text}"]

    def run(self, text: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """What *text* prints, a few lines for a shell; it fails the test if they fail."""
        done = subprocess.run(self.command(text), capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"on {self.name}: {text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """As systemctl shows them."""
        lines = self.run(f"systemctl show {unit} --property={','.join(properties)}").splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def journal(self, unit: str) -> str:
        return self.run(f"journalctl --no-pager --quiet --output=cat --unit={unit}", check=False)

    def pids(self, unit: str) -> list[int]:
        """Of its processes, as this machine numbers them."""
        group = self.show(unit, "ControlGroup")["ControlGroup"].lstrip("/")
        for name in ("unified", "systemd", ""):
            path = _CGROUPS / name / group / "cgroup.procs"
            if group and path.exists():
                return [int(pid) for pid in path.read_text().split()]
        return []

    def power_off(self) -> None:
        """As if its plug was pulled: all its processes are killed at once."""
        if self._started is None:
            return
        if self._one:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._one, signal.SIGKILL)
        else:
            self._started.kill()
        self._started.wait()
        self._started, self._one = None, 0
        deadline_s = time.monotonic() + 10
        for path in self._groups:
            for inner in sorted(path.rglob("*/"), reverse=True):
                if inner.is_dir():
                    _remove(inner, deadline_s)
            _remove(path, deadline_s)


def _remove(group: Path, deadline_s: float) -> None:
    """A cgroup can be removed when the last of its processes is reaped, a moment after it was killed."""
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


class Machines:
    """Those of *names*, in a network of their own. A context manager."""

    def __init__(self, names: tuple[str, ...], shared: Path, etcd: Path) -> None:
        self._network = Network(len(names))
        hosts = list(zip(names, self._network.hosts, strict=True))
        lines = "127.0.0.1 localhost\\n" + "".join(f"{host.address} {name}\\n" for name, host in hosts)
        self.all = [Machine(name, host, lines, shared, etcd) for name, host in hosts]

    def __enter__(self) -> list[Machine]:
        try:
            for machine in self.all:
                machine.boot()
        except BaseException:
            self.__exit__()
            raise
        return self.all

    def __exit__(self, *exc_info: object) -> None:
        for machine in self.all:
            machine.power_off()
        self._network.close()
