"""A real Slurm on this machine: munged, slurmctld and one slurmd for each virtual node; all of it in one directory.

Signals of Slurm reach what it has started, and not the processes below that, as with proctrack/cgroup, the default of
most sites. A dead node is noticed after seconds and not, as by default, after five minutes.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support.job import ROOT
from tests.support.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={dir}/munge/sock
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd-%n.pid
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=200000,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MessageTimeout=5
JobRequeue=1
SlurmdParameters=config_overrides
"""


# Where scripts/fetch_slurm.sh puts it; else it is the machine's own.
FETCHED = Path(os.environ.get("SWIFT_SLURM", ROOT / ".cache" / "slurm"))


def why_not() -> str:
    """Why there can be no cluster here; "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_environment()["PATH"]) is None]
    return f"no {', '.join(missing)}: scripts/fetch_slurm.sh .cache/slurm" if missing else ""


def _environment() -> dict[str, str]:
    """That of its programs, which find their libraries there."""
    bins = f"{FETCHED}/usr/sbin:{FETCHED}/usr/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
    libraries = [str(path) for name in ("", "/slurm-wlm") for path in FETCHED.glob(f"usr/lib/*-linux-gnu{name}")]
    return {"PATH": bins, "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])}


class SlurmCluster:
    """Of *num_nodes* nodes, named n1, n2 and so on, in *directory*, whose path must be short. Use as a context."""

    def __init__(self, directory: Path, num_nodes: int) -> None:
        self.directory, self.nodes = directory, [f"n{number}" for number in range(1, num_nodes + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, **_environment(), "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        for name in ("munge", "run", "state", "log", *(f"spool-{node}" for node in self.nodes)):
            (self.directory / name).mkdir(parents=True, mode=0o700)
        key = self.directory / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        controller, *ports = free_ports(1 + len(self.nodes))
        lines = [CONF.format(host=host, user=getpass.getuser(), dir=self.directory, port=controller)]
        lines += [f"PluginDir={path}" for path in FETCHED.glob("usr/lib/*-linux-gnu/slurm-wlm")]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        lines.append(f"PartitionName=main Nodes=n[1-{len(self.nodes)}] Default=YES MaxTime=INFINITE State=UP")
        (self.directory / "slurm.conf").write_text("\n".join(lines) + "\n")
        munge = self.directory / "munge"
        try:
            self._daemon(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/sock",
                f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            )  # fmt: skip
            self._wait(lambda: (munge / "sock").exists(), "munged")
            self._daemon("slurmctld", "-D", "-c", "-f", str(self.directory / "slurm.conf"))
            for node in self.nodes:
                stepd = shutil.which("slurmstepd", path=self.environment["PATH"])
                self._slurmds[node] = self._daemon(
                    "slurmd", "-D", "-N", node, "-d", str(stepd), "-f", str(self.directory / "slurm.conf")
                )

            def idle() -> list[str]:
                return self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split()

            self._wait(lambda: idle() == self.nodes, "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        left = [process for daemon in self._daemons for process in _family(daemon.pid)]
        # Of the steps: children of slurmstepd, whose parent is no daemon any more.
        left += [process for process in psutil.process_iter() if self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._daemons:
            daemon.wait(10)
        psutil.wait_procs(left, timeout=10)

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None, command
        with (self.directory / "log" / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, *command[1:]], env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )
        return self._daemons[-1]

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"] and process.pid != os.getpid()
        return False

    def __call__(self, *command: str, check: bool = True, **environment: str) -> str:
        """Run a command of Slurm; its output."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        done = subprocess.run(
            [str(program), *command[1:]], env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def crash(self, node: str) -> None:
        """The machine is gone, with all that runs on it."""
        dead = [process for process in psutil.process_iter() if self._runs_on(process, node)]
        dead += _family(self._slurmds[node].pid)
        parents = [process.parent() for process in dead]
        dead += [one for one in parents if one is not None and one.name() == "slurmstepd"]
        for process in dead:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _runs_on(self, process: psutil.Process, node: str) -> bool:
        with contextlib.suppress(psutil.Error):
            return self._is_ours(process) and process.environ().get("SLURMD_NODENAME") == node
        return False

    def state_of(self, job: str) -> str:
        return self("scontrol", "show", "job", "-o", job, check=False).partition("JobState=")[2].partition(" ")[0]

    def _wait(self, condition: Any, what: str, timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(path.read_text()[-1000:] for path in sorted((self.directory / "log").iterdir()))
            assert time.monotonic() < deadline_s, f"timed out: {what}\n{logs}"
            time.sleep(0.1)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
