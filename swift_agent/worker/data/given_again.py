"""Gives each run of an iteration the same: what a run has changed in place is put back before the next.

An iteration that is cut runs again, with the arguments that the script gave and the batches that it took inside. The
run that was cut may have mixed, normalised or taken apart (`batch.pop("labels")`) those where they lie.

- Lists and mappings are kept as they were: only who is in them, no copies.
- Of tensors and arrays copies are kept in the first iteration of this process, and for as long as the last iteration
  has changed what it was given. Else none: the version counters of the tensors are all that is looked at.
- What has been changed and was not kept, is told.

This module must never put back state of the job: a run whose update is made already comes again for its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

_MAX_PARTS = 128
# Of a list or mapping. Who is given more of them at a time is hardly given a batch.
_MAX_LENGTH = 1024
_UNTRACKED = -1


class CannotPutBack(Exception):
    """What it says, in a few words, is not as it was."""


@dataclass(slots=True)
class _Tensor:
    """*version*: see `torch.Tensor._version`; tensors made in inference mode have none."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    shape: torch.Size
    is_leaf: bool
    requires_grad: bool
    gradient: torch.Tensor | None

    def has_changed(self) -> bool:
        tensor = self.tensor
        if _version(tensor) != self.version or tensor.requires_grad != self.requires_grad:
            return True
        if self.requires_grad and self.is_leaf and tensor.grad is not self.gradient:
            return True
        # By way of `.data` or numpy no version counts. Who has no copy has been seen not to do that.
        return self.copy is not None and tensor.device.type == "cpu" and not torch.equal(tensor, self.copy)

    def put_back(self) -> None:
        tensor = self.tensor
        if not self.is_leaf or tensor.shape != self.shape:
            raise CannotPutBack(f"a tensor of shape {list(self.shape)}")
        if tensor.grad_fn is not None:
            try:
                tensor.detach_()
            except RuntimeError:  # a view
                raise CannotPutBack(f"a tensor of shape {list(self.shape)}") from None
        if _version(tensor) != self.version or self.copy is not None:
            if self.copy is None:
                raise CannotPutBack(f"a tensor of shape {list(self.shape)}")
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(self.copy)
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.requires_grad or tensor.grad is not None:
            tensor.grad = self.gradient
        self.version = _version(tensor)


class GivenAgain:
    """One per job. *is_state*: whether a tensor is one of the tracked models."""

    def __init__(self, is_state: Callable[[torch.Tensor], bool]) -> None:
        self._is_state = is_state
        self._copies = True
        self._has_run = False
        self._tensors: list[_Tensor] = []
        self._arrays: list[tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._mappings: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []

    def begin(self, *given: Any) -> None:
        """An iteration is called with that."""
        self._forget()
        for value in given:
            self.add(value)

    def add(self, value: Any) -> None:
        """The iteration has taken that."""
        parts = list(itertools.islice(_parts(value), _MAX_PARTS))
        if any(isinstance(part, torch.nn.Parameter) for part in parts):
            return  # of a model or an optimizer
        for part in parts:
            if isinstance(part, torch.Tensor):
                self._tensors.append(_kept(part, self._copies))
            elif isinstance(part, numpy.ndarray):
                if self._copies:
                    self._arrays.append((part, part.copy()))
            elif isinstance(part, list):
                if len(part) <= _MAX_LENGTH:
                    self._lists.append((part, part[:]))
            elif isinstance(part, MutableMapping) and len(part) <= _MAX_LENGTH:
                self._mappings.append((part, dict(part)))

    def run(self) -> None:
        """It begins to run, for the first time or again. Raises `CannotPutBack`."""
        if not self._has_run:
            self._has_run = True
            return
        for mapping, entries in self._mappings:
            if _differs(mapping, entries):
                mapping.clear()
                mapping.update(entries)
        for one, items in self._lists:
            if len(one) != len(items) or any(a is not b for a, b in zip(one, items, strict=True)):
                one[:] = items
        for array, copy in self._arrays:
            if array.flags.writeable:
                array[...] = copy
        for kept in self._tensors:
            if kept.has_changed() and not self._is_state(kept.tensor):
                kept.put_back()

    def end(self) -> None:
        """The script goes on after it."""
        self._copies = any(kept.has_changed() and not self._is_state(kept.tensor) for kept in self._tensors) or any(
            array.tobytes() != copy.tobytes() for array, copy in self._arrays
        )
        self._forget()

    def _forget(self) -> None:
        self._has_run = False
        for kept in (self._tensors, self._arrays, self._lists, self._mappings):
            kept.clear()


def _parts(value: Any) -> Iterator[Any]:
    """*value* and all that it consists of, through lists, tuples and mappings."""
    yield value
    if isinstance(value, Mapping):
        yield from itertools.islice(value, 1)  # what kind of keys it has
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)


def _kept(tensor: torch.Tensor, copies: bool) -> _Tensor:
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    # A tensor of another kind may have its own way of being copied, or be spread over ranks.
    copy = tensor.detach().clone() if copies and type(tensor) is torch.Tensor and is_leaf else None
    gradient = tensor.grad if is_leaf and requires_grad else None
    return _Tensor(tensor, _version(tensor), copy, tensor.shape, is_leaf, requires_grad, gradient)


def _version(tensor: torch.Tensor) -> int:
    return _UNTRACKED if tensor.is_inference() else tensor._version


def _differs(mapping: Mapping[Any, Any], entries: Mapping[Any, Any]) -> bool:
    return mapping.keys() != entries.keys() or any(mapping[key] is not value for key, value in entries.items())
