"""Gives each run of an iteration the same: what a run has changed in place is put back before the next.

An iteration that is cut runs again, with the arguments that the script gave and the batches that it took inside. The
run that was cut may have mixed, normalised or taken apart (`batch.pop("labels")`) those where they lie.

- Lists, mappings and objects of data classes are kept as they were: only who is in them, no copies.
- Of tensors and arrays copies are kept in the first iteration of this process, and for as long as the last iteration
  has changed what it was given. Else none: the version counters of the tensors are all that is looked at.
- What has been changed and was not kept, is told.

This module must never put back state of the job: a run whose update is made already comes again for its result. And it
must never end a run in which nothing has failed: of a tensor that cannot be copied none is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from swift_agent.wire.given import PLAIN

# Numbers and texts are not counted. A batch of images with boxes has some hundreds.
_MAX_PARTS = 4096
# Of a list or mapping. Who is given more of them at a time is hardly given a batch.
_MAX_LENGTH = 4096
# Longer lists with numbers or texts at both ends have nothing else.
_MAX_MIXED = 64
# Of all copies. Who is given more is given a whole data set.
_MAX_BYTES = 1 << 30
_UNTRACKED = -1


class CannotPutBack(Exception):
    """What it says, in a few words, is not as it was."""


@dataclass(slots=True)
class _Tensor:
    """*version*: see `torch.Tensor._version`; tensors made in inference mode have none."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    form: tuple[Any, ...]
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
        return self.copy is not None and tensor.device.type == "cpu" and not _is_same(tensor, self.copy)

    def put_back(self) -> None:
        tensor = self.tensor
        if not self.is_leaf or _form(tensor) != self.form:
            raise self._cannot()
        try:
            if tensor.grad_fn is not None:
                tensor.detach_()  # not of a view
            if _version(tensor) != self.version or self.copy is not None:
                if self.copy is None:
                    raise self._cannot()
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(self.copy)  # not where several elements are at one place
        except RuntimeError:
            raise self._cannot() from None
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.requires_grad or tensor.grad is not None:
            tensor.grad = self.gradient
        self.version = _version(tensor)

    def _cannot(self) -> CannotPutBack:
        return CannotPutBack(_named(self.form))


class GivenAgain:
    """One per job. *is_state*: whether a tensor lies where state of the job does, or a mapping is a part of it.
    *has_run*: the next run is one more."""

    def __init__(self, is_state: Callable[[torch.Tensor | Mapping[Any, Any]], bool]) -> None:
        self._is_state = is_state
        self._copies = True
        self.has_run = False
        self._bytes_left = _MAX_BYTES
        self._tensors: list[_Tensor] = []
        self._plain: list[torch.Tensor] = []  # none is kept of these, and autograd is not concerned
        self._versions: list[int] = []
        self._arrays: list[tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]] = []
        self._lists: list[tuple[list[Any] | deque[Any], list[Any]]] = []
        self._mappings: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []

    def begin(self, *given: Any) -> None:
        """An iteration is called with that."""
        self._forget()
        for value in given:
            self.add(value)

    def add(self, value: Any) -> None:
        """The iteration has taken that."""
        parts = list(itertools.islice(_parts(value), _MAX_PARTS))
        if any(type(part) is not torch.Tensor and isinstance(part, torch.nn.Parameter) for part in parts):
            return  # of a model or an optimizer
        for part in parts:
            if isinstance(part, torch.Tensor):
                if not self._copies and not part.requires_grad and not part.is_inference():
                    self._plain.append(part)
                    self._versions.append(part._version)
                    continue
                self._tensors.append(kept := self._kept(part))
                if kept.gradient is not None:
                    self._tensors.append(self._kept(kept.gradient))
            elif isinstance(part, numpy.ndarray):
                if self._copies and part.flags.writeable and self._has_room(part.nbytes):
                    self._arrays.append((part, part.copy()))
            elif isinstance(part, (list, deque)):
                if len(part) <= _MAX_LENGTH:
                    self._lists.append((part, list(part)))
            elif isinstance(part, MutableMapping):
                if len(part) <= _MAX_LENGTH:
                    self._mappings.append((part, dict(part)))
            elif _is_data(part):
                self._objects.append((part, _fields(part)))

    def run(self) -> None:
        """It begins to run, for the first time or again. Raises `CannotPutBack`."""
        if not self.has_run:
            self.has_run = True
            return
        for mapping, entries in self._mappings:
            if _differs(mapping, entries) and not self._is_state(mapping):
                mapping.clear()
                mapping.update(entries)
        for one, items in self._lists:
            if len(one) != len(items) or any(a is not b for a, b in zip(one, items, strict=True)):
                one.clear()
                one.extend(items)
        for data, fields in self._objects:
            if _differs(_fields(data), fields):
                for name, value in fields.items():
                    object.__setattr__(data, name, value)
        for array, copy in self._arrays:
            if _kind(array) != _kind(copy) or not array.flags.writeable:
                raise CannotPutBack(f"an array of shape {list(copy.shape)}")
            array[...] = copy
        for kept in self._tensors:
            if kept.has_changed() and not self._is_state(kept.tensor):
                kept.put_back()
        for tensor, version in self._changed_of_plain():
            if tensor._version != version or not tensor.is_leaf:
                raise CannotPutBack(_named(_form(tensor)))
            tensor.requires_grad_(False)
            tensor.grad = None

    def end(self) -> None:
        """The script goes on after it."""
        self._copies = (
            any(kept.has_changed() and not self._is_state(kept.tensor) for kept in self._tensors)
            or any(_kind(array) != _kind(copy) or array.tobytes() != copy.tobytes() for array, copy in self._arrays)
            or any(True for _ in self._changed_of_plain())
        )
        self._forget()

    def _changed_of_plain(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Each with its version of before."""
        for tensor, version in zip(self._plain, self._versions, strict=True):
            if (tensor._version != version or tensor.requires_grad) and not self._is_state(tensor):
                yield tensor, version

    def _kept(self, tensor: torch.Tensor) -> _Tensor:
        is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
        copy = None
        # A tensor of another kind may have its own way of being copied, or be spread over ranks.
        if self._copies and type(tensor) is torch.Tensor and self._has_room(tensor.numel() * tensor.element_size()):
            with contextlib.suppress(RuntimeError):  # some kinds cannot be; or there is no room
                copy = tensor.detach().clone()
        gradient = tensor.grad if is_leaf and requires_grad else None
        return _Tensor(tensor, _version(tensor), copy, _form(tensor), is_leaf, requires_grad, gradient)

    def _has_room(self, num_bytes: int) -> bool:
        if num_bytes > self._bytes_left:
            return False
        self._bytes_left -= num_bytes
        return True

    def _forget(self) -> None:
        self.has_run, self._bytes_left = False, _MAX_BYTES
        for tensors in (self._tensors, self._plain, self._versions, self._arrays):
            tensors.clear()
        for kept in (self._lists, self._mappings, self._objects):
            kept.clear()


def storage_of(tensor: torch.Tensor) -> int | None:
    """Where its numbers lie; None of a kind that has no such place, or of one without numbers."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:
        return None


def _parts(value: Any) -> Iterator[Any]:
    """*value* and all that it consists of but numbers and texts, through lists, tuples, mappings and data classes. Who
    is in itself comes once."""
    ahead, seen = [iter((value,))], set[int]()
    while ahead:
        for part in ahead[-1]:
            if type(part) in PLAIN:
                continue
            inside = None if type(part) is torch.Tensor else _inside(part)
            if inside is not None:
                if id(part) in seen:
                    continue
                seen.add(id(part))
            yield part
            if inside is not None:
                ahead.append(itertools.islice(inside, _MAX_LENGTH))
                break
        else:
            ahead.pop()


def _inside(value: Any) -> Iterator[Any] | None:
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return None
    if isinstance(value, Mapping):
        # And what kind of keys it has.
        return itertools.chain(itertools.islice(value, 1), value.values())
    if isinstance(value, (list, tuple, deque)):
        is_plain = len(value) > _MAX_MIXED and type(value[0]) in PLAIN and type(value[-1]) in PLAIN
        return None if is_plain else iter(value)
    return iter(_fields(value).values()) if _is_data(value) else None


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(data: Any) -> dict[str, Any]:
    """Those that can be read: one may be a property of a class that derives from it, and raise anything."""
    values = {}
    for field in dataclasses.fields(data):
        with contextlib.suppress(Exception):
            values[field.name] = getattr(data, field.name)
    return values


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, copy)
    except RuntimeError:
        return True  # of this kind nobody can say but the version


def _named(form: tuple[Any, ...]) -> str:
    return f"a tensor of shape {list(form[0])}" if form else "a nested tensor"


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape and strides, of kinds that have them."""
    if tensor.is_nested:
        return ()
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else None


def _kind(array: numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype


def _version(tensor: torch.Tensor) -> int:
    return _UNTRACKED if tensor.is_inference() else tensor._version


def _differs(mapping: Mapping[Any, Any], entries: Mapping[Any, Any]) -> bool:
    return mapping.keys() != entries.keys() or any(mapping[key] is not value for key, value in entries.items())
