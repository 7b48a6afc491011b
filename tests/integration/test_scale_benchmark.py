"""benchmarks/scale.py runs, and what it counts does not grow with the job: requests, and what a lost node means to the
others. Seconds are not looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.etcd_cluster import etcd_binary
from tests.support.job import ROOT, SOURCE_ROOTS


@pytest.mark.timeout(300)
def test_scale_quick() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "SWIFT_ETCD_BINARY": str(etcd_binary())}
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--quick", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (case,) = found["cases"]
    assert case["num_nodes"] == 64
    for event in ("form", "lose"):
        assert len(case[event]["ours_s"]) == len(case[event]["peer_s"]) == 1, case
        assert 0 < case[event]["ours_s"][0] <= case[event]["ready_s"][0]
    # 64 nodes: an answer for each of them would be seen here.
    assert case["form"]["per_node"]["requests"] < 25, case
    assert case["lose"]["per_node"]["requests"] < 8, case
    assert case["lose"]["per_node"]["events"] < 32, case
