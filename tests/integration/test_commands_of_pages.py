"""The commands of the pages are run as the pages have them, on one machine: with other sizes, names and files, and with
all their options.

Those of Slurm, Kubernetes, etcd and systemd are run by the tests of these. unit/test_docs_commands.py says which test
runs a command, and which commands none runs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from swift_agent.ctl.main import cli
from swift_logging_store.log.archive import CLOCK, directory_name
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import EtcdCluster, etcd_binary, wait_for
from tests.support.job import ROOT, SOURCE_ROOTS, Agents
from tests.support.pages import command, fenced, put_in, words

MACHINE = {"--nnodes": "1", "--nproc-per-node": "2"}
ETCD = "export SWIFT_ETCD_ENDPOINTS"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with PrivateEtcd(etcd_binary()) as server:
        yield server.endpoint


class Shell:
    """Runs lines of the pages in *directory*, where the script of docs/first-script.md is `train.py`."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self.directory, self.processes = directory, list[subprocess.Popen[str]]()
        self.train(epochs=2)
        bins = f"{Path(sys.executable).parent}:{Path(etcd_binary()).parent}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
            "PATH": f"{bins}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore", "PET_START_METHOD": "forkserver", "SWIFT_ETCD_ENDPOINTS": endpoint,
        }  # fmt: skip

    def train(self, *, epochs: int) -> None:
        page = (ROOT / "docs" / "first-script.md").read_text()
        script = next(code for _, language, code in fenced(page) if language == "python" and "swift.init" in code)
        assert "job.epochs(200)" in script
        (self.directory / "train.py").write_text(script.replace("epochs(200)", f"epochs({epochs})"))

    def start(self, line: str) -> Callable[[], str]:
        """What it has said until now."""
        path = self.directory / f"log.{len(self.processes)}"
        with path.open("w") as log:
            self.processes.append(subprocess.Popen(
                ["bash", "-c", f"exec {line}" if line.startswith(("swift-run", "torchrun", "python")) else line],
                env=self.environment, cwd=self.directory, stdout=log, stderr=log, text=True,
            ))  # fmt: skip
        return path.read_text

    def run(self, line: str, *, times: int = 1) -> str:
        """On so many machines at once; all have to end well."""
        said = [self.start(line) for _ in range(times)]
        codes = [process.wait(100) for process in self.processes[-times:]]
        text = "\n".join(one() for one in said)
        assert codes == [0] * times, f"{line}\n{text}"
        return text


@pytest.fixture
def shell(tmp_path: Path, endpoint: str) -> Iterator[Shell]:
    made = Shell(tmp_path, endpoint)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


# ---- swift-run ----


@pytest.mark.parametrize(("line", "machines"), [
    (put_in(command("README.md", "swift-run --nnodes 16"), MACHINE), 2),
    (put_in(command("docs/elastic.md", "swift-run"), {"--nnodes": "1:2", "--nproc-per-node": "1"}), 2),
    (put_in(command("docs/fault-injection.md", "swift-run"), MACHINE), 1),
    (put_in(command("docs/observability.md", "swift-run"),
            {**MACHINE, "--metrics-addr": "127.0.0.1", "--metrics-port": "0"}), 1),
    (put_in(command("docs/parallel-recovery.md", "swift-run"), {"...": "--nproc-per-node 2", "--spares": "1"}), 1),
], ids=["README.md", "elastic.md", "fault-injection.md", "observability.md", "parallel-recovery.md"])  # fmt: skip
def test_swift_run(line: str, machines: int, shell: Shell) -> None:
    said = shell.run(line, times=machines)
    assert len(re.findall(r"rank \d+ is process", said)) == 2, said


def test_names_of_logs(shell: Shell) -> None:
    line = command("docs/worker-output.md", "swift-run")
    shell.run(line)
    found = {path.name for path in (shell.directory / "logs").iterdir() if path.is_symlink()}
    host = socket.gethostname()
    assert found == {
        f"rank-{rank}-{host}-1.{ending}" for rank in (0, 1) for ending in ("stdout.log", "stderr.log", "error.json")
    }


def test_swift_run_with_a_secret(shell: Shell) -> None:
    shell.run(command("docs/security.md", "(umask 077; openssl"))
    secret = shell.directory / "job-secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_text().strip()) == 44
    said = shell.run(put_in(command("docs/security.md", "swift-run"), MACHINE))
    assert "rank 1 is process" in said and "no job secret" not in said


def test_the_endpoints_are_those_of_the_variable(shell: Shell) -> None:
    endpoint = shell.environment.pop("SWIFT_ETCD_ENDPOINTS")
    export = put_in(command("README.md", ETCD), {"etcd1:2379,etcd2:2379,etcd3:2379": endpoint})
    status = subprocess.run(
        ["bash", "-c", f"{export}; swiftctl status"], env=shell.environment, capture_output=True, text=True, timeout=60
    )
    assert status.returncode == 0, status.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/first-script.md"])
def test_first_script(page: str, shell: Shell) -> None:
    if page == "README.md":
        run, kill, pid = command("README.md", "swift-run --standalone"), command("README.md", "kill -9"), "4711"
    else:
        shell.run(command("docs/first-script.md", "python train.py"))
        shell.run(command("docs/first-script.md", "torchrun"))
        run, kill = command("docs/first-script.md", "swift-run"), command("docs/first-script.md", "kill -9")
        pid = "20291"
    shell.train(epochs=50)
    said = shell.start(run)
    agent = shell.processes[-1]
    found = wait_for(lambda: re.search(r"rank 1 is process (\d+)", said()), 60, f"the worker\n{said()}")
    shell.run(put_in(kill, {pid: found[1]}))
    assert agent.wait(100) == 0, said()
    assert "recovered: generation 2 goes on" in said(), said()


BENCHMARKS = (
    "benchmarks/recovery.py", "benchmarks/overhead.py", "benchmarks/message_log.py", "benchmarks/replay.py",
    "benchmarks/experiments.py",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", BENCHMARKS)
def test_what_make_bench_and_make_experiments_run(script: str, shell: Shell) -> None:
    """All but scale.py, which integration/test_scale_benchmark.py runs; small."""
    done = subprocess.run([sys.executable, str(ROOT / script), "--quick"], env=shell.environment, cwd=shell.directory,
                          capture_output=True, text=True, timeout=800)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["benchmarks/parallel.py", "benchmarks/predict.py"])
def test_benchmarks_that_say_how_long_a_recovery_should_take(script: str, shell: Shell) -> None:
    """Small. Their rules on times are for a machine that has nothing else to do, what they say of weights is not."""
    done = subprocess.run([sys.executable, str(ROOT / script), "--quick", "--json"], env=shell.environment,
                          cwd=shell.directory, capture_output=True, text=True, timeout=800)  # fmt: skip
    assert done.returncode in (0, 1) and done.stdout, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] and found["cases"], done.stdout
    for case in found["cases"]:
        predicted = case["predicted_s"]
        assert predicted and all(one > 0 for one in predicted), case


# ---- swiftctl ----


class Operator:
    """Runs `swiftctl` as a page has it."""

    def __init__(self, endpoint: str) -> None:
        self._variables = {"SWIFT_ETCD_ENDPOINTS": endpoint, "COLUMNS": "150"}

    def __call__(self, text: str, code: int = 0) -> str:
        program, *arguments = words(text)
        assert program == "swiftctl"
        done = CliRunner().invoke(cli, arguments, env=self._variables)
        assert done.exit_code == code, f"{text}\n{done.output}"
        return done.output


def test_swiftctl_on_a_job(endpoint: str, tmp_path: Path, forks: ForkServer) -> None:
    """Two nodes with one worker each and a spare, from a fault that was ordered to the end."""
    swiftctl, journals = Operator(endpoint), tmp_path / "journals"
    agents = Agents(
        tmp_path, endpoint, num_workers=1, max_restarts=None, job_id="real", forks=forks,
        options=("--spares", "1", "--allow-injection", "--journal", str(journals)),
        orders={"iterations": 4000, "pause_s": 0.1},
    )  # fmt: skip
    try:
        for node in "abc":
            agents.start(node)
        wait_for(lambda: all((tmp_path / f"calls.{rank}").exists() for rank in range(2)), 90, "training")
        said = swiftctl(put_in(command("docs/fault-injection.md", "swiftctl inject trial"), {
            "trial": "real", "--rank": "1", "--at": "iteration=next,phase=backward,part=0.5",
        }))  # fmt: skip
        assert "job real: injected on node" in said and "kill-worker of rank 1" in said
        wait_for(lambda: "recovered: generation 2" in agents.outcome(0.0).text(), 90, "the recovery")

        assert "real" in swiftctl(command("docs/status.md", "swiftctl status"))
        for text in (
            command("docs/status.md", "swiftctl status real"),
            put_in(command("README.md", "swiftctl status gpt"), {"gpt": "real"}),
            put_in(command("docs/kubernetes.md", "kubectl -n training exec").partition(" -- ")[2],
                   {"training-gpt": "real"}),
        ):  # fmt: skip
            assert "job real: training, generation 2" in swiftctl(text)
        assert "recovered, goes on at iteration" in swiftctl(command("docs/status.md", "swiftctl history real"))
        said = swiftctl(command("docs/status.md", "swiftctl explain real"))
        assert "Generation 2 (replace) was made because" in said
        assert "incidents    1" in swiftctl(command("docs/timeline.md", "swiftctl timeline real"))
        page, traces = tmp_path / "real.html", tmp_path / "traces.json"
        swiftctl(put_in(command("docs/timeline.md", "swiftctl timeline real --html"), {"real.html": str(page)}))
        assert "Job real" in page.read_text()
        swiftctl(put_in(command("docs/observability.md", "swiftctl timeline JOB --otlp"),
                        {"JOB": "real", "URL": str(traces)}))  # fmt: skip
        assert "resourceSpans" in json.loads(traces.read_text())
        # Of this machine one thing or another may be wrong: it says what.
        assert "etcd latency" in swiftctl(command("docs/doctor.md", "swiftctl doctor"), code=_health(endpoint))

        status = json.loads(swiftctl("swiftctl status real --json"))
        node = next(one["node"] for one in status["nodes"] if one["slot"] == 0)
        spare = next(one["node"] for one in status["nodes"] if one["slot"] is None)
        said = swiftctl(put_in(command("docs/drain.md", "swiftctl drain real"), {"b": node}))
        assert f"job real: node {node} has left, {spare} has slot 0" in said
        assert agents.running[node].wait(30) == 0
        report = tmp_path / "report.json"
        swiftctl(put_in(command("docs/fault-injection.md", "swiftctl campaign trial"), {
            "trial": "real", "--faults": "2", "--report": str(report),
        }))  # fmt: skip
        assert [one["state"] for one in json.loads(report.read_text())["incidents"]] == ["recovered"] * 2
        assert "nothing to remove" in swiftctl(command("docs/operations.md", "swiftctl gc"))
        assert "all nodes have left" in swiftctl(command("docs/operations.md", "swiftctl stop real"))
        outcome = agents.wait(30)
        assert {outcome.exit_codes[name] for name in "abc" if name != node} == {3}, outcome.text()
        assert "maintenance of rack 7" in outcome.text()
    finally:
        agents.kill_all()
    written = sorted(journals.glob(f"real.{node}.*.jsonl"))
    assert len(written) == 1
    replay = command("docs/journals.md", "swiftctl replay /var/log")
    assert ": same" in swiftctl(put_in(replay, {"/var/log/swift/gpt.a.0b58ffa5c60b0c6f.jsonl": str(written[0])}))
    for text in (
        put_in(command("docs/journals.md", "swiftctl timeline --journal"), {"DIR": str(journals)}),
        put_in(command("docs/timeline.md", "swiftctl timeline JOB --journal"), {"JOB": "real", "DIR": str(journals)}),
    ):
        assert "incidents    4" in swiftctl(text)  # the drain is one of them


def _health(endpoint: str) -> int:
    """The exit code of `swiftctl doctor`: whether a check fails on this machine."""
    done = CliRunner().invoke(cli, ["doctor", "--json"], env={"SWIFT_ETCD_ENDPOINTS": endpoint})
    return int(any(one["verdict"] == "fail" for one in json.loads(done.stdout)["findings"]))


def test_swiftctl_on_an_etcd_of_the_job(shell: Shell) -> None:
    """Its address is in the first lines."""
    shell.train(epochs=2000)
    said = shell.start(command("README.md", "swift-run --standalone"))
    text = command("docs/operations.md", "swiftctl status --rdzv-endpoint unix:")
    found = wait_for(lambda: re.search(r"--rdzv-endpoint (unix:\S+:1)\b", said()), 60, f"the address\n{said()}")
    Operator("127.0.0.1:1")(put_in(text, {"--rdzv-endpoint": found[1]}))


# ---- files and etcd ----


def test_logs_are_removed_by_hand(shell: Shell) -> None:
    store = shell.directory / "logs"
    for job in ("gpt", "bert"):
        (store / directory_name(job, 1, f"{CLOCK}1764000000", 2, "0b58ffa5")).mkdir(parents=True)
    shell.run(put_in(command("docs/message-logs.md", "rm -r"), {"/shared/logs": str(store)}))
    assert [path.name.partition(".")[0] for path in store.iterdir()] == ["bert"]


def test_etcd_is_compacted(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with EtcdCluster(tmp_path / "etcd") as cluster:
        shell.environment["ETCDCTL_ENDPOINTS"] = cluster.endpoints[0]
        for number in range(3):
            cluster.ctl("put", "a", str(number))
        assert "compacted revision 4" in shell.run(command("docs/etcd-cluster.md", "etcdctl compact"))
        assert "Finished defragmenting" in shell.run(command("docs/etcd-cluster.md", "etcdctl defrag"))
        assert "ENDPOINT" in shell.run(command("docs/etcd-cluster.md", "etcdctl endpoint status"))
        shell.run(command("docs/etcd-cluster.md", "etcdctl alarm disarm"))
