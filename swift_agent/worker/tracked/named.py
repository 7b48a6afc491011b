"""What a script names with `job.track()` before its loop begins: collected over all calls, and checked in each.

This module must never touch what is named, but to describe it once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from swift_agent.errors import UsageError
from swift_agent.torch_private import pipelining
from swift_agent.worker.tracked.refusals import unsupported
from swift_agent.worker.updates import overlap_checks
from swift_recovery.errors import StateError
from swift_recovery.state.training_state import TrainingState

Pending = Mapping[str, Mapping[str, Any]]

# What torch asks for to make matrix products on CUDA the same each time; cuBLAS looks at it once.
_CUBLAS, _CUBLAS_FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


class Named:
    """All that was named so far. *pending*: models, optimizers and other objects, by kind and name."""

    def __init__(self) -> None:
        self.pending: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}, "others": {}}
        self.replicas: Sequence[int] | None = None
        self.overlap_update = self.exact = self.is_stage = False
        self._log_messages: bool | None = None

    @property
    def logs_messages(self) -> bool:
        """Whether to log what no other node could bring back: by default in a pipeline."""
        if self._log_messages is not None:
            return self._log_messages
        return self.is_stage or pipelining.has_schedules()

    @property
    def logs_always(self) -> bool:
        """Also what other nodes could bring back: a stage next to this one may be on one node only."""
        return self._log_messages is True

    def has_state(self, loader: Any) -> bool:
        """Whether *loader* is where it has to be by a state of its own."""
        return any(loader is one for one in self.pending["others"].values())

    def add(
        self, model: Any, optimizer: Any, scheduler: Any, loader: Any, scaler: Any, others: Mapping[str, Any], *,
        replicas: Sequence[int] | None, overlap_update: bool, exact: bool, log_messages: bool | None,
    ) -> None:  # fmt: skip
        """See `Job.track`."""
        pending = self.pending
        models = named("model", model)
        modules = {name: pipelining.pipeline_stage(one) for name, one in models.items()}
        self.is_stage = self.is_stage or any(module is not None for module in modules.values())
        self._log_messages = self._log_messages if log_messages is None else log_messages
        for name, one in models.items():
            self._name("models", name, modules[name] or one)
        for name, one in named("optimizer", optimizer).items():
            self._name("optimizers", name, unsupported.unwrapped_optimizer(one))
            if scaler is None and (found := unsupported.scaler_of(one)) is not None:
                pending["others"].setdefault("scaler", found)
        for name, value in {"scheduler": scheduler, "scaler": scaler, **others}.items():
            for one_name, one in named(name, value).items():
                # An average's parameters come from a replica, as those of any model.
                self._name("models" if isinstance(one, nn.Module) else "others", one_name, one)
        # What `job.batches` positions has a state of this rank only; of anything else that is all there is.
        has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if has_state and not isinstance(loader, DataLoader):
            self._name("others", "loader", loader)
        if replicas is not None:
            self.replicas = sorted(replicas)
        self.overlap_update, self.exact = self.overlap_update or overlap_update, self.exact or exact
        check(pending, overlap_update=self.overlap_update, replicas=self.replicas)

    def _name(self, kind: str, name: str, one: Any) -> None:
        before = self.pending[kind].get(name, one)
        is_wrapped = isinstance(one, nn.Module) and isinstance(before, nn.Module) and _parts(one) == _parts(before)
        if before is not one and not is_wrapped:
            how = "" if name == "loader" else f': job.track({name.partition(".")[0]}={{"a": ..., "b": ...}}) has both'
            raise UsageError(
                f"job.track(): {name} was another {type(before).__name__} in a call before, which would not be tracked "
                f"any more. Give each a name of its own{how}"
            )
        self.pending[kind][name] = one


def _parts(model: nn.Module) -> set[int]:
    """What another wrapper of the same model has as well."""
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def named(kind: str, value: Any) -> dict[str, Any]:
    """`one` -> {kind: one}, `[a, b]` -> {kind.0: a, kind.1: b}, a dict of names stays; None is nothing."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and not hasattr(value, "state_dict"):
        return {f"{kind}.{name}": item for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"{kind}.{index}": item for index, item in enumerate(value)}
    return {kind: value}


def check(pending: Pending, *, overlap_update: bool = False, replicas: Sequence[int] | None = None) -> None:
    """Raise `UsageError` naming everything that could not be recovered, or not updated in the backward."""
    alone = replicas is not None and len(replicas) == 1
    mistakes = []
    for name, model in pending["models"].items():
        if not isinstance(model, nn.Module):
            mistakes.append(unsupported.no_module(name, model))
    for name, optimizer in pending["optimizers"].items():
        mistakes += unsupported.mistakes_of_optimizer(name, optimizer)
    for name, other in pending["others"].items():
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            mistakes.append(f"{name} is a {type(other).__name__} without state_dict and load_state_dict")
            continue
        try:
            other.state_dict()
        except Exception as error:  # of its own kind
            why = f"{type(error).__name__}: {error}"
            mistakes.append(f"{name} is a {type(other).__name__} whose state_dict() fails ({why}): leave it out")
    if not mistakes:
        mistakes += unsupported.mistakes_of_models(
            pending["models"], pending["optimizers"].values(), pending["others"].values(), alone=alone
        )
    if not mistakes and pending["models"]:
        try:
            # Describing it once finds what cannot be sent, while nothing is lost yet.
            TrainingState(pending["models"], pending["optimizers"], pending["others"]).collect()
        except StateError as error:
            mistakes.append(str(error))
    if overlap_update and pending["models"] and not mistakes:
        ddps = ddps_of(pending)
        if not ddps:
            mistakes.append("overlap_update without DistributedDataParallel: there is no reduction to overlap with")
        mistakes += overlap_checks.mistakes(ddps, pending["optimizers"], pending["others"])
    if mistakes:
        raise UsageError("job.track(): " + "; ".join(mistakes))


def make_deterministic() -> None:
    """The same operations give the same bits from now on, or raise an error that names the one that does not."""
    if _CUBLAS not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"job.track(deterministic=True): CUDA is in use already, and cuBLAS has begun without {_CUBLAS}. Set "
            f"{_CUBLAS}={_CUBLAS_FIXED} where you start swift-run."
        )
    os.environ.setdefault(_CUBLAS, _CUBLAS_FIXED)
    torch.backends.cudnn.benchmark = False  # it may choose another kernel in another process
    torch.use_deterministic_algorithms(True)


def ddps_of(pending: Pending) -> list[DistributedDataParallel]:
    modules = {id(module): module for model in pending["models"].values() for module in model.modules()}
    return [module for module in modules.values() if isinstance(module, DistributedDataParallel)]
