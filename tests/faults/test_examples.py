"""Each script of examples/ under swift-run: a worker is killed in the middle, and the weights of all ranks at the end
are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.etcd_cluster import etcd_binary
from tests.support.job import ROOT, SOURCE_ROOTS
from tests.support.s3_server import BUCKET, S3Server

CASES = {
    "digits": ("digits.py --epochs 12 --out OUT/weights.0.pt", 2, "epoch 3/"),
    "wide-resnet": ("paper.py wide-resnet --out OUT", 2, "epoch 2/"),
    "vit": ("paper.py vit --out OUT", 2, "epoch 2/"),
    "bert": ("paper.py bert --out OUT", 2, "epoch 2/"),
    "bfloat16, accumulated": ("paper.py vit --bfloat16 --accumulate 2 --out OUT", 2, "epoch 2/"),
    "udf": ("udf.py --out OUT", 2, "iteration 20/"),
    "hsdp": ("hsdp.py --out OUT", 4, "epoch 2/"),
    "hugging face": ("huggingface.py --out OUT", 2, "epoch 2/"),
    "pipeline, log in S3": ("pipeline.py --checkpoints OUT/checkpoints --out OUT", 2, "iteration 60/"),
    "data and pipeline": ("pipeline.py --replicas 2 --checkpoints OUT/checkpoints --out OUT", 4, "iteration 60/"),
}


@pytest.fixture
def s3(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a server, if the case has its logs there; else none."""
    if "S3" not in request.node.callspec.params["name"]:
        yield {}
        return
    with S3Server(tmp_path / "s3") as server:
        yield {**server.environment, "SWIFT_LOG_STORE": f"s3://{BUCKET}/logs"}


def run(out: Path, line: str, num_workers: int, environment: dict[str, str], kill_at: str = "") -> str:
    """The output. With *kill_at*: the last worker is killed when that is printed."""
    out.mkdir()
    script, *args = line.replace("OUT", str(out)).split()
    command = [
        sys.executable, "-m", "swift_agent.run", "--standalone", "--nproc-per-node", str(num_workers),
        str(ROOT / "examples" / script), *args,
    ]  # fmt: skip
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "SWIFT_ETCD_BINARY": etcd_binary(),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", **environment,
    }  # fmt: skip
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said, killed, deadline_s = [], not kill_at, time.monotonic() + 150
        for text in process.stdout:
            said.append(text)
            if not killed and kill_at in text:
                pid = re.findall(rf"rank {num_workers - 1} is process (\d+)", "".join(said))[-1]
                os.kill(int(pid), signal.SIGKILL)
                killed = True
            assert time.monotonic() < deadline_s, "".join(said)
        assert process.wait(10) == 0 and killed, "".join(said)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                child.kill()
        process.wait()
        process.stdout.close()
    return "".join(said)


def weights(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: torch.load(path) for path in sorted(out.glob("weights.*.pt"))}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_a_worker_is_lost(name: str, s3: dict[str, str], tmp_path: Path) -> None:
    line, num_workers, moment = CASES[name]
    undisturbed = run(tmp_path / "undisturbed", line, num_workers, {})
    said = run(tmp_path / "killed", line, num_workers, s3, moment)
    assert "recovered: generation 2" in said and "recovered" not in undisturbed, said
    expected, found = weights(tmp_path / "undisturbed"), weights(tmp_path / "killed")
    assert found.keys() == expected.keys() and len(found) == (1 if name == "digits" else num_workers)
    for of_rank, state in expected.items():
        assert state and found[of_rank].keys() == state.keys()
        assert all(torch.equal(found[of_rank][key], value) for key, value in state.items()), of_rank


def test_every_script_is_run() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"demo.py", "models.py"}
    assert scripts == {line.split()[0] for line, _, _ in CASES.values()}
    page = (ROOT / "examples" / "README.md").read_text()
    assert not [name for name in scripts if f"`{name}`" not in page]
