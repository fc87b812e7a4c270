"""A model of an accelerator's streams, on the CPU: what runs at the same time, and which memory it uses.

    compute   | all_gather | mm ------- | wait | reads what was gathered
    group     |            | all-gather |

Operators run on the computing stream in the order of the graph. A collective runs on the stream of its group, a copy
between host and device on that of its direction: behind what the computing stream had queued at its start, and beside
what comes after. Its wait puts the computing stream behind it and all before it on its stream. Between the two, nobody
may write what it reads, nor use what it writes; and what a copy uses must stay allocated, since an allocator gives
freed memory away at once (c10d itself holds what collectives use). Nobody may read memory that nothing was written to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY

_C10D = torch.ops._c10d_functional
_STARTS = {
    _C10D.all_gather_into_tensor.default,
    _C10D.all_gather_into_tensor_coalesced.default,
    _C10D.reduce_scatter_tensor.default,
    _C10D.reduce_scatter_tensor_coalesced.default,
    _C10D.all_reduce.default,
    _C10D.all_reduce_coalesced.default,
    _C10D.all_reduce_.default,
    _C10D.all_reduce_coalesced_.default,
}
_WAITS = {_C10D.wait_tensor.default, WAIT_COPY}
_UNWRITTEN = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class StreamError(AssertionError):
    """An operator uses memory that another stream may use at the same time."""


class StreamInterpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, model: StreamModel) -> None:
        super().__init__(gm)
        self._model = model

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """As the interpreter's own, checked if it is an operator."""
        if isinstance(target, torch._ops.OpOverload):
            return self._model.call(target, args, kwargs)
        return super().call_function(target, args, kwargs)


@dataclasses.dataclass(frozen=True)
class Region:
    """The bytes of a storage from the first to the last element of a tensor."""

    storage: int
    first: int
    last: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self | None:
        if tensor.numel() == 0:
            return None
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * tensor.element_size()
        return cls(_key(tensor), first, first + int(extent) * tensor.element_size())

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and self.first < other.last and other.first < self.last


@dataclasses.dataclass(frozen=True)
class Running:
    """What another stream may still do."""

    name: str  # of the operator
    stream: str  # a group's name, or the direction of a copy
    reads: tuple[Region, ...]  # what it reads
    writes: tuple[Region, ...]  # what it writes
    storages: Mapping[str, StorageWeakRef]  # those of a copy, which nobody else keeps; by name of the argument


class StreamModel:
    """Checks operators in the order in which they are called, also those of several graphs one after the other.

    Attributes:
        started: Names of all that ran on other streams.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self._running: list[Running] = []
        self._unwritten: dict[int, tuple[StorageWeakRef, list[Region]]] = {}

    def call(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Checks one operator, and calls it."""
        self._check_freed(str(func))
        if func in _WAITS:
            self._wait(args[0])
            return func(*args, **kwargs)
        reads, writes = _accesses(func, args, kwargs)
        if func is START_COPY or func in _STARTS:
            return self._start(func, reads, writes, args, kwargs)
        self._check(str(func), reads, writes, stream="compute")
        result = func(*args, **kwargs)
        self._note_written(func, writes, result)
        return result

    def finish(self) -> None:
        """Checks that nothing runs any more."""
        if self._running:
            raise StreamError(f"{self._running[0].name}: nobody waits for it")

    def _start(self, func: Any, reads: list[Region], writes: list[Region], args: Any, kwargs: Any) -> Any:
        copies = func is START_COPY
        stream = f"copies to {args[1]}" if copies else f"group {args[-1]}"
        self._check(str(func), reads, writes, stream=stream)
        result = func(*args, **kwargs)
        results = _tensors(result)
        writes = [*writes, *filter(None, (Region.of(t) for t in results))]
        storages = {"source": _weak(args[0]), "result": _weak(result)} if copies else {}
        self._running.append(Running(str(func), stream, tuple(reads), tuple(writes), storages))
        self.started.append(str(func))
        return result

    def _wait(self, waited: torch.Tensor) -> None:
        for place, running in enumerate(self._running):
            if any(region.storage == _key(waited) for region in running.writes):
                before = self._running[: place + 1]
                self._running = [r for r in self._running if r not in before or r.stream != running.stream]
                return

    def _check(self, name: str, reads: list[Region], writes: list[Region], *, stream: str) -> None:
        for running in self._running:
            if running.stream == stream:
                continue
            _refuse_overlap(name, "reads", reads, "writes", running, running.writes)
            _refuse_overlap(name, "writes", writes, "writes", running, running.writes)
            _refuse_overlap(name, "writes", writes, "reads", running, running.reads)
        for region in reads:
            if any(region.overlaps(hole) for hole in self._holes(region.storage)):
                raise StreamError(f"{name} reads bytes {region.first} to {region.last}, which nothing was written to")

    def _check_freed(self, name: str) -> None:
        for running in self._running:
            for what, storage in running.storages.items():
                if storage.expired():
                    raise StreamError(f"the {what} of {running.name} is freed before {name}, while it is in use")

    def _note_written(self, func: Any, writes: Iterable[Region], result: Any) -> None:
        if func in _UNWRITTEN:
            region = Region.of(result)
            if region is not None:
                self._unwritten[region.storage] = _weak(result), [region]
        for written in writes:
            if written.storage in self._unwritten:
                storage, holes = self._unwritten[written.storage]
                left = [part for hole in holes for part in _without(hole, written)]
                self._unwritten[written.storage] = storage, left

    def _holes(self, storage: int) -> list[Region]:
        reference, holes = self._unwritten.get(storage, (None, []))
        if reference is not None and reference.expired():  # its number is another storage's now
            del self._unwritten[storage]
            return []
        return holes


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[Region], list[Region]]:
    """What an operator reads and writes of its arguments; a view of them does neither."""
    reads: list[Region] = []
    writes: list[Region] = []
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        regions = [r for t in _tensors(given.get(argument.name)) if (r := Region.of(t)) is not None]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += regions
            # What is added to is read as well; what is copied into or filled is not.
            reads += [] if argument.name == "out" or _overwrites(func) else regions
        elif not views and func not in _UNWRITTEN:
            reads += regions
    return reads, writes


def _overwrites(func: Any) -> bool:
    return func in {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _without(hole: Region, written: Region) -> Iterator[Region]:
    if not hole.overlaps(written):
        yield hole
        return
    if hole.first < written.first:
        yield dataclasses.replace(hole, last=written.first)
    if written.last < hole.last:
        yield dataclasses.replace(hole, first=written.last)


def _refuse_overlap(
    name: str, does: str, mine: Iterable[Region], doing: str, running: Running, theirs: Iterable[Region]
) -> None:
    for region in mine:
        for other in theirs:
            if region.overlaps(other):
                raise StreamError(
                    f"{name} {does} bytes {region.first} to {region.last} while {running.name} on the stream of "
                    f"{running.stream} {doing} bytes {other.first} to {other.last} of the same memory"
                )
