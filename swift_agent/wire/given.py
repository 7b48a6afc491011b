"""What iterations were given, in a page of the agent's directory that outlives the worker.

A replacement runs the iteration again in which its predecessor was lost. With the fingerprint of what that one was
given it finds out that a loader begins somewhere else, or that a batch was drawn before the iteration, before it has
any effect. And it goes through a pass from its beginning: through the indices that the sampler chooses, or the batches
where there are none. So it finds out by the running fingerprint of those, too, wherever in the pass it has to begin.

    slot: iteration + 1, generation in which all began, pass, whether the iteration was called, how many things were
    given, fingerprint, the six in one (a write may be cut)
    track: pass + 1, generation in which all began, how many indices or batches, fingerprint of the first, of all so
    far, nothing, the six in one
    first: iteration + 1, generation in which all began, epoch, fingerprint, 1 for that of an epoch, 1 if it comes again
    and again, the six in one

A script that makes its data itself, from a position of its own, starts again in a replacement. Where no rank was cut in
an iteration there is none to compare; but this one is given what the first one of the run, or of the epoch, was given,
and the other ranks are not. What comes again within some iterations (a weight, a flag) says nothing.

A replacement on another node has the page from a rank that keeps a copy of it (`witness`).

What a script takes between two iterations need not be for the one to come: it may be a validation in the loop, which is
a pass of its own. So things are compared within a pass, and once an iteration is called its pass is, too. The page may
be one of an earlier run, before all started over: nothing in it says anything then.

This module must never wait for a device: of a tensor that is not on the processor only shape and type count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import mmap
import operator
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

NUM_SLOTS = 16
# Two, as the next pass may have begun when its predecessor is still to be repeated.
NUM_TRACKS = 2
_SLOT = struct.Struct("<7Q")
RECORD_BYTES = _SLOT.size
_NUM_FIRSTS = 2  # of the run, and of the epoch
PAGE_BYTES = (NUM_SLOTS + NUM_TRACKS + _NUM_FIRSTS) * RECORD_BYTES
_MARK = 0x5357_4749_5645_4E31
_TRACK_MARK = 0x5357_5452_4143_4B31
_FIRST_MARK = 0x5357_4649_5253_5431
_NUM_SAMPLES = 512
_MAX_LEAVES = 64
# What lies deeper is no batch, but something that is a part of itself.
_MAX_DEPTH = 16


# What has no parts and no state of its own.
PLAIN: frozenset[type] = frozenset({bool, int, float, str, bytes, type(None)})
# Tensors that are read as arrays: fewer calls than by torch's own, and it happens in every iteration.
_NUMPY_DTYPES = frozenset({
    torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bool,
})  # fmt: skip


def leaves(value: Any) -> Iterator[Any]:
    """The first things that *value* consists of, through lists, tuples and mappings."""
    return itertools.islice(_leaves(value), _MAX_LEAVES)


def _leaves(value: Any, depth: int = 0, *, of_data: bool = False) -> Iterator[Any]:
    """*of_data*: also through objects of data classes and queues."""
    if type(value) in PLAIN or isinstance(value, torch.Tensor) or depth == _MAX_DEPTH:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, depth + 1, of_data=of_data)
    elif isinstance(value, (list, tuple)) or (of_data and isinstance(value, deque)):
        for item in value:
            yield from _leaves(item, depth + 1, of_data=of_data)
    elif of_data and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            part = None
            with contextlib.suppress(Exception):  # a property may raise anything
                part = getattr(value, field.name)
            yield from _leaves(part, depth + 1, of_data=of_data)
    else:
        yield value


def fingerprint(value: Any, begin: int = 0) -> int:
    """Of the tensors, arrays, numbers and texts in *value*, by samples where they are large."""
    state = xxhash.xxh3_64(seed=begin)
    for leaf in itertools.islice(_leaves(value, of_data=True), _MAX_LEAVES):
        if isinstance(leaf, torch.Tensor):
            try:
                content = _content(leaf)
            except (RuntimeError, TypeError):
                content = f"{leaf.dtype}{leaf.layout}".encode()  # a kind that has no plain numbers (nested, quantized)
            state.update(content)
        elif isinstance(leaf, numpy.ndarray):
            state.update(f"{leaf.dtype}{leaf.shape}".encode())
            if leaf.dtype.kind in "biufc" and leaf.size:
                step = max(1, leaf.size // _NUM_SAMPLES)
                state.update(numpy.ascontiguousarray(leaf.reshape(-1)[::step]).data)
        elif isinstance(leaf, (bool, int, float, str, numpy.generic)):
            state.update(repr(leaf).encode())
    return state.intdigest()


def fingerprint_of_indices(entry: Any, begin: int) -> int:
    """As `fingerprint`, for what a sampler gives: mostly a list of numbers, all of which count."""
    if isinstance(entry, list) and len(entry) and type(entry[0]) is int:
        try:
            return xxhash.xxh3_64_intdigest(array("q", entry[:]).tobytes(), begin)
        except (TypeError, OverflowError):
            pass
    return fingerprint(entry, begin)


def _content(tensor: torch.Tensor) -> bytes:
    kind = _kind(tensor.dtype, tensor.shape)
    if not (tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel()):
        return kind
    step = tensor.numel() // _NUM_SAMPLES
    if type(tensor) is torch.Tensor and tensor.dtype in _NUMPY_DTYPES and not tensor.is_neg():
        array = tensor.detach().numpy().reshape(-1)
        return kind + (array[::step] if step > 1 else array).tobytes()
    flat = tensor.detach().view(-1)
    samples = (flat[::step] if step > 1 else flat).resolve_conj().resolve_neg().contiguous()
    return kind + samples.view(torch.uint8).numpy().tobytes()


@functools.lru_cache(maxsize=64)
def _kind(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


@dataclass(frozen=True)
class Slot:
    """What iteration *iteration* has been given, in pass *passes*. *run*: the generation in which all began."""

    iteration: int = -1
    run: int = 0
    passes: int = 0
    is_called: bool = False
    count: int = 0
    digest: int = 0


@dataclass(frozen=True)
class Track:
    """The first *count* indices or batches of pass *passes*. *run*: the generation in which all began."""

    passes: int = -1
    run: int = 0
    count: int = 0
    first: int = 0
    digest: int = 0


@dataclass(frozen=True)
class First:
    """What iteration *iteration* has got of the script's own making: the first such one of the run that began with
    generation *run*, or of *epoch* in it. *is_usual*: it has come again soon."""

    iteration: int = -1
    run: int = -1
    epoch: int = 0
    digest: int = 0
    is_usual: bool = False


_NOTHING = Slot()
_NO_TRACK = Track()
_NO_FIRST = First()


class GivenPage:
    """Of one rank. *predecessor*, *tracks*: what the process before this one has left, by iteration and by pass.
    *first_of_run*, *first_of_epoch*: of the process that was the first to be this rank."""

    def __init__(self, path: Path, *, is_replacement: bool) -> None:
        with open(path, "a+b") as stream:
            stream.truncate(PAGE_BYTES)
            self._page = mmap.mmap(stream.fileno(), PAGE_BYTES)
        if not is_replacement:
            self._page[:] = bytes(PAGE_BYTES)
        self.predecessor: dict[int, Slot] = {}
        self.tracks: dict[int, Track] = {}
        self.first_of_run = self.first_of_epoch = _NO_FIRST
        self._changed: dict[int, bytes] = {}
        self.learn(self._page[:])

    def put(self, slot: Slot) -> None:
        words = slot.iteration + 1, slot.run, slot.passes, int(slot.is_called), slot.count, slot.digest
        self._write(_at_slot(slot.iteration), _packed(_MARK, words))

    def put_track(self, track: Track) -> None:
        words = track.passes + 1, track.run, track.count, track.first, track.digest, 0
        self._write(_at_track(track.passes), _packed(_TRACK_MARK, words))

    def put_first(self, first: First, *, of_epoch: bool) -> None:
        if of_epoch:
            self.first_of_epoch = first
        else:
            self.first_of_run = first
        words = first.iteration + 1, first.run, first.epoch, first.digest, int(of_epoch), int(first.is_usual)
        self._write(_at_first(of_epoch), _packed(_FIRST_MARK, words))

    def _write(self, at: int, record: bytes) -> None:
        self._page[at : at + RECORD_BYTES] = record
        self._changed[at] = record

    def changed(self) -> bytes:
        """The records that are new since the last call."""
        records = b"".join(self._changed.values())
        self._changed.clear()
        return records

    def whole(self) -> bytes:
        return self._page[:]

    def learn(self, page: bytes) -> None:
        """*page*: a copy, of an earlier process of this rank. What is known of later iterations and passes stays."""
        for _, kind, words in _records(page):
            number, run, *rest = words
            if kind == _MARK:
                slot = Slot(number - 1, run, rest[0], bool(rest[1]), rest[2], rest[3])
                known = self.predecessor.get(slot.iteration, _NOTHING)
                order = [(one.run, one.passes, one.count, one.is_called) for one in (known, slot)]
                if order[1] > order[0]:
                    self.predecessor[slot.iteration] = slot
            elif kind == _FIRST_MARK:
                self._learn_first(First(number - 1, run, rest[0], rest[1], bool(rest[3])), of_epoch=bool(rest[2]))
            else:
                track = Track(number - 1, run, rest[0], rest[1], rest[2])
                before = self.tracks.get(track.passes, _NO_TRACK)
                if (track.run, track.count) > (before.run, before.count):
                    self.tracks[track.passes] = track

    def _learn_first(self, first: First, *, of_epoch: bool) -> None:
        """It stays in this page, for a successor."""
        known = self.first_of_epoch if of_epoch else self.first_of_run
        order = [(one.run, one.epoch if of_epoch else 0, -one.iteration, one.is_usual) for one in (known, first)]
        if order[1] > order[0]:
            self.put_first(first, of_epoch=of_epoch)


def copied(page: bytearray, records: bytes) -> None:
    """Put whole *records* where they belong in *page*, which is a copy of another rank's."""
    for record, kind, words in _records(records):
        at = _at_slot(words[0] - 1) if kind == _MARK else _at_track(words[0] - 1)
        if kind == _FIRST_MARK:
            at = _at_first(bool(words[4]))
        page[at : at + RECORD_BYTES] = record


def _at_slot(iteration: int) -> int:
    return iteration % NUM_SLOTS * RECORD_BYTES


def _at_track(passes: int) -> int:
    return (NUM_SLOTS + passes % NUM_TRACKS) * RECORD_BYTES


def _at_first(of_epoch: bool) -> int:
    return (NUM_SLOTS + NUM_TRACKS + of_epoch) * RECORD_BYTES


def _packed(mark: int, words: tuple[int, ...]) -> bytes:
    return _SLOT.pack(*words, functools.reduce(operator.xor, words, mark))


def _records(content: bytes) -> Iterator[tuple[bytes, int, tuple[int, ...]]]:
    """Those that are whole: the record, its kind and its words."""
    for at in range(0, len(content) - RECORD_BYTES + 1, RECORD_BYTES):
        record = bytes(content[at : at + RECORD_BYTES])
        *words, check = _SLOT.unpack(record)
        kind = functools.reduce(operator.xor, words, check)
        if words[0] and kind in (_MARK, _TRACK_MARK, _FIRST_MARK):
            yield record, kind, tuple(words)


class Given:
    """What this process gives its iterations, one after the other. *page*: None where it could not be read.
    *iteration*: the one that is given something now; *count*: and so many things it has got."""

    def __init__(self, page: GivenPage | None) -> None:
        self._page = page
        self.iteration, self.count, self._digest = -1, 0, 0
        self._run = self._passes = 0
        self._is_called = False
        self._track = _NO_TRACK
        self._has_own = False

    @property
    def page(self) -> GivenPage | None:
        return self._page

    def begin_track(self, passes: int, *, run: int = 0) -> bool:
        """A pass begins, with its first index or batch. Whether the predecessor has left something of it."""
        self._track = Track(passes, run)
        known = _NO_TRACK if self._page is None else self._page.tracks.get(passes, _NO_TRACK)
        return (known.run, known.passes) == (run, passes)

    def follow(self, digest: Callable[[int], int]) -> bool:
        """The pass goes on with one more, which *digest* adds to the running fingerprint. False: the predecessor has
        gone through others."""
        if self._page is None:
            return True
        count, last = self._track.count + 1, self._track
        now = digest(last.digest)
        track = self._track = Track(last.passes, last.run, count, now if count == 1 else last.first, now)
        before = self._page.tracks.get(track.passes, _NO_TRACK)
        if before.run != track.run or count > before.count:  # a successor shall find no less than this one has found
            self._page.put_track(track)
        if before.run != track.run or before.passes != track.passes:
            return True
        if count == 1 and now != before.first:
            return False
        return count != before.count or now == before.digest

    def begin(self, iteration: int, *, run: int = 0, passes: int = 0) -> None:
        """In that pass, and in the run that began with generation *run*."""
        self.iteration, self.count, self._digest = iteration, 0, 0
        self._run, self._passes, self._is_called = run, passes, False

    def call(self) -> bool:
        """What has been given is used now. False: the predecessor had called this iteration in another pass."""
        self._is_called = True
        if self._page is None:
            return True
        before = self._page.predecessor.get(self.iteration, _NOTHING)
        if before.is_called and before.run == self._run and before.passes != self._passes:
            return False
        if self.count:
            self._put(self._page, before)
        return True

    @property
    def digest(self) -> int:
        """Of what it has got so far; 0 where it could not be read."""
        return self._digest

    def add(self, value: Any) -> bool:
        """The iteration has got *value*. False: its predecessor had got something else."""
        if self._page is None:
            self.count += 1
            return True
        self._digest = fingerprint(value, self._digest)
        self.count += 1
        before = self._page.predecessor.get(self.iteration, _NOTHING)
        self._put(self._page, before)
        is_comparable = (before.run, before.passes, before.count) == (self._run, self._passes, self.count)
        return not is_comparable or self._digest == before.digest

    def starts_again(self, own: Any, epoch: int) -> bool | None:
        """The iteration has got *own* last, which is of the script's own making, in *epoch*. Whether that is what the
        run began with, or the epoch; None: that would say nothing, as it comes again and again."""
        page = self._page
        if page is None:
            return None
        digest = self._digest if self.count == 1 else fingerprint(own)
        now = First(self.iteration, self._run, epoch, digest)
        firsts = page.first_of_run, page.first_of_epoch
        if firsts[0].run != now.run:
            page.put_first(now, of_epoch=False)
        if (firsts[1].run, firsts[1].epoch) != (now.run, epoch):
            page.put_first(now, of_epoch=True)
        same = [
            (one, of_epoch) for one, of_epoch in zip(firsts, (False, True), strict=True)
            if one.run == now.run and one.digest == digest and one.iteration < now.iteration
        ]  # fmt: skip
        # A replacement that starts again does so with the first one.
        if self._has_own:
            for one, of_epoch in same:
                if not one.is_usual and now.iteration - one.iteration <= NUM_SLOTS:
                    page.put_first(replace(one, is_usual=True), of_epoch=of_epoch)
        self._has_own = True
        firsts = page.first_of_run, page.first_of_epoch
        if any(one.is_usual and one.digest == digest for one in firsts):
            return None
        return bool(same)

    def _put(self, page: GivenPage, before: Slot) -> None:
        """But no less than the predecessor had got: a successor shall find that."""
        is_more = self.count > before.count or (self._is_called and not before.is_called)
        if (before.run, before.passes) != (self._run, self._passes) or is_more:
            page.put(Slot(self.iteration, self._run, self._passes, self._is_called, self.count, self._digest))
