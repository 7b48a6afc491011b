"""What a step of Slurm says of the job: so that `srun swift-run train.py` needs no other option. Pure.

    SLURM_STEP_NUM_NODES --> --nnodes (less --spares)      SLURM_JOB_ID   --> --rdzv-id
    SLURM_NODEID         --> --node-rank                   SLURMD_NODENAME --> --node-id

All tasks of a step see the same numbers, also of a heterogeneous job; each task of an array has a job id of its own.
This module must never run a command of Slurm, and must not change what the user has said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One `srun`. *name*: of the job among those of an etcd that several clusters use. *num_restarts*: how often Slurm
    has started the job again."""

    name: str
    node: str
    num_nodes: int
    num_tasks: int
    node_number: int
    num_restarts: int


def step_of(environ: Mapping[str, str]) -> Step | None:
    """The step that this process is a task of; None outside of one, as in a batch script."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or "SLURM_JOB_ID" not in environ:
        return None
    return Step(
        name=f"{environ.get('SLURM_CLUSTER_NAME', 'slurm')}-{environ['SLURM_JOB_ID']}",
        node=environ.get("SLURMD_NODENAME", ""),
        num_nodes=_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1),
        num_tasks=_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1),
        node_number=_number(environ, "SLURM_NODEID", least=0),
        num_restarts=_number(environ, "SLURM_RESTART_COUNT", least=0),
    )


def nodes_of(environ: Mapping[str, str]) -> str:
    """All nodes of the job, as one list of Slurm's notation (`n[1-3],m7`); '' outside of a step. Those of other
    parts of a heterogeneous job are among them."""
    if step_of(environ) is None:
        return ""
    parts = sorted(name for name in environ if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_"))
    return ",".join(dict.fromkeys(filter(None, (environ.get(name, "") for name in ("SLURM_JOB_NODELIST", *parts)))))


def nodes_left_out(environ: Mapping[str, str]) -> int:
    """In a batch script, which runs on the first node only: how many nodes the job has beside that."""
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" in environ:
        return 0
    return _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", least=1) - 1


def describe(environ: Mapping[str, str], num_nodes: int) -> str:
    """A line for people, '' outside of Slurm. *num_nodes*: that `swift-run` is to wait for, spares among them."""
    step, beside = step_of(environ), nodes_left_out(environ)
    if step is not None:
        start = f", start {step.num_restarts + 1}" if step.num_restarts else ""
        return f"Slurm job {step.name}{start}: node {step.node_number} of the {step.num_nodes} of this step"
    if beside and num_nodes == 1:
        return (
            "this is the batch script of a Slurm job, and swift-run runs on this node only: type srun swift-run ... "
            f"for the other {beside}, too"
        )
    return ""


def _number(environ: Mapping[str, str], *names: str, least: int) -> int:
    """The first of these that is a number."""
    found = (environ[name] for name in names if environ.get(name, "").isdecimal())
    return max(int(next(found, least)), least)
