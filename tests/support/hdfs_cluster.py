"""A real HDFS for tests: a name node and data nodes of Hadoop 3.3.6, on loopback; the jars: `scripts/fetch_hdfs.sh`."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from swift_agent.agent.processes.linux import Guard
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CLASSPATH = Path(os.environ.get("SWIFT_TEST_HDFS", ROOT / ".cache" / "hdfs")) / "classpath"
_guard = Guard()
PACKAGE = "org.apache.hadoop.hdfs.server"


def why_not() -> str:
    """What is missing; '' if nothing is."""
    if shutil.which("java") is None:
        return "no java on PATH, which Hadoop's servers need"
    return "" if CLASSPATH.exists() else f"no {CLASSPATH}: run scripts/fetch_hdfs.sh .cache/hdfs"


class HdfsCluster:
    """A context manager; *directory* holds data, configurations and logs. Servers are named `nn`, `dn0`, `dn1`, ..."""

    def __init__(self, directory: Path, num_data_nodes: int = 3) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.names = ["nn", *(f"dn{number}" for number in range(num_data_nodes))]
        self._ports = free_ports(2 + 3 * num_data_nodes)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._jars = ":".join(CLASSPATH.read_text().split())
        for name in self.names:
            self._configure(name)

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Of the name node."""
        return self._ports[0]

    def __enter__(self) -> HdfsCluster:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*self._java("nn"), "-format", "-force", "-nonInteractive"], check=True, timeout=60.0, **options)
        try:
            for name in self.names:
                self.start(name)
            self.wait_for(len(self.names) - 1)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for name in self._processes:
            self.kill(name)

    def start(self, name: str) -> None:
        with open(self.directory / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(_guard.wrap(self._java(name)), stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def freeze(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(signal.SIGCONT)

    def wait_for(self, num_data_nodes: int) -> None:
        """Until the name node serves, with that many data nodes."""
        deadline_s = time.monotonic() + 60.0
        while self._num_live() != num_data_nodes:
            for name, process in self._processes.items():
                assert process.poll() in (None, -signal.SIGKILL), self._log(name)
            assert time.monotonic() < deadline_s, self._log("nn")
            time.sleep(0.05)

    def wait_for_copies(self, path: str, num: int) -> None:
        """Until each block of a file has that many."""
        deadline_s = time.monotonic() + 60.0
        while set(found := self._num_copies(path)) != {num}:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)

    def _num_copies(self, path: str) -> list[int]:
        query = f"ugi={getpass.getuser()}&files=1&blocks=1&path={path}"
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[1]}/fsck?{query}", timeout=10.0) as answer:
            return [int(number) for number in re.findall(r"Live_repl=(\d+)", answer.read().decode())]

    def _num_live(self) -> int:
        query = "qry=Hadoop:service=NameNode,name=FSNamesystemState"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[1]}/jmx?{query}", timeout=2.0) as answer:
                state = json.load(answer)["beans"][0]
        except (OSError, IndexError, ValueError):
            return -1
        return int(state["NumLiveDataNodes"]) if state["FSState"] == "Operational" else -1

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-2000:]

    def dfs(self, *arguments: str) -> str:
        """What `hdfs dfs` prints, which is this class of Hadoop."""
        command = [*self._java("nn")[:-1], "org.apache.hadoop.fs.FsShell", "-fs", self.url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _java(self, name: str) -> list[str]:
        server = "namenode.NameNode" if name == "nn" else "datanode.DataNode"
        return [
            "java", "-Xmx256m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
            f"-Djava.io.tmpdir={self.directory / name}", "-Djava.net.preferIPv4Stack=true",
            "-cp", f"{self.directory / name}:{self._jars}", f"{PACKAGE}.{server}",
        ]  # fmt: skip

    def _configure(self, name: str) -> None:
        where = self.directory / name
        for page in ("hdfs", "datanode", "static"):  # they look for their pages in the class path
            (where / "webapps" / page / "WEB-INF").mkdir(parents=True)
            (where / "webapps" / page / "WEB-INF" / "web.xml").write_text("<web-app></web-app>")
        (where / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,c\nlog4j.appender.c=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.c.layout=org.apache.log4j.SimpleLayout\n"
        )
        (where / "hadoop-metrics2.properties").touch()
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(where / "tmp")}
        hdfs = {
            "dfs.replication": str(len(self.names) - 1),
            "dfs.namenode.name.dir": f"file://{where}/data",
            "dfs.namenode.http-address": f"127.0.0.1:{self._ports[1]}",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "2000",
            "dfs.namenode.redundancy.interval.seconds": "1",
            "dfs.namenode.reconstruction.pending.timeout-sec": "5",
        }
        if name != "nn":
            ports = self._ports[2 + 3 * int(name[2:]) :]
            hdfs |= {
                "dfs.datanode.data.dir": f"file://{where}/data",
                "dfs.datanode.address": f"127.0.0.1:{ports[0]}",
                "dfs.datanode.http.address": f"127.0.0.1:{ports[1]}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{ports[2]}",
            }
        for file, settings in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            (where / file).write_text(_xml(settings))


def _xml(settings: dict[str, str]) -> str:
    each = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items())
    return f"<configuration>{''.join(each)}</configuration>"
