"""What an undo costs in accuracy: the digits of `examples/digits.py`, with updates made on purpose and taken back.

SWIFT section 7.2's experiment, for several optimizers. One process; each run is repeated with several seeds:

    undisturbed   as it is
    one update    in the middle epoch an iteration's update is made, undone, and the iteration begins again
    ten cuts      the same at ten random iterations, for a random part of the parameters, as after a cut
    rollback      ten cuts with --recovery immediate-rollback: what was updated stays, and is updated again
    lossy         ten cuts with --recovery lossy-forward: it stays, and the rest is updated with 3/4 of the batch

With --kills N a real job as well: two workers under `swift-run` with overlap_update, one or the other of them killed
at N random moments.

The rule, fixed before the run: the test accuracy at the end of a disturbed run, and its mean loss in every epoch, are
no further from those of the undisturbed run of the same seed than two undisturbed runs of different seeds are apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from swift_recovery.undo.lamb import Lamb
from swift_recovery.undo.patch import copy_of
from swift_recovery.undo.undo import keep, undo

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from digits import load, make_net

BATCH_SIZE = 64
Make = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]


def muon(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon is for matrices; the rest is AdamW's."""
    wide = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(wide, lr=2e-3), torch.optim.AdamW(rest, lr=1e-3)]


OPTIMIZERS: dict[str, Make] = {
    "SGD, momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)],
    "Adam": lambda net: [torch.optim.Adam(net.parameters(), lr=1e-3)],
    "AdamW": lambda net: [torch.optim.AdamW(net.parameters(), lr=1e-3)],
    "LAMB": lambda net: [Lamb(net.parameters(), lr=5e-3)],
    "Muon": muon,
}


@dataclass
class Run:
    """*losses*: mean of each epoch; *worst*: largest change of a parameter by update and undo, over its update."""

    losses: list[float]
    accuracy: float
    worst: float = 0.0


def train(make: Make, seed: int, num_epochs: int, cuts: dict[int, float], way: str = "undo") -> Run:
    """*cuts*: iteration -> the part of the parameters that is updated when it is cut; *way*: what becomes of that."""
    torch.manual_seed(seed)
    train_set, test_set = load()
    images, labels = train_set.tensors
    net = make_net()
    optimizers = make(net)
    run = Run([], 0.0)
    num_batches = len(images) // BATCH_SIZE
    for epoch in range(num_epochs):
        order = torch.randperm(len(images))
        losses = []
        for number, batch in enumerate(order[: num_batches * BATCH_SIZE].split(BATCH_SIZE)):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            part = cuts.get(epoch * num_batches + number)
            if part is not None and way == "undo":
                run.worst = max(run.worst, make_and_undo(optimizers, part))
            elif part is not None:
                updated = update_part(optimizers, part)
                net.zero_grad()
                # Of the ranks that share the batch every fourth was lost.
                batch = batch[: BATCH_SIZE * 3 // 4] if way == "lossy" else batch
                F.cross_entropy(net(images[batch]), labels[batch]).backward()
                for parameter in updated if way == "lossy" else ():
                    parameter.grad = None  # no optimizer touches it
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        run.losses.append(statistics.fmean(losses))
    net.eval()
    with torch.no_grad():
        test_images, test_labels = test_set.tensors
        run.accuracy = float((net(test_images).argmax(1) == test_labels).float().mean())
    return run


def chosen_of(optimizer: torch.optim.Optimizer, part: float) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The first parameters of an optimizer, with their groups."""
    members = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    return members[: max(1, round(part * len(members)))]


def update_part(optimizers: list[torch.optim.Optimizer], part: float) -> list[torch.Tensor]:
    """Update the first parameters of each optimizer; the rest has no gradient meanwhile. Returns those."""
    updated: list[torch.Tensor] = []
    for optimizer in optimizers:
        chosen = [p for _, p in chosen_of(optimizer, part)]
        others = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]][len(chosen) :]
        for parameter, _ in others:
            parameter.grad = None
        optimizer.step()
        for parameter, gradient in others:
            parameter.grad = gradient
        updated += chosen
    return updated


def make_and_undo(optimizers: list[torch.optim.Optimizer], part: float) -> float:
    """Update the first parameters of each optimizer and undo that; the largest change that is left, over the update."""
    worst = 0.0
    for optimizer in optimizers:
        chosen = chosen_of(optimizer, part)
        before = [(p, copy_of(optimizer, p)[0], keep(optimizer, group, p)) for group, p in chosen]
        update_part([optimizer], part)
        for parameter, value, kept in before:
            update = float((parameter.detach() - value).abs().max())
            assert parameter.grad is not None
            undo(optimizer, parameter, parameter.grad, kept)
            worst = max(worst, float((parameter.detach() - value).abs().max()) / update if update else 0.0)
    return worst


def compare(name: str, seeds: list[int], num_epochs: int) -> dict[str, Any]:
    make = OPTIMIZERS[name]
    num_iterations = num_epochs * (len(load()[0]) // BATCH_SIZE)
    undisturbed = {seed: train(make, seed, num_epochs, {}) for seed in seeds}
    draw = random.Random(0)
    cuts = {n: draw.random() for n in draw.sample(range(num_iterations), 10)}
    ways = {
        "one update": ({num_iterations // 2: 1.0}, "undo"),
        "ten cuts": (cuts, "undo"),
        "rollback": (cuts, "rollback"),
        "lossy": (cuts, "lossy"),
    }
    pairs = list(itertools.combinations(undisturbed.values(), 2))
    noise = {
        "accuracy": max(abs(one.accuracy - two.accuracy) for one, two in pairs),
        "loss": max(max_difference(one.losses, two.losses) for one, two in pairs),
    }
    result: dict[str, Any] = {"name": name, "accuracy": [run.accuracy for run in undisturbed.values()], "noise": noise}
    result["within"] = True
    for name_of_way, (cuts, way) in ways.items():
        runs = {seed: train(make, seed, num_epochs, cuts, way) for seed in seeds}
        found = {
            "accuracy": max(abs(run.accuracy - undisturbed[seed].accuracy) for seed, run in runs.items()),
            "loss": max(max_difference(run.losses, undisturbed[seed].losses) for seed, run in runs.items()),
            "worst": max(run.worst for run in runs.values()),
        }
        result[name_of_way] = found
        if way == "undo":  # of the others nothing is promised
            result["within"] &= all(found[key] <= noise[key] for key in noise)
    return result


EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"
EPOCH = re.compile(r"epoch \d+/\d+: test loss ([\d.]+), test accuracy ([\d.]+)%")


def run_job(directory: Path, seed: int, num_epochs: int, kill_after: list[int], draw: random.Random) -> tuple[Run, str]:
    """`examples/digits.py` with two workers; one of them is killed soon after each of these iterations has begun.
    Returns loss and accuracy as it prints them, and all that was printed."""
    directory.mkdir()
    command = [
        sys.executable, "-m", "swift_agent.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000",
        str(EXAMPLE), "--overlap", "--epochs", str(num_epochs), "--seed", str(seed), "--progress", str(directory),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(directory / "output", "wb") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        began_s = time.monotonic()
        for iteration in kill_after:
            rank = draw.randrange(2)
            while not (last := last_step(directory / f"rank{rank}")) or last[1] < iteration:
                if job.poll() is not None or time.monotonic() > began_s + 300.0:
                    raise RuntimeError(f"iteration {iteration} does not come\n{(directory / 'output').read_text()}")
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.01))  # about an iteration
            os.kill(last[0], signal.SIGKILL)
        if job.wait(timeout=300.0):
            raise RuntimeError((directory / "output").read_text())
    finally:
        job.kill()
        job.wait()
    text = (directory / "output").read_text()
    epochs = [(float(loss), float(accuracy) / 100) for loss, accuracy in EPOCH.findall(text)]
    return Run([loss for loss, _ in epochs], epochs[-1][1]), text


def last_step(path: Path) -> tuple[int, int] | None:
    """Process and iteration of the last line that a worker has left."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line.split() for line in lines[-2:] if line.endswith("\n")]
    return (int(whole[-1][1]), int(whole[-1][3])) if whole else None


def compare_kills(num_kills: int, num_epochs: int, num_seeds: int) -> dict[str, Any]:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        undisturbed = [run_job(Path(name) / f"{seed}", seed, num_epochs, [], draw)[0] for seed in range(num_seeds)]
        num_iterations = num_epochs * ((len(load()[0]) // 2) // 16)
        moments = sorted(draw.sample(range(20, num_iterations - 20), num_kills))
        killed, text = run_job(Path(name) / "killed", 0, num_epochs, moments, draw)
    pairs = list(itertools.combinations(undisturbed, 2))
    found = {
        "kills": num_kills,
        "recoveries": text.count("recovered: generation"),
        "undone": text.count("undo update"),
        "accuracy": abs(killed.accuracy - undisturbed[0].accuracy),
        "loss": max_difference(killed.losses, undisturbed[0].losses),
        "noise": {
            "accuracy": max(abs(one.accuracy - two.accuracy) for one, two in pairs),
            "loss": max(max_difference(one.losses, two.losses) for one, two in pairs),
        },
    }
    found["within"] = all(found[key] <= found["noise"][key] for key in ("accuracy", "loss"))
    return found


def max_difference(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=4, help="how many")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="a real job as well, with N kills")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    if not args.json:
        print("| optimizer | accuracy | between seeds | one update undone | ten cuts | error over update | "
              "within the rule | rollback | lossy |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in args.optimizers:
        case = compare(name, list(range(args.seeds)), args.epochs)
        cases.append(case)
        if not args.json:
            print(row(case), flush=True)
    kills = compare_kills(args.kills, args.epochs, args.seeds) if args.kills else None
    if args.json:
        print(json.dumps({"name": "undo", "cases": cases, "kills": kills}))
    elif kills:
        print(f"\n{kills['kills']} kills, {kills['recoveries']} recoveries, {kills['undone']} of them with an undo: "
              f"accuracy differs by {kills['accuracy']:.2%}, loss by {kills['loss']:.4f} (between seeds "
              f"{kills['noise']['accuracy']:.2%}, {kills['noise']['loss']:.4f}): "
              f"{'within the rule' if kills['within'] else 'NOT within the rule'}")  # fmt: skip
    return 0 if all(case["within"] for case in [*cases, *([kills] if kills else [])]) else 1


def row(case: dict[str, Any]) -> str:
    keys = ("noise", "one update", "ten cuts", "rollback", "lossy")
    both = {key: f"{case[key]['accuracy']:.2%}, loss {case[key]['loss']:.4f}" for key in keys}
    worst = max(case[way]["worst"] for way in ("one update", "ten cuts"))
    return (
        f"| {case['name']} | {statistics.fmean(case['accuracy']):.2%} | {both['noise']} | {both['one update']} | "
        f"{both['ten cuts']} | {worst:.1e} | {'yes' if case['within'] else 'NO'} | "
        f"{both['rollback']} | {both['lossy']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
