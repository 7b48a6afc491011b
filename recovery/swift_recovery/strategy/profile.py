"""What a job costs, as a file that people write: its machines, what they compute and send, checkpoints. Pure.

A profile is a JSON object; `FIELDS` and `MACHINE_FIELDS` say what is in it (docs/profiles.md). It must never be taken
in part: all that is wrong with it is told at once.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# name -> (least value that is allowed, whether that itself is, default; None: it has to be there)
FIELDS: Mapping[str, tuple[float, bool, float | None]] = {
    "micro_batches": (1, True, 1),
    "iteration_s": (0, False, 0),
    "network_bytes_per_s": (0, False, None),
    "log_bytes_per_s": (0, False, 2e9),
    "gpus_per_machine": (1, True, 1),
    "checkpoint_every": (1, True, 100),
    "checkpoint_s": (0, False, 1),
    "load_s": (0, True, 5),
    "restart_s": (0, True, 10),
    "replace_s": (0, True, 2),
    "machine_mtbf_hours": (0, False, 24 * 60),
    "store_bytes_per_s": (0, True, 0),
}
MACHINE_FIELDS: Mapping[str, tuple[float, bool, float | None]] = {
    "computation_s": (0, False, None),
    "state_bytes": (0, True, 0),
    "gradient_bytes": (0, True, 0),
    "stages": (1, True, 1),
    "inside_bytes": (0, True, 0),
}
_MOST = 1e30
_LEAST = 1e-30  # but 0: what is less has no parts that are more than 0
_ROUNDED = 1 + 1e-9
_FLAGS = ("has_replica", "has_replica_inside")
NO_CHECKPOINTS = "the script takes none (job.checkpoint): all workers would start over"
_WHOLE = ("micro_batches", "gpus_per_machine", "checkpoint_every", "stages")


@dataclass(frozen=True)
class Machine:
    """*computation_s*: of one iteration, all its micro-batches together. *state_bytes*: parameters and optimizer state.
    *has_replica*: another machine holds the same. *has_replica_inside*: of each of its GPUs another one does.
    *gradient_bytes*: of all its parameters, 0: not known. *stages*: so many of its workers are stages one behind the
    other, each with that computation. *inside_bytes*: what they send each other in one iteration."""

    computation_s: float
    state_bytes: float = 0.0
    has_replica: bool = False
    gradient_bytes: float = 0.0
    has_replica_inside: bool = False
    stages: int = 1
    inside_bytes: float = 0.0

    @property
    def summed_bytes(self) -> float:
        """What helpers add up in an iteration; where it is not known as with Adam, whose state is three times that."""
        return self.gradient_bytes or self.state_bytes / 3


@dataclass(frozen=True)
class Profile:
    """All times in seconds but *machine_mtbf_hours*, all sizes in bytes.

    - *boundary_bytes*: what machines i and i + 1 of a pipeline send each other in one iteration; () without a pipeline.
    - *iteration_s*: of all machines together.
    - *log_bytes_per_s*: to where a machine logs. *store_bytes_per_s*: to a store that has copies, 0: not known.
    - *takes_checkpoints*: else *checkpoint_every* is more than there are. *checkpoint_every*: in iterations. *load_s*:
      of a checkpoint.
    - *restart_s*: until all workers are up again. *replace_s*: until the replacement of one machine is.
    """

    name: str
    machines: tuple[Machine, ...]
    boundary_bytes: tuple[float, ...]
    micro_batches: int
    iteration_s: float
    network_bytes_per_s: float
    log_bytes_per_s: float
    gpus_per_machine: int
    checkpoint_every: int
    checkpoint_s: float
    load_s: float
    restart_s: float
    replace_s: float
    machine_mtbf_hours: float
    store_bytes_per_s: float = 0.0
    takes_checkpoints: bool = True

    def slowed(self, times: float) -> Profile:
        """Where all that is computed takes so many times as long."""
        if times == 1.0:
            return self
        machines = tuple(replace(one, computation_s=one.computation_s * times) for one in self.machines)
        return replace(self, machines=machines, iteration_s=self.iteration_s * times)

    @property
    def mtbf_s(self) -> float:
        """Of the whole job, of which any machine may be lost."""
        return self.machine_mtbf_hours * 3600 / len(self.machines)

    @property
    def bubble_s(self) -> float:
        """What a machine waits in an iteration, on average."""
        return max(0.0, self.iteration_s - sum(one.computation_s for one in self.machines) / len(self.machines))


class _Object(dict[str, Any]):
    """One of JSON. *twice*: names that are given more than once, of which the last would win."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.twice = [name for name, count in counts.items() if count > 1]


class ProfileError(ValueError):
    """One line for each thing that is wrong."""


def parse(text: str) -> Profile:
    """Raises `ProfileError`."""
    try:
        data = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"no JSON: {error}") from None
    if not isinstance(data, _Object):
        raise ProfileError("not an object: a profile begins with {")
    wrong = [f"{name}: given more than once" for name in data.twice]
    known = {"name", "machines", "boundary_bytes", "takes_checkpoints", *FIELDS}
    wrong += [f"{name}: no such field; there are {', '.join(sorted(known))}" for name in data if name not in known]
    machines = _machines(data.get("machines"), wrong)
    values = {name: _number(data, name, name, FIELDS, wrong) for name in FIELDS}
    boundaries = _boundaries(data.get("boundary_bytes"), len(machines), wrong)
    name = data.get("name", "a job")
    if not isinstance(name, str):
        wrong.append("name: not a text")
    takes_checkpoints = data.get("takes_checkpoints", True)
    if not isinstance(takes_checkpoints, bool):
        wrong.append("takes_checkpoints: true or false")
    if not wrong and values["iteration_s"]:
        slowest = max(range(len(machines)), key=lambda number: machines[number].computation_s)
        if machines[slowest].computation_s > values["iteration_s"] * _ROUNDED:
            wrong.append(
                f"iteration_s: {values['iteration_s']:g} is less than machines[{slowest}].computation_s, which is a "
                "part of it"
            )
    if wrong:
        raise ProfileError("\n".join(wrong))
    whole = {field: int(values.pop(field)) for field in _WHOLE if field in values}
    if not values["iteration_s"]:
        pipelines = pipelines_of(machines, boundaries)
        values["iteration_s"] = max(pipelined_s(stages_of(one), whole["micro_batches"]) for one in pipelines)
    return Profile(
        name=name, machines=tuple(machines), boundary_bytes=boundaries, takes_checkpoints=takes_checkpoints,
        **whole, **values,  # type: ignore[arg-type]
    )  # fmt: skip


def pipelines_of(machines: Sequence[Machine], boundary_bytes: Sequence[float]) -> list[Sequence[Machine]]:
    """Machines that send each other nothing compute at the same time: each alone, or in pipelines of their own."""
    ends = [at + 1 for at in range(len(machines) - 1) if not boundary_bytes or not boundary_bytes[at]]
    return [machines[begin:end] for begin, end in itertools.pairwise((0, *ends, len(machines)))]


def stages_of(machines: Iterable[Machine]) -> list[float]:
    """Of each stage on these machines the computation of one iteration."""
    return [one.computation_s for one in machines for _ in range(one.stages)]


def pipelined_s(computations_s: list[float], micro_batches: int) -> float:
    """Of an iteration that goes through these stages one after the other: the first micro-batch through all of them,
    and each other one behind it, as fast as the slowest stage. For equal ones t (m + p - 1) / m, as in SWIFT, 5.2."""
    each_s = [computation_s / micro_batches for computation_s in computations_s]
    return sum(each_s) + (micro_batches - 1) * max(each_s)


def _machines(given: Any, wrong: list[str]) -> list[Machine]:
    if not isinstance(given, list) or not given:
        wrong.append('machines: a list is needed, as [{"computation_s": 1.5}, ...]')
        return []
    found = []
    for number, data in enumerate(given):
        where = f"machines[{number}]"
        if not isinstance(data, dict):
            wrong.append(f'{where}: not an object, as {{"computation_s": 1.5}}')
            found.append(Machine(1.0))  # it counts, for the boundaries
            continue
        if isinstance(data, _Object):
            wrong += [f"{where}.{name}: given more than once" for name in data.twice]
        known = {*MACHINE_FIELDS, *_FLAGS}
        fields = ", ".join(sorted(known))
        wrong += [f"{where}.{name}: no such field; there are {fields}" for name in data if name not in known]
        values = {name: _number(data, name, f"{where}.{name}", MACHINE_FIELDS, wrong) for name in MACHINE_FIELDS}
        flags = {name: data.get(name, False) for name in _FLAGS}
        wrong += [f"{where}.{name}: true or false" for name, flag in flags.items() if not isinstance(flag, bool)]
        has, inside = (flags[name] is True for name in _FLAGS)
        stages = int(values.pop("stages"))
        found.append(Machine(**values, stages=stages, has_replica=has, has_replica_inside=inside))
    return found


def _number(
    data: Mapping[str, Any], name: str, where: str, fields: Mapping[str, tuple[float, bool, float | None]],
    wrong: list[str],
) -> float:  # fmt: skip
    least, may_be_least, default = fields[name]
    value = data.get(name, default)
    if value is None:
        wrong.append(f"{where}: has to be given")
    elif not _is_number(value):
        wrong.append(f"{where}: {value!r} is no number")
    elif name not in data:
        return float(value)
    elif value < least or (value == least and not may_be_least):
        wrong.append(f"{where}: {value} is too little: {'at least' if may_be_least else 'more than'} {least:g}")
    elif 0 < value < _LEAST:
        wrong.append(f"{where}: {value} is too little: at least {_LEAST:g}")
    elif name in _WHOLE and value != int(value):
        wrong.append(f"{where}: {value} is no whole number")
    else:
        return float(value)
    return 1.0


def _is_number(value: Any) -> bool:
    """Of a size that can be worked with: JSON has whole numbers of any length."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST


def _boundaries(given: Any, num_machines: int, wrong: list[str]) -> tuple[float, ...]:
    num = num_machines - 1
    values = [given] * num if isinstance(given, (int, float)) else given
    if values is None or num < 0:
        return ()
    if num == 0 and values != []:
        wrong.append("boundary_bytes: one machine has no neighbour: a list of 0, or nothing")
        return ()
    if not isinstance(values, list) or len(values) != num:
        wrong.append(f"boundary_bytes: one number for all, or a list of {num}, one between each two machines")
        return ()
    for number, value in enumerate(values):
        if not _is_number(value) or value < 0:
            wrong.append(f"boundary_bytes[{number}]: {value!r} is no number of bytes")
            return ()
    return tuple(map(float, values))
