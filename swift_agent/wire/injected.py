"""A fault that a person has ordered (`swiftctl inject`): what, to whom, and at which moment. Pure.

    swiftctl --> etcd --> the agent of its target: strikes at once, or
                          --> the target's worker: stops itself at the moment --> the agent strikes

Only agents that were started with `--allow-injection` look for orders. This module must never strike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Kind = Literal["kill-worker", "kill-node", "freeze", "cut-network", "slow-link", "fill-disk", "corrupt-log"]
Phase = Literal["begin", "forward", "backward", "step", "after-step"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)
# Those that end by themselves, and those that are of one worker.
LASTING: frozenset[Kind] = frozenset({"freeze", "cut-network", "slow-link", "fill-disk"})
OF_RANKS: frozenset[Kind] = frozenset({"kill-worker", "corrupt-log"})

NEXT = -1
"""In place of an iteration: the one that the worker begins next."""

MOST_MICRO_BATCHES = 1_000_000

# Beside the agent's socket, for the local rank that follows: what is ordered, and that it stands at that moment.
ORDERED, REACHED = "inject", "injected"


@dataclass(frozen=True)
class Fault:
    """*rank*: whose worker, or whose node; -1 if *node* is named. *iteration*: None is at once. *part*: of the phase, 0
    to 1: of the modules whose forward, or of the parameters whose gradient is made; in that *micro_batch*, from 1 on.
    *for_s*: how long what lasts does. *rate*: of a slow link, as tc has it. *num_bytes*: that fill a disk."""

    id: str
    kind: Kind
    rank: int = -1
    node: str = ""
    iteration: int | None = None
    phase: Phase = "begin"
    part: float = 0.0
    for_s: float = 5.0
    rate: str = "10mbit"
    num_bytes: int = 1 << 30
    micro_batch: int = 1

    def encoded(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}, sort_keys=True).encode()

    @property
    def moment(self) -> str:
        """For people."""
        if self.iteration is None:
            return "at once"
        when = "the next iteration" if self.iteration == NEXT else f"iteration {self.iteration}"
        is_counted = self.phase in ("forward", "backward")
        part = f" after {self.part:.0%} of the" if is_counted and self.part else ""
        which = f" of micro-batch {self.micro_batch}" if is_counted and self.micro_batch > 1 else ""
        return f"in {when},{part} {self.phase}{which}"

    @property
    def target(self) -> str:
        return f"node {self.node}" if self.node else f"rank {self.rank}" if self.kind in OF_RANKS else (
            f"the node of rank {self.rank}"
        )


class FaultError(ValueError):
    """*mistakes*: a line for each."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


def checked(fault: Fault) -> Fault:
    """Raises `FaultError` with all that is wrong."""
    mistakes = []
    if fault.kind not in KINDS:
        mistakes.append(f"{fault.kind}: there is no such fault; type one of {', '.join(KINDS)}")
    if fault.kind in OF_RANKS and fault.rank < 0:
        mistakes.append(f"{fault.kind}: of which rank? type --rank R")
    elif fault.rank < 0 and not fault.node:
        mistakes.append(f"{fault.kind}: of which node? type --node NAME, or --rank R for the node of that rank")
    elif fault.rank >= 0 and fault.node:
        mistakes.append("--rank and --node: name one of them")
    if fault.iteration is not None and fault.rank < 0:
        mistakes.append("--at: the moment of which rank? type --rank R in place of --node")
    if not 0.0 <= fault.part <= 1.0:
        mistakes.append(f"--at part={fault.part:g}: must be from 0 to 1")
    if not 1 <= fault.micro_batch <= MOST_MICRO_BATCHES:
        mistakes.append(f"--at micro-batch={fault.micro_batch}: must be from 1 to {MOST_MICRO_BATCHES}")
    if not 0.0 < fault.for_s < math.inf:
        mistakes.append(f"--for {fault.for_s:g}: must be above 0 s")
    if mistakes:
        raise FaultError(mistakes)
    return fault


def moment_of(text: str) -> dict[str, Any]:
    """The fields that `iteration=120,phase=backward,part=0.3` names; `iteration=next` is the next one. Raises
    `FaultError`."""
    found: dict[str, Any] = {"iteration": NEXT}
    for item in text.split(",") if text else ():
        name, _, value = item.strip().partition("=")
        if name == "iteration" and (value == "next" or value.isdecimal()):
            found["iteration"] = NEXT if value == "next" else int(value)
        elif name == "phase" and value in PHASES:
            found["phase"] = value
        elif name == "part" and value.replace(".", "", 1).isdecimal():
            found["part"] = float(value)
        elif name == "micro-batch" and value.isdecimal():
            found["micro_batch"] = int(value)
        else:
            raise FaultError([
                f"--at {text}: {item.strip()!r} is none of iteration=N (or next), phase={'|'.join(PHASES)}, part=0..1, "
                "micro-batch=N; type for example --at iteration=120,phase=backward,part=0.5"
            ])  # fmt: skip
    return found


def fault_of(value: bytes) -> Fault:
    """Raises `FaultError` for what is none: anybody may have written it."""
    try:
        data = json.loads(value)
        if not isinstance(data, Mapping) or data.get("version") != 1:
            raise ValueError("not an order of this version")
        known = {"micro_batch": 1, **data}  # swiftctl before there were any
        known = {field.name: known[field.name] for field in fields(Fault)}
        iteration = known["iteration"]
        if known["kind"] not in list(KINDS) or known["phase"] not in list(PHASES):
            raise ValueError("no such fault or phase")
        typed = Fault(
            id=str(known["id"]), kind=known["kind"], rank=int(known["rank"]), node=str(known["node"]),
            iteration=None if iteration is None else int(iteration), phase=known["phase"], part=float(known["part"]),
            for_s=float(known["for_s"]), rate=str(known["rate"]), num_bytes=int(known["num_bytes"]),
            micro_batch=int(known["micro_batch"]),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise FaultError([f"cannot be read: {error}"]) from None
    if not typed.rate.isalnum() or not typed.id.isalnum():
        raise FaultError(["cannot be read: no such rate or name"])
    return checked(typed)
