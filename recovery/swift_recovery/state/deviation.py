"""Whether replicas still hold the same, and what differs in words. Pure.

Each rank takes a `Fingerprint` of what it holds after the same iteration; `compare` finds what is not alike, `describe`
says it. Buffers, hyper-parameters, modes and objects of the script's own may differ by design (BatchNorm's statistics
without a broadcast): what did so before anything had failed, or where nobody can know, is never held against a rank.
Buffers (of a layer that was frozen at first) and such objects may begin to later: that is told, and no more. Parameters
and the state of optimizers must be equal on replicas at any time.

This module must never read a clock, a tensor or a store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swift_recovery.state import machines

Kind = Literal["hyper", "mode", "buffer", "parameter", "state", "gradient", "loader", "object"]
KINDS: tuple[Kind, ...] = ("hyper", "mode", "parameter", "state", "buffer", "gradient", "loader", "object")
# Each rank may have its own, from some time on.
_MAY_PART: frozenset[Kind] = frozenset({"buffer", "object"})
# Undisturbed: who differs until then never was a replica.
NUM_FIRST = 8
ENDED = "An iteration ended with gradients, but without a step of a tracked optimizer"
REMEDY = (
    "a replacement would not have them. Take the micro-batches of an update with job.batches(loader, group=4), and put "
    "the whole accumulation, with the step, into one call of the @job.iteration function. If the step is left out on "
    "purpose (a gradient that is not finite), call optimizer.zero_grad() before it returns"
)
LOADERS = (
    "A replacement gets the place in the data of another rank: the state_dict() of what is given to "
    "job.track(loader=...) must stay the same on all ranks, and load_state_dict() add what is the rank's own; or do "
    "not track it, and give it to job.batches()"
)
OF_EACH_RANK = f"{ENDED}, and the next one adds to them, but each rank has its own: {REMEDY}"
# Named of each kind; the others are counted.
MAX_NAMED = 3


def next_due(base: int, number: int, *, undisturbed: bool, every: int = 0) -> int:
    """After which iteration, counted from *base* where this generation began, the next comparison comes: the first,
    second, fourth ..., past *number*. *every*: one before each checkpoint, too, if the run is not *undisturbed*."""
    step = 1
    while base + step <= number:
        step *= 2
    if undisturbed or not every:
        return base + step
    return min(base + step, (number // every + 1) * every)


@dataclass(frozen=True)
class Fingerprint:
    """What one rank holds. *parts*: by kind, for each name a checksum or a value, and what to show of it.

    *apart*: names that differed before anything had failed, None: this process did not see that time. *began_in*: the
    generation in which this process began. *differed*: after so many iterations replicas were seen to differ, before
    anything had failed; 0: they were not. *computes*: with what, see `swift_recovery.replay.kernels`.
    *rounded*: replicas were seen to differ because of that, and it was told.
    """

    parts: Mapping[Kind, Mapping[str, str]]
    shown: Mapping[str, str] = field(default_factory=dict)
    apart: frozenset[str] | None = None
    began_in: int = 0
    differed: int = 0
    computes: str = ""
    rounded: bool = False

    def digest(self) -> str:
        """Of all that is compared."""
        text = json.dumps([sorted(self.parts.get(kind, {}).items()) for kind in KINDS])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        apart = None if self.apart is None else sorted(self.apart)
        told = {"parts": self.parts, "shown": self.shown, "apart": apart, "began_in": self.began_in}
        return told | {"differed": self.differed, "computes": self.computes, "rounded": self.rounded}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fingerprint:
        apart = data["apart"]
        return Fingerprint(
            {kind: dict(data["parts"].get(kind, {})) for kind in KINDS},
            dict(data["shown"]),
            None if apart is None else frozenset(apart),
            int(data["began_in"]),
            int(data.get("differed", 0)),
            str(data.get("computes", "")),
            bool(data.get("rounded", False)),
        )


@dataclass(frozen=True)
class Difference:
    """*held_by*: what is shown of each value ("" where it is too large for that), and the ranks that hold it."""

    kind: Kind
    name: str
    held_by: tuple[tuple[str, tuple[int, ...]], ...]


def all_differences(prints: Mapping[int, Fingerprint]) -> list[Difference]:
    """Of replicas, by rank: all names whose values are not the same everywhere."""
    found = []
    for kind in KINDS:
        names = {name: None for one in prints.values() for name in one.parts.get(kind, {})}
        for name in names:
            ranks: dict[str, list[int]] = {}
            for rank in sorted(prints):
                ranks.setdefault(prints[rank].parts.get(kind, {}).get(name, "is not there"), []).append(rank)
            if len(ranks) > 1:
                shown = {value: prints[held[0]].shown.get(f"{kind} {name}", "") for value, held in ranks.items()}
                by = tuple((shown[value], tuple(held)) for value, held in ranks.items())
                found.append(Difference(kind, name, by))
    return found


def compare(prints: Mapping[int, Fingerprint], *, undisturbed: bool) -> tuple[list[Difference], frozenset[str]]:
    """What is wrong, and the names that differ by design as far as is known now. *undisturbed*: nothing has failed."""
    differences = all_differences(prints)
    told = [one.apart for one in prints.values() if one.apart is not None]
    by_design = frozenset[str]().union(*told)
    may_differ = {"hyper", "mode", *_MAY_PART}
    loose = [one for one in differences if one.kind in may_differ and one.name not in by_design]
    strict = [one for one in differences if one.kind in ("parameter", "state", "gradient", "loader")]
    if undisturbed or not told:
        by_design |= {one.name for one in loose}
        if all(one.kind in ("gradient", "loader") for one in strict):
            return strict, by_design
    return [one for one in differences if one in strict or one in loose], by_design


def are_of_each_rank(wrong: Collection[Difference]) -> bool:
    """Nothing but gradients differ that no step has used yet: the script accumulates them over several iterations,
    before they are reduced."""
    return {one.kind for one in wrong} - _MAY_PART == {"gradient"}


def objects_apart(prints: Mapping[int, Fingerprint]) -> frozenset[str]:
    """Tracked objects of the script's own whose state is not the same everywhere."""
    return frozenset(one.name for one in all_differences(prints) if one.kind == "object")


def forbids_going_on(wrong: Collection[Difference]) -> bool:
    """Buffers and objects alone do not: a recovery has copied them, and where they reach the update the parameters
    differ, too."""
    return any(one.kind not in _MAY_PART for one in wrong)


def describe(differences: Sequence[Difference]) -> str:
    """A clause for people: names, ranks, and the values of what is small."""
    clauses = []
    for kind in KINDS:
        of_kind = [one for one in differences if one.kind == kind]
        named = [_describe_one(one) for one in of_kind[:MAX_NAMED]]
        if len(of_kind) > MAX_NAMED:
            named.append(f"and {len(of_kind) - MAX_NAMED} more of {_PLURALS[kind]}")
        clauses += named
    return "; ".join(clauses)


_NOUNS: dict[Kind, str] = {
    "hyper": "", "mode": "", "parameter": "parameter ", "state": "optimizer state ", "buffer": "buffer ",
    "gradient": "gradients ", "loader": "the state of ", "object": "the state of ",
}  # fmt: skip
_PLURALS: dict[Kind, str] = {
    "hyper": "the hyper-parameters", "mode": "the modes", "parameter": "the parameters",
    "state": "the optimizer state", "buffer": "the buffers", "gradient": "the gradients", "loader": "the loaders",
    "object": "the objects",
}  # fmt: skip


def _describe_one(one: Difference) -> str:
    name = f"{_NOUNS[one.kind]}{one.name}"
    if all(shown for shown, _ in one.held_by):
        return f"{name} is " + ", ".join(f"{shown} on {ranks_text(ranks)}" for shown, ranks in one.held_by)
    (_, first), *others = one.held_by
    return f"{name} of {ranks_text([rank for _, ranks in others for rank in ranks])} is not that of {ranks_text(first)}"


def sentence(
    prints: Mapping[int, Fingerprint], differences: Sequence[Difference], *, iteration: int, equal_after: int | None,
    undisturbed: bool, generation: int, late: bool = False,
) -> str:  # fmt: skip
    """Why training must not go on like this, and the remedy. *equal_after*: the last iteration after which all was
    equal. *late*: they were replicas in the first iterations of an undisturbed run."""
    what = f"replicas differ after iteration {iteration}: {describe(differences)}"
    if are_of_each_rank(differences):
        return f"{what}. {OF_EACH_RANK}"
    since = f" (after iteration {equal_after} they were equal)" if equal_after is not None else ""
    if {one.kind for one in differences} - _MAY_PART == {"loader"}:
        ends = ". Training goes on, but none of these ranks can replace another: at the next loss all start again"
        return f"{what}{since}. {LOADERS}{ends if late else ''}"
    if because := because_of_machines(prints, differences):
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        return f"{because}. What differs after iteration {iteration}{since}: {describe(differences[:1])}{more}"
    if late:
        return (
            f"{what}{since}. Nothing has failed, so this is the script's own: a value of each rank that reaches the "
            "update, or an operation whose results are not always the same. Training goes on, but none of these ranks "
            "can replace another any more: should a worker be lost, all start again"
        )
    if undisturbed and all(one.kind in ("state", "object") for one in differences):
        return (
            f"{what}. Nothing has failed: an optimizer keeps some of its state on one rank only (as ZeRO does, or a "
            "Muon that shares its work out), so none can replace another. Have all ranks keep all of it, or say that "
            "nobody holds the same, job.track(replicas=[job.rank]): a lost worker then restarts all"
        )
    if undisturbed:
        return (
            f"{what}. Nothing has failed: these ranks do not train the same model, so none can replace another. Wrap "
            "it in DistributedDataParallel, make a copy of it (an average of the weights) after that and not before, "
            "give all ranks the same start, or say who holds the same: job.track(replicas=[job.rank]) if nobody does"
        )
    if not forbids_going_on(differences) and any(one.kind == "object" for one in differences):
        return (
            f"{what}{since}. They are objects of job.track(), and were alike before the failure. Training goes on with "
            "them as they are, which may not be as without the failure. Keep an average of the weights in an nn.Module "
            "(torch.optim.swa_utils.AveragedModel), and leave out of an object what is the rank's own"
        )
    if not forbids_going_on(differences):
        return (
            f"{what}{since}. They were alike in the first iterations; buffers may become each rank's own later, so "
            "training goes on with them as they are. A replacement begins with those of another rank"
        )
    new = [rank for rank, one in sorted(prints.items()) if one.began_in == generation]
    if new:
        cause = f"{ranks_text(new)} started over in generation {generation}, and so did what the script keeps to itself"
    else:
        cause = f"the recovery of generation {generation} has missed what the script keeps to itself"
    if all(one.kind in ("mode", "buffer") for one in differences):
        return (
            f"{what}{since}. {cause[0].upper()}{cause[1:]}: have it call train(), eval() and requires_grad_() by the "
            "number of the epoch (epoch >= 3, not epoch == 3)"
        )
    return (
        f"{what}{since}. {cause[0].upper()}{cause[1:]}: have job.track() name the object that keeps it, or work it out "
        "from job.iteration_number"
    )


def because_of_machines(prints: Mapping[int, Fingerprint], differences: Collection[Difference]) -> str:
    """Why replicas with these *differences* may not stay equal, whatever the script does (a norm of gradients is
    enough: other kernels add in another order); '' if no machine can be the reason. Ranks that compute alike may
    differ, too: one of them was replaced, and has what another rank had rounded."""
    kinds = machines.kinds_of({rank: one.computes for rank, one in prints.items()})
    kinds = kinds or ("the machines of another kind are gone" if any(one.rounded for one in prints.values()) else "")
    if not kinds or not differences or {one.kind for one in differences} - {"parameter", "state", "buffer", "object"}:
        return ""
    return (
        f"replicas do not compute alike, and have rounded otherwise: {kinds}. Training goes on, each rank with its own "
        f"values; a replacement gets those of another one. {machines.REMEDY}"
    )


def ranks_text(ranks: Collection[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"


def summarised(one: Fingerprint, limit: int) -> dict[str, str]:
    """At most *limit* parts that stand for all of it: names with common beginnings are put together."""
    parts = {
        f"{_NOUNS[kind]}{name}": one.shown.get(f"{kind} {name}", text)
        for kind in KINDS
        for name, text in one.parts.get(kind, {}).items()
    }
    if len(parts) <= limit:
        return parts
    depth = max(name.count(".") for name in parts)
    while depth >= 0:
        groups: dict[str, list[str]] = {}
        for name, text in parts.items():
            groups.setdefault(".".join(name.split(".")[: depth + 1]), []).append(text)
        if len(groups) <= limit:
            return {name: _joined(texts) for name, texts in groups.items()}
        depth -= 1
    return {"all": _joined(list(parts.values()))}


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else hashlib.blake2b("|".join(texts).encode(), digest_size=8).hexdigest()
