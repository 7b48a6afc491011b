"""What a step of Slurm answers, and what it does not. The variables are those that Slurm 22.05 gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_agent.launch import slurm
from swift_agent.launch.checks import ConfigError
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import get_args_parser, parse_args

JOB = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "lab", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3",
       "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "3", "SLURMD_NODENAME": "n1"}  # fmt: skip
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2",
        "SLURM_NODEID": "2", "SLURMD_NODENAME": "n3", "SLURM_RESTART_COUNT": "1"}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AgentConfig]:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def config(environ: dict[str, str], *args: str) -> AgentConfig:
        for name, value in {"SWIFT_ETCD_ENDPOINTS": "etcd1:2379", **environ}.items():
            monkeypatch.setenv(name, value)
        return AgentConfig.from_args(parse_args([*args, "train.py"]))

    return config


def test_a_step() -> None:
    assert slurm.step_of(STEP) == slurm.Step("lab-17", "n3", 3, 3, 2, 1)
    assert slurm.step_of(JOB) is None and slurm.step_of({}) is None


def test_the_nodes_of_a_job() -> None:
    assert slurm.nodes_of({**STEP, "SLURM_JOB_NODELIST": "n[1-3]"}) == "n[1-3]"
    assert slurm.nodes_of({**JOB, "SLURM_JOB_NODELIST": "n[1-3]"}) == slurm.nodes_of({}) == slurm.nodes_of(STEP) == ""


def test_the_nodes_of_a_heterogeneous_job() -> None:
    """In a step of all parts, and in one of the second part only."""
    parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "m[2-3]"}
    assert slurm.nodes_of({**STEP, **parts, "SLURM_JOB_NODELIST": "n1,m[2-3]"}) == "n1,m[2-3],n1,m[2-3]"
    assert slurm.nodes_of({**STEP, **parts, "SLURM_JOB_NODELIST": "m[2-3]"}) == "m[2-3],n1"


def test_srun_needs_no_other_option(run: Callable[..., AgentConfig]) -> None:
    found = run(STEP, "--spares", "1")
    assert (found.nnodes, found.max_nodes, found.spares) == (2, 2, 1)
    assert (found.job_id, found.node_id, found.node_rank) == ("lab-17", "n3", 2)


def test_what_the_user_says_counts(run: Callable[..., AgentConfig]) -> None:
    found = run(STEP, "--nnodes", "1:4", "--rdzv-id", "gpt", "--node-rank", "0", "--node-id", "me")
    assert (found.nnodes, found.max_nodes, found.job_id, found.node_id, found.node_rank) == (1, 4, "gpt", "me", 0)
    found = run({**STEP, "PET_NNODES": "2", "PET_RDZV_ID": "bert", "PET_NODE_RANK": "1", "SWIFT_NODE_ID": "you"})
    assert (found.nnodes, found.job_id, found.node_id, found.node_rank) == (2, "bert", "you", 1)


def test_a_step_for_each_node_has_the_number_of_nodes_from_its_caller(run: Callable[..., AgentConfig]) -> None:
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    found = run(alone, "--nnodes", "2", "--spares", "1")
    assert (found.nnodes, found.spares, found.job_id, found.node_id) == (2, 1, "lab-17", "n3")


@pytest.mark.parametrize(
    ("environ", "args", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "24"}, [], "24 tasks on 3 nodes.*type srun --ntasks-per-node=1"),
        ({}, ["--spares", "3"], r"--spares 3: this step of Slurm has 3 nodes.*type --spares 2, or fewer"),
        ({"SWIFT_ETCD_ENDPOINTS": ""}, [], "need an etcd.*deploy/slurm/train.sbatch starts one"),
    ],
)
def test_mistakes(environ: dict[str, str], args: list[str], said: str, run: Callable[..., AgentConfig]) -> None:
    with pytest.raises(ConfigError, match=said):
        run({**STEP, **environ}, *args)


def test_outside_of_a_step_and_for_torchs_own_launcher_nothing_changes(run: Callable[..., AgentConfig]) -> None:
    found = run(JOB)
    assert (found.nnodes, found.node_rank) == (1, 0) and found.job_id != "lab-17" and "n1" not in found.node_id
    run(STEP)
    theirs = parse_args(["--rdzv-backend", "c10d", "train.py"])
    assert (theirs.nnodes, theirs.rdzv_id, theirs.node_rank) == ("1:1", "none", 0)
    theirs = get_args_parser().parse_args(["train.py"])
    assert (theirs.nnodes, theirs.rdzv_id, theirs.node_rank) == ("1:1", "none", 0)
    alone = parse_args(["--standalone", "train.py"])
    assert (alone.nnodes, alone.rdzv_id) == ("1:1", "none")


def test_it_is_said() -> None:
    assert slurm.describe(STEP, 3) == "Slurm job lab-17, start 2: node 2 of the 3 of this step"
    assert "type srun swift-run ... for the other 2, too" in slurm.describe(JOB, 1)
    assert slurm.describe(JOB, 2) == slurm.describe({}, 1) == ""
