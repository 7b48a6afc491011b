"""The native backend: where it is looked for, and what happens when it cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_agent import native
from tests.support.agent_forks import ForkServer
from tests.support.gloo_job import NATIVE_DIR, REPOSITORY, native_library  # noqa: F401 - fixture

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = str(Path(native.__file__).with_name("__main__.py"))  # `python -m swift_agent.native`


@pytest.fixture
def run(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(code or [file, arguments], variables): in a process of its own, because one process loads the library at most
    once. It has imported torch, but not the library."""
    folder = tmp_path_factory.mktemp("code")

    def run(program: str | list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        if isinstance(program, str):
            (folder / "code.py").write_text(program)
            program = [str(folder / "code.py")]
        return forks.run(program, {**os.environ, "SWIFT_NATIVE_DIR": str(NATIVE_DIR), **environment}, folder, 60)

    return run


def test_the_path_tells_torch_python_and_source_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setenv("SWIFT_NATIVE_DIR", str(tmp_path))
    path = native.library_path()
    assert path.is_relative_to(tmp_path) and torch.__version__ in str(path)
    other = tmp_path / "forward.cpp"
    other.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", other)
    assert native.library_path() != path
    monkeypatch.undo()
    monkeypatch.setenv("SWIFT_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "HEADERS", (other,))
    assert native.library_path() != path
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert "9.9.9" in str(native.library_path())
    monkeypatch.delenv("SWIFT_NATIVE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native.library_path().is_relative_to(tmp_path / "home" / ".cache" / "swift-agent")


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("how", ["another user's", "open to all"])
def test_it_is_not_loaded_if_others_may_have_put_it_there(
    native_library: None, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str  # noqa: F811
) -> None:
    if how == "another user's" and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    monkeypatch.setenv("SWIFT_NATIVE_DIR", str(NATIVE_DIR))
    built = native.library_path()
    monkeypatch.setenv("SWIFT_NATIVE_DIR", str(tmp_path))
    path = native.library_path()
    path.parent.mkdir()
    shutil.copy(built, path)
    code = "from swift_agent import native; print(native.load() is not None)"
    assert run(code, SWIFT_NATIVE_DIR=str(tmp_path)).stdout == "True\n"
    target = path if what == "file" else path.parent
    if how == "open to all":
        target.chmod(0o777)
    else:
        os.chown(target, 65534, 65534)
    done = run(code, SWIFT_NATIVE_DIR=str(tmp_path))
    assert done.returncode == 1 and f"{path} is not loaded" in done.stderr and str(target) in done.stderr
    assert ("user 65534 owns it" if how == "another user's" else "all users may write it") in done.stderr


def test_it_is_used_only_if_built_and_wanted(native_library: None, run: Run, tmp_path: Path) -> None:  # noqa: F811
    code = "from swift_agent import native; m = native.load(); print(m and m.Forward(1, 3, 'gloo').name())"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "SWIFT_NATIVE_DIR": str(NATIVE_DIR)}
    command = [sys.executable, "-c", code]  # a new interpreter, which has not imported torch
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "gloo\n"
    assert run(code).stdout == "gloo\n"
    assert run(code, SWIFT_NATIVE="0").stdout == "None\n"
    assert run(code, SWIFT_NATIVE_DIR=str(tmp_path)).stdout == "None\n"
    assert list(tmp_path.iterdir()) == [], "loading must not build"


def test_a_damaged_library_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWIFT_NATIVE_DIR", str(tmp_path))
    path = native.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    done = run("from swift_agent import native; native.load()", SWIFT_NATIVE_DIR=str(tmp_path))
    assert done.returncode != 0 and "native build --force" in done.stderr


@pytest.mark.parametrize(("compiler", "message"), [("/no/such/compiler", "no C++ compiler"), ("false", "exit code 1")])
def test_a_failed_build_installs_nothing(run: Run, compiler: str, message: str, tmp_path: Path) -> None:
    environment = {"SWIFT_NATIVE_DIR": str(tmp_path), "CXX": compiler}
    done = run([COMMAND, "build"], **environment)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert "works without it" in done.stderr
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    done = run([COMMAND, "info"], **environment)
    assert done.stdout.startswith("not built: ")


def test_a_forward_without_backend_says_why(native_library: None, run: Run) -> None:  # noqa: F811
    code = """
import torch, torch.distributed as dist
from swift_agent import native; from swift_agent.torch_private import groups as torch_private
forward = native.load().Forward(0, 1, "gloo")
def attempt():
    try:
        forward.allreduce([torch.ones(1)]).wait()
        print("done")
    except dist.DistBackendError as error:
        print(error)
attempt()
forward.exchange(torch_private.make_fake(0, 1))
attempt()
forward.exchange(None, "peer 3 is lost")
attempt()
forward.abort(); forward.shutdown(); forward.release()
"""
    lines = run(code).stdout.splitlines()
    assert [line for line in lines if line] == [
        "process group aborted: not connected yet", "done", "process group aborted: peer 3 is lost"
    ]  # fmt: skip


SEED_BOTH_WAYS = """
import random
import numpy, torch
from swift_agent import native
from swift_recovery.state.randomness import capture_generators, compiled_seeder, seed_generators

def disturb(case):
    if case == 1:
        numpy.random.normal()  # leaves half of a pair behind
    elif case == 2:
        random.gauss(0, 1), torch.randn(1)
    elif case == 3:
        numpy.random.rand(312)  # as many words as its state has: it stands at the end again
    elif case == 4:
        numpy.random.seed(7)
    elif case == 5:
        state = list(numpy.random.get_state())
        numpy.random.normal()
        numpy.random.set_state(state[:2] + list(numpy.random.get_state()[2:]))

def draws():
    return [torch.randn(3).tolist(), random.gauss(0, 1), random.random(), numpy.random.normal(size=3).tolist(),
            numpy.random.normal(), str(capture_generators())]

compiled = compiled_seeder(native.load().Seeder).seed
for case in range(48):
    seeds = [number * case % 2**bits for number, bits in ((0x9E3779B97F4A7C15, 64), (3**40, 64), (5**27, 64))]
    results = []
    for seed in (compiled, seed_generators):
        disturb(case % 6)
        seed(*seeds)
        results.append(str(capture_generators()))
        if case % 4 == 0:
            results[-1] += str(draws())
    assert results[0] == results[1], case
    for seed in (compiled, compiled):
        seed(*seeds)
        assert str(capture_generators()) == results[1][:len(str(capture_generators()))], case
print("equal")
"""


def test_compiled_seeds_are_those_of_python(native_library: None, run: Run) -> None:  # noqa: F811
    done = run(SEED_BOTH_WAYS)
    assert done.stdout == "equal\n", done.stderr


KEEP_BOTH_WAYS = """
import random
import torch
from torch import nn
from swift_agent import native
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
groups = [{"params": list(layer.parameters())} for layer in model]
optimizers = {"sgd": torch.optim.SGD(groups[:1], lr=0.5), "adam": torch.optim.AdamW(groups[1:], lr=0.5)}
state = TrainingState({"m": model}, optimizers)
watched, plain = Snapshot(state, native.load().Watch), Snapshot(state)
parameters = list(model.parameters())

def change(draw, group, parameter):
    match draw.randrange(13):
        case 0: group["lr"] = draw.random()
        case 1: group["lr"] = torch.tensor(draw.random())
        case 2 if isinstance(group["lr"], torch.Tensor): group["lr"].add_(1)
        case 3: group["list"] = [1]
        case 4 if "list" in group: group["list"].append(2)
        case 5: group.pop("list", None)
        case 6: group["lr"], group["weight_decay"] = group["weight_decay"], group["lr"]
        case 7: group["weight_decay"] = group.pop("weight_decay")  # the same, in another order
        case 8: parameter.grad = None
        case 9: parameter.grad = torch.ones_like(parameter)
        case 10: optimizers["adam"].load_state_dict(optimizers["adam"].state_dict())
        case 11: watched.install(plain.tree()); plain.install(watched.tree())
        case _: pass

same = 0
for seed in range(60):
    draw = random.Random(seed)
    for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
        group["lr"], group["weight_decay"] = 0.5, 0.25
        group.pop("list", None)
    watched.take(), plain.take()
    for _ in range(40):
        group = draw.choice(list(optimizers.values())).param_groups[0]
        change(draw, group, draw.choice(parameters))
        same += watched._watch.is_same()
        watched.take(), plain.take()
        assert str(watched.tree()) == str(plain.tree()), seed
        before = str(plain.tree())
        group["lr"], parameters[0].grad = "spoilt", torch.full_like(parameters[0], 2)
        watched.restore()
        plain.take()
        assert str(plain.tree()) == before, seed
assert same > 200, same
try:
    native.load().Watch([1], [])
except TypeError as error:
    print(error)
"""


def test_a_watched_snapshot_is_that_of_python(native_library: None, run: Run) -> None:  # noqa: F811
    done = run(KEEP_BOTH_WAYS)
    assert done.stdout == "a parameter is not a tensor\n", done.stderr
