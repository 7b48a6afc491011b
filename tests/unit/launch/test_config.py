"""Every mistake of a command line is found at once, with what to type; what is right ends up in one frozen object."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import click.testing
import pytest

from swift_agent.launch.checks import ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import parse_args
from swift_agent.run import cli, main
from swift_rendezvous.roster.records import AS_LONG_AS_IT_ADVANCES, AS_MANY_AS_PAY


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a training script, and an environment without settings of ours."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SWIFT_ETCD_", "SWIFT_JOB_", "SWIFT_JOURNAL", "SWIFT_NODE_ID")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*args: str, environ: dict[str, str] | None = None) -> AgentConfig:
    return AgentConfig.from_args(parse_args(list(args)), environ)


def mistakes(*args: str, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        config(*args, environ=environ)
    return refused.value.mistakes


def test_one_node_alone() -> None:
    found = config("train.py", "--lr", "0.1")
    assert (found.nnodes, found.max_nodes, found.nproc, found.etcd, found.spares) == (1, 1, 1, None, 0)
    assert (found.entrypoint, found.entry_args) == (sys.executable, ("-u", "train.py", "--lr", "0.1"))
    assert (found.entry_kind, found.training_script, found.training_script_args) == (
        "script",
        "train.py",
        ("--lr", "0.1"),
    )
    assert found.launch.run_id == found.job_id and found.launch.rdzv_backend == "swift-etcd"
    assert uuid.UUID(found.job_id)
    assert found.node_id.endswith(f"-{os.getpid()}")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.spares = 1  # type: ignore[misc]


def test_a_range_of_sizes() -> None:
    found = config("--nnodes", "2:4", "--rdzv-endpoint", "a", "--rdzv-conf", "last_call_timeout=7", "train.py")
    assert (found.nnodes, found.max_nodes, found.last_call_s, found.join_timeout_s) == (2, 4, 7.0, 600.0)
    same = config("--nnodes", "3:3", "--rdzv-endpoint", "a", "train.py")
    assert (same.nnodes, same.max_nodes, same.last_call_s) == (3, 3, 30.0)


def test_many_nodes() -> None:
    found = config(
        *("--nnodes=4", "--nproc-per-node", "2", "--spares", "1", "--max-restarts", "3", "--rdzv-id", "gpt"),
        *("--rdzv-endpoint", "a:2379,b", "--lease-ttl", "3", "--preload", "numpy, torch.optim", "--node-id", "n1"),
        *("--replacement-timeout", "0", "--stop-deadline", "2.5", "--standbys", "0", "--role", "trainer", "train.py"),
    )
    assert (found.nnodes, found.max_nodes, found.nproc, found.spares, found.max_restarts) == (4, 4, 2, 1, 3)
    assert found.etcd is not None and found.etcd.endpoints == ("a:2379", "b:2379")
    assert (found.job_id, found.node_id, found.role) == ("gpt", "n1", "trainer")
    assert (found.lease_ttl_s, found.replacement_timeout_s, found.stop_deadline_s) == (3, 0.0, 2.5)
    assert (found.num_standbys, found.preload) == (0, ("numpy", "torch.optim"))
    assert (found.launch.max_nodes, found.launch.nproc_per_node, found.launch.max_restarts) == (4, 2, 3)
    assert found.launch.rdzv_endpoint == "a:2379,b:2379"


def test_no_number_of_restarts() -> None:
    found = config("train.py")
    assert (found.max_restarts, found.launch.max_restarts) == (AS_LONG_AS_IT_ADVANCES, 0)
    found = config("--max-restarts", "0", "train.py")
    assert (found.max_restarts, found.launch.max_restarts) == (0, 0)


def test_the_wait_for_the_first_nodes_is_an_option_of_the_rendezvous() -> None:
    assert config("train.py").join_timeout_s == 600.0  # torch's default
    assert config("--rdzv-conf", "a=1,join_timeout=7.5", "train.py").join_timeout_s == 7.5
    for text in ("join_timeout=soon", "join_timeout=0", "join_timeout=nan", "join_timeout"):
        with pytest.raises(ConfigError, match="join_timeout"):
            config("--rdzv-conf", text, "train.py")


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert config("--heartbeat", "0.5", "train.py").heartbeat_s == 0.5
    for args in (("--heartbeat", "0"), ("--heartbeat", "nan"), ("--heartbeat", "60")):
        with pytest.raises(ConfigError, match=r"--heartbeat .*must be"):
            config(*args, "train.py")
    with pytest.raises(ConfigError, match="type --lease-ttl 8"):
        config("--heartbeat", "1.0", "--lease-ttl", "5", "train.py")


def test_endpoints_from_the_environment_and_options_before_it() -> None:
    environ = {"SWIFT_ETCD_ENDPOINTS": "c:1,d:2", "SWIFT_NODE_ID": "rack7"}
    found = config("--nnodes", "16", "train.py", environ=environ)
    assert found.etcd is not None and found.etcd.endpoints == ("c:1", "d:2")
    assert (found.node_id, found.job_id) == ("rack7", "none")
    found = config("--rdzv-endpoint", "e:3", "--node-id", "x", "train.py", environ=environ)
    assert found.etcd is not None and (found.etcd.endpoints, found.node_id) == (("e:3",), "x")


def test_a_journal_is_asked_for_and_its_directory_looked_at(workplace: Path) -> None:
    assert config("train.py").journal is None and config("train.py", environ={"SWIFT_JOURNAL": ""}).journal is None
    assert config("train.py", environ={"SWIFT_JOURNAL": "a/b"}).journal == str(workplace / "a" / "b")
    assert config("--journal", "c", "train.py", environ={"SWIFT_JOURNAL": "a/b"}).journal == str(workplace / "c")
    assert mistakes("--journal", "train.py/x", "train.py") == (
        "--journal train.py/x: train.py is no directory that can be written to; name another one",
    )


def test_where_messages_are_logged_and_how_much_of_them(workplace: Path) -> None:
    assert (config("train.py").message_log, config("train.py").message_log_bytes) == (None, None)
    found = config("--message-log-limit", "1.5", "train.py", environ={"SWIFT_MESSAGE_LOG": "a/b"})
    assert (found.message_log, found.message_log_bytes) == (str(workplace / "a" / "b"), 1_500_000_000)
    found = config("--message-log", "c", "train.py", environ={"SWIFT_MESSAGE_LOG": "a"})
    assert found.message_log == str(workplace / "c")
    assert mistakes("--message-log", "train.py/x", "--message-log-limit", "0", "train.py") == (
        "--message-log-limit 0.0: must be above 0 GB; type for example --message-log-limit 50",
        "--message-log train.py/x: train.py is no directory that can be written to; name another one",
    )
    (nan,) = mistakes("--message-log-limit", "nan", "train.py")
    assert nan.startswith("--message-log-limit nan: must be above 0 GB")


def test_where_logs_of_messages_are_copied_to(workplace: Path) -> None:
    assert config("train.py").log_store is None
    assert config("train.py", environ={"SWIFT_LOG_STORE": "s3://bucket/logs"}).log_store == "s3://bucket/logs"
    found = config("--log-store", "logs", "train.py", environ={"SWIFT_LOG_STORE": "s3://bucket/logs"})
    assert found.log_store == str(workplace / "logs")
    assert mistakes("--log-store", "ftp://host/logs", "train.py") == (
        "--log-store ftp://host/logs: a directory that all nodes share, file:///PATH, hdfs://HOST:PORT/PATH or "
        "s3://BUCKET/PREFIX is wanted; credentials come from the environment",
    )
    (secret,) = mistakes("--log-store", "s3://key:a-secret@bucket/logs?x=another", "train.py")
    assert secret.startswith("--log-store s3://bucket/logs: a directory")
    (slash,) = mistakes("--log-store", "s3:/bucket/logs", "train.py")
    assert slash.startswith("--log-store s3:///bucket/logs: a directory")
    (wrong,) = mistakes("--log-store", "train.py/x", "train.py")
    assert wrong.startswith("--log-store train.py/x: train.py is no directory that can be written to")
    (wrong,) = mistakes("--log-store", f"file://{workplace}/train.py/x", "train.py")
    assert wrong.startswith(f"--log-store {workplace}/train.py/x: {workplace}/train.py is no directory")


def test_standalone_has_a_private_etcd_whatever_else_is_said() -> None:
    args = ("--standalone", "--rdzv-id", "gpt", "--rdzv-endpoint", "a:1", "train.py")
    found = config(*args, environ={"SWIFT_ETCD_ENDPOINTS": "c:1"})
    assert found.standalone and found.etcd is None and found.job_id != "gpt"
    assert config(*args).job_id != found.job_id


def test_a_job_without_peers_keeps_the_id_it_is_given() -> None:
    assert config("--rdzv-id", "gpt", "train.py").job_id == "gpt"


@pytest.mark.parametrize(
    ("args", "kind", "command", "entry_args"),
    [
        (["-m", "json.tool", "x"], "module", sys.executable, ("-u", "-m", "json.tool", "x")),
        (["-m", "train"], "module", sys.executable, ("-u", "-m", "train")),
        (["--no-python", "sh", "-c", "true"], "command", "sh", ("-c", "true")),
        (["."], "script", sys.executable, ("-u", ".")),
    ],
)
def test_entries(args: list[str], kind: str, command: str, entry_args: tuple[str, ...], workplace: Path) -> None:
    (workplace / "__main__.py").write_text("")
    found = config(*args)
    assert (found.entry_kind, found.entrypoint, found.entry_args) == (kind, command, entry_args)


def test_run_path_is_torchs_function() -> None:
    found = config("--run-path", "train.py", "7")
    assert callable(found.entrypoint) and found.entrypoint.__name__ == "run_script_path"
    assert (found.entry_kind, found.entry_args) == ("function", ("train.py", "7"))


def test_password_is_never_shown(workplace: Path) -> None:
    (workplace / "secret").write_text("hunter2\n")
    (workplace / "secret").chmod(0o600)
    found = config("--rdzv-endpoint", "a", "--etcd-user", "ann", "--etcd-password-file", "secret", "train.py")
    assert found.etcd is not None and (found.etcd.user, found.etcd.password) == ("ann", "hunter2")
    assert "hunter2" not in repr(found)
    (told,) = mistakes("--rdzv-endpoint", "a", "--etcd-user", "ann:hunter2", "train.py")
    assert "--etcd-password-file" in told and "hunter2" not in told


def test_the_job_secret_is_never_shown(workplace: Path) -> None:
    (workplace / "secret").write_text("a secret of many words\n")
    (workplace / "secret").chmod(0o600)
    found = config("--rdzv-endpoint", "a", "--rdzv-id", "gpt", "--job-secret-file", "secret", "train.py")
    assert found.key.protected and found.key.proof
    assert "many words" not in repr(found) and found.key.heartbeat.hex() not in repr(found)
    same = config("--rdzv-endpoint", "a", "--rdzv-id", "gpt", "train.py",
                  environ={**os.environ, "SWIFT_JOB_SECRET": "a secret of many words"})  # fmt: skip
    assert same.key.proof == found.key.proof
    other = config("--rdzv-endpoint", "a", "--rdzv-id", "bert", "--job-secret-file", "secret", "train.py")
    assert other.key.proof != found.key.proof
    assert not config("--rdzv-endpoint", "a", "train.py").key.protected


def test_a_node_alone_has_a_secret_of_its_own() -> None:
    keys = [config("--standalone", "train.py").key for _ in range(2)]
    assert all(key.protected for key in keys) and keys[0].heartbeat != keys[1].heartbeat


MISTAKES: list[tuple[list[str], str]] = [
    (["--nnodes", "0", "train.py"], r"--nnodes 0: .*type --nnodes 1 or more"),
    (["--nnodes", "2:1", "train.py"], r"--nnodes 2:1: .*type --nnodes 2"),
    (["--nnodes", "many", "train.py"], r"--nnodes many: not a number"),
    (["--nnodes", "1:2:3", "train.py"], r"--nnodes 1:2:3: not a number"),
    (["--nnodes", "1:4", "train.py"], r"4 nodes need an etcd .*--rdzv-endpoint HOST:2379"),
    (["--nnodes", "1:2", "--standalone", "train.py"], r"--standalone is for one node"),
    (["--rdzv-conf", "last_call_timeout=0", "train.py"], r"last_call_timeout=0: .*last_call_timeout=30"),
    (["--nnodes", "2", "--standalone", "train.py"], r"--standalone is for one node"),
    (["--nproc-per-node", "some", "train.py"], r"--nproc-per-node some: .*type a number, auto, cpu or gpu"),
    (["--nproc-per-node", "0", "train.py"], r"--nproc-per-node 0: .*at least one"),
    (["--log-budget", "lots", "train.py"], r"--log-budget 'lots' is no size; type 500GiB, 2TiB, or 20%"),
    (["--log-budget", "120%", "train.py"], "'120%' is no size"),
    (["--log-budget", "20%", "--log-groups", "0-1", "--nnodes", "2", "train.py"], "are chosen, or named; type one"),
    (["--log-budget", "20%", "--strategy", "checkpoint", "train.py"], "nothing is logged; leave one of them out"),
    (["--log-groups", "0-1", "--nnodes", "2", "--strategy", "replica", "train.py"], "0-1 --strategy replica: nothing"),
    (["--log-budget", "20%", "--nnodes", "2:4", "train.py"], "has no fixed groups; leave it out"),
    (["--strategy", "luck", "train.py"], r"luck: .*type one of auto, replica, log, log\+parallel, checkpoint"),
    (["--helpers", "0", "train.py"], "--helpers 0: must be 1 or more; leave it out"),
    (["--helpers", "2", "--strategy", "log", "train.py"], "nobody helps with --strategy log; type"),
    (["--helpers", "0", "--strategy", "log+parallel", "train.py"], "--helpers 0: must be 1 or more; type --strat"),
    (["--parallel-sum", "unordered", "train.py"], "unordered: nobody may help; type for example --helpers 2"),
    (["--parallel-sum", "ordered", "--strategy", "log", "train.py"], r"ordered: nobody helps with --strategy log"),
    (["--parallel-sum", "any", "--strategy", "log+parallel", "train.py"], r"any: .* type one of ordered, unordered"),
    (["--profile", "no/such/p.json", "train.py"], r"--profile no/such/p.json: no file can be written there"),
    (["--log-groups", "0-1,x", "--nnodes", "4", "train.py"], r"--log-groups 0-1,x: 'x' is no node or range of nodes"),
    (["--log-groups", "3-2", "--nnodes", "4", "train.py"], "'3-2' is no node or range of nodes"),
    (["--log-groups", "0-4", "--nnodes", "4", "train.py"], "there is no node 4; --nnodes 4 are 0-3"),
    (["--log-groups", "0-3", "--nnodes", "4", "train.py"], "all nodes in one group log nothing; type --strategy"),
    (["--log-groups", "0-1,1-2", "--nnodes", "4", "train.py"], "node 1 is in two groups"),
    (["--log-groups", "0-1", "--nnodes", "2:4", "train.py"], "a job that changes its size .*type --nnodes 2"),
    (["--recovery", "nonsense", "train.py"], r"--recovery nonsense: .*type one of exact, .*, lossy-forward"),
    (["--on-etcd-loss", "never", "train.py"], r"--on-etcd-loss never: .*type pause or train"),
    (["--spares", "-1", "train.py"], r"--spares -1: must be 0 or more"),
    (["--standbys", "-1", "train.py"], r"--standbys -1: must be 0 or more"),
    (["--max-restarts", "-1", "train.py"], r"--max-restarts -1: must be 0 or more"),
    (["--replacement-timeout", "nan", "train.py"], r"--replacement-timeout nan: must be 0 or more"),
    (["--job-secret-file", "absent", "train.py"], r"job secret file 'absent' cannot be read: No such file"),
    (["--lease-ttl", "1", "train.py"], r"--lease-ttl 1: must be 2 or more"),
    (["--stop-deadline", "0", "train.py"], r"--stop-deadline 0.0: must be above 0"),
    (["--redirects", "7", "train.py"], r"--redirects 7: not a set of streams"),
    (["--tee", "0:9", "train.py"], r"--tee 0:9: not a set of streams"),
    (["--local-ranks-filter", "0,x", "train.py"], r"--local-ranks-filter 0,x: not a list"),
    (["--log-dir", "train.py", "train.py"], r"--log-dir train.py: train.py is no directory that can be written to"),
    (["--log-dir", "/proc/no/logs", "train.py"], r"--log-dir /proc/no/logs: .* name another one"),
    (["--result", "no/such/r.json", "train.py"], r"--result no/such/r.json: no file can be written there"),
    (["--logs-specs", "nobody", "train.py"], r"nobody"),
    (["absent.py"], r"absent.py: no such file in /"),
    (["--run-path", "absent.py"], r"absent.py: no such file"),
    (["."], r"\.: a directory without __main__.py"),
    (["-m", "no_such_package_here.train"], r"--module no_such_package_here.train: no such module"),
    (["-m", ".relative"], r"--module .relative: no such module"),
    (["--no-python", "no-such-program-here"], r"no-such-program-here: no such program"),
    (["--no-python", "-m", "json"], r"--no-python --module: .*leave one"),
    (["--preload", "numpy,not-a-name", "train.py"], r"--preload not-a-name: not the name of a module"),
    (["--rdzv-id", "a/b", "--rdzv-endpoint", "h", "train.py"], r"--rdzv-id 'a/b': .*no '/'"),
    (["--rdzv-id", "", "--rdzv-endpoint", "h", "train.py"], r"--rdzv-id '': "),
    (["--node-id", "a/b", "train.py"], r"--node-id 'a/b': .*no '/'"),
    (["--nnodes", "2", "train.py"], r"2 nodes need an etcd .*--rdzv-endpoint HOST:2379.*SWIFT_ETCD_ENDPOINTS$"),
    (["--spares", "1", "train.py"], r"1 node and 1 spare need an etcd"),
    (["--nnodes", "2", "--master-port", "29500", "train.py"], r"at --master-addr and --master-port workers meet"),
    (["--rdzv-endpoint", "a:port", "train.py"], r"port 'port' is not a number"),
    (["--rdzv-endpoint", "a", "--etcd-cert", "absent.pem", "train.py"], r"absent.pem"),
    (["--etcd-user", "ann", "train.py"], r"--etcd-\*: for which servers"),
    (["--preempt-signal", "SIGTERM,SIGLATE", "train.py"], r"there is no signal 'SIGLATE'; type names such as"),
    (["--preempt-signal", "SIGKILL", "train.py"], r"nothing can catch SIGKILL; leave it out"),
    (["--preempt-signal", "SIGCHLD", "train.py"], r"SIGCHLD has another meaning here"),
    (["--preempt-signal", "", "train.py"], r"there is no signal ''"),
    (["--preempt-grace", "-1", "train.py"], r"--preempt-grace -1.0: must be 0 or more"),
    (["--max-restarts", "3", "--max-restarts-window", "0", "train.py"], r"--max-restarts-window 0.0: must be above 0"),
    (["--max-restarts-window", "60", "train.py"], r"--max-restarts-window 60.0: of how many\? type --max-restarts N"),
    (["--metrics-addr", "10.0.0.7", "train.py"], r"--metrics-addr 10.0.0.7: at which port\? type --metrics-port 9108"),
    (["--log-names", "${rank}", "train.py"], r"--log-names \$\{rank\}: needs a directory .*--log-dir DIR, too"),
    (["--metrics-port", "70000", "train.py"], r"--metrics-port 70000: not a port; type for example"),
    (["--preempt-grace", "nan", "train.py"], r"--preempt-grace nan: must be 0 or more"),
]


@pytest.mark.parametrize(
    ("args", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistakes(args: list[str], said: str) -> None:
    assert any(re.search(said, line) for line in mistakes(*args))


def test_all_mistakes_at_once(workplace: Path) -> None:
    args = ["--nnodes", "2:1", "--spares", "-1", "--rdzv-endpoint", "a:x,b:y", "--lease-ttl", "1", "absent.py"]
    found = mistakes(*args)
    for part in ("--nnodes 2:1", "--spares -1", "'a:x'", "'b:y'", "--lease-ttl 1", "absent.py"):
        assert sum(part in line for line in found) == 1
    assert len(found) == 6
    assert sorted(path.name for path in workplace.iterdir()) == ["train.py"]  # nothing was made


def test_a_module_for_another_interpreter_is_left_to_it() -> None:
    environ = {"PYTHON_EXEC": "/opt/python", "PATH": os.defpath}
    assert config("-m", "only_there", environ=environ).entry_kind == "module"


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_the_command_prints_the_mistakes_and_exits_with_2() -> None:
    result = click.testing.CliRunner().invoke(cli, ["--spares", "-1", "absent.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: swift-run cannot start: 2 mistakes")
    assert "Traceback" not in result.output


def test_main_raises_them() -> None:
    with pytest.raises(ConfigError, match=r"absent\.py"):
        main(["absent.py"])
    with pytest.raises(SystemExit) as end:
        main(["--bogus", "train.py"])
    assert end.value.code == 2


@pytest.mark.parametrize("module", ["swift_agent.run", "swift_agent.ctl"])
def test_commands_run_as_modules(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60, env=_env()
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout and done.stderr == ""


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_as_many_help_as_pay_unless_it_is_said() -> None:
    def of(*options: str) -> tuple[int, str]:
        found = config(*options, "train.py")
        return found.helpers, found.parallel_sum

    assert of() == of("--strategy", "log") == (0, "ordered")
    assert of("--strategy", "log+parallel") == (AS_MANY_AS_PAY, "ordered")
    assert of("--helpers", "2", "--parallel-sum", "unordered") == (2, "unordered")
    assert of("--strategy", "log+parallel", "--helpers", "3", "--parallel-sum", "unordered") == (3, "unordered")
