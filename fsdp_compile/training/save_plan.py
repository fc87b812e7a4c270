"""Saves of DCP that are planned by each rank for itself: who writes what follows from meshes and placements.

DCP gathers every rank's plan on rank 0, which removes what several ranks hold, checks that nothing overlaps and sends a
plan to every rank: work that grows with ranks times tensors. Here a rank sends a digest of the layout instead of its
plan, and instead of where it wrote what, an array of places. The files are DCP's.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from fsdp_compile._torch.distributed import StorageInfo
from fsdp_compile.formats.dcp import NamingWriter


@dataclass(frozen=True)
class _Layout:
    """The chunks of a tensor.

    Attributes:
        chunks: Those that have elements, or the first one; in the order of their ranks.
        holders: The ranks that hold each, lowest first.
        chunk_of: The number of the chunk that a rank holds; empty ones have none.
        digest: Of mesh and placements.
    """

    chunks: tuple[ChunkStorageMetadata, ...]
    holders: tuple[tuple[int, ...], ...]
    chunk_of: dict[int, int]
    digest: bytes = b""


@dataclass(frozen=True)
class _Entry:
    """A value of the state, as all ranks know it; what is no tensor has no properties."""

    name: str
    size: torch.Size
    layout: _Layout
    properties: TensorProperties | None

    def writer(self, number: int, chunk: int) -> int:
        """The rank that writes a chunk, where this is the entry of some number: replicas take turns."""
        holders = self.layout.holders[chunk]
        return holders[number % len(holders)]

    def index(self, chunk: int) -> MetadataIndex:
        """Under which a chunk is found."""
        if self.properties is None:
            return MetadataIndex(self.name)
        return MetadataIndex(self.name, self.layout.chunks[chunk].offsets, chunk)


@dataclass(frozen=True)
class Places:
    """Where a rank wrote the chunks of its plan, in the order of the plan: first bytes and lengths, in its file."""

    file: str
    offsets: array.array[int]
    lengths: array.array[int]


class OwnPlanner(DefaultSavePlanner):
    """Each rank plans what it writes, and rank 0 knows it; for one save.

    Where a DTensor is not sharded evenly over all ranks (over a part of them, strided, partial), torch's way is taken.

    Args:
        rank: Of this process.
        ranks: Number of ranks, all of which save.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank = rank
        self._ranks = ranks
        self._entries: list[_Entry] | None = None
        self._own_items: list[WriteItem] = []

    @property
    def plans_itself(self) -> bool:
        """Whether no plans are gathered; known once there is a local plan."""
        return self._entries is not None

    def create_local_plan(self) -> SavePlan:
        """A digest of the layout of all values."""
        held = super().create_local_plan()
        self._entries = self._all_entries(held)
        if self._entries is None:
            return held
        items = {item.index.fqn: item for item in held.items}
        self._own_items = []
        for number, entry in enumerate(self._entries):
            chunk = entry.layout.chunk_of.get(self._rank)
            if chunk is not None and entry.writer(number, chunk) == self._rank:
                item = items[entry.name]
                self._own_items.append(dataclasses.replace(item, index=entry.index(chunk)))
        return SavePlan([], planner_data=_digest(self._entries))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: no plans, and the metadata of all chunks.

        Raises:
            ValueError: Ranks save different things.
        """
        own = all_plans[self._rank].planner_data
        for rank, plan in enumerate(all_plans):
            if isinstance(own, bytes) != isinstance(plan.planner_data, bytes) or (
                isinstance(own, bytes) and plan.planner_data != own
            ):
                raise ValueError(f"names, shapes, dtypes or meshes of what rank {rank} saves are not those of rank 0")
        if self._entries is None:
            return super().create_global_plan(all_plans)
        values: dict[str, STORAGE_TYPES] = {}
        for entry in self._entries:
            if entry.properties is None:
                values[entry.name] = BytesStorageMetadata()
            else:
                # The same chunks as in other tensors of its shape: they are pickled once.
                values[entry.name] = TensorStorageMetadata(entry.properties, entry.size, list(entry.layout.chunks))
        return [SavePlan([]) for _ in all_plans], Metadata(values, planner_data=self.mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        self.plan = dataclasses.replace(new_plan, items=self._own_items) if self.plans_itself else new_plan
        return self.plan

    def written_by_ranks(self) -> list[list[MetadataIndex]]:
        """What every rank writes, in the order of its plan."""
        assert self._entries is not None
        written: list[list[MetadataIndex]] = [[] for _ in range(self._ranks)]
        for number, entry in enumerate(self._entries):
            for chunk in range(len(entry.layout.chunks) or 1):
                written[entry.writer(number, chunk)].append(entry.index(chunk))
        return written

    def _all_entries(self, held: SavePlan) -> list[_Entry] | None:
        """Every value of the state, or `None` if what other ranks hold of one does not follow from its DTensor."""
        whole = _Layout((), (tuple(range(self._ranks)),), dict.fromkeys(range(self._ranks), 0))
        layouts: dict[Any, _Layout | None] = {}
        items = {item.index.fqn: item for item in held.items}
        entries = []
        for name, value in self.state_dict.items():
            item = items.get(name)
            if item is None:
                return None  # a DTensor of other ranks
            data = item.tensor_data
            if data is None:
                entries.append(_Entry(name, torch.Size(), whole, None))
                continue
            if isinstance(value, DTensor):
                key = (value.shape, value.device_mesh, value.placements)
                if key not in layouts:
                    layouts[key] = _layout(value, self._ranks)
                layout = layouts[key]
                if layout is None or not _is_at(data.chunk, layout, self._rank):
                    return None
            elif item.type is WriteItemType.TENSOR:
                layout = dataclasses.replace(whole, chunks=(data.chunk,))
            else:
                return None
            # Whether memory is pinned tells where a copy of the state was saved from, and nothing about the state.
            entries.append(_Entry(name, data.size, layout, dataclasses.replace(data.properties, pin_memory=False)))
        return entries


class PlannedWriter(NamingWriter):
    """Writes what an `OwnPlanner` plans: ranks send arrays of places to rank 0."""

    def __init__(self, path: Path, planner: OwnPlanner) -> None:
        super().__init__(path)
        self._planner = planner

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks; the result says where, for `finish`."""
        written = super().write_data(plan, planner)
        if not self._planner.plans_itself:
            return written
        infos: dict[MetadataIndex, StorageInfo] = {each.index: each.storage_data for each in written.value()}
        places = [infos[item.index] for item in plan.items]
        file = places[0].relative_path if places else ""
        offsets = array.array("q", [each.offset for each in places])
        made: Future[Any] = Future()
        made.set_result([Places(file, offsets, array.array("q", [each.length for each in places]))])
        return made

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write the metadata."""
        super().finish(metadata, self._expanded(results) if self._planner.plans_itself else results)

    def _expanded(self, results: Sequence[Sequence[Any]]) -> list[list[WriteResult]]:
        written = self._planner.written_by_ranks()
        return [list(_results(own, places)) for own, (places,) in zip(written, results, strict=True)]


def _results(written: Sequence[MetadataIndex], places: Places) -> Iterator[WriteResult]:
    for index, offset, length in zip(written, places.offsets, places.lengths, strict=True):
        yield WriteResult(index, length, StorageInfo(places.file, offset, length))


def _layout(tensor: DTensor, ranks: int) -> _Layout | None:
    """Who holds which rows of a DTensor that is sharded evenly over all ranks; `None` for others."""
    mesh = tensor.device_mesh.mesh
    cuts = [placement.dim for placement in tensor.placements if type(placement) is Shard]
    are_known = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
    if not are_known or len(set(cuts)) < len(cuts) or sorted(mesh.flatten().tolist()) != list(range(ranks)):
        return None
    found: dict[tuple[Any, Any], list[int]] = {}
    for place in itertools.product(*(range(count) for count in mesh.shape)):
        offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
        for at, count, placement in zip(place, mesh.shape, tensor.placements, strict=True):
            if isinstance(placement, Shard):
                offsets[placement.dim], sizes[placement.dim] = _rows(tensor.shape[placement.dim], at, count)
        found.setdefault((torch.Size(offsets), torch.Size(sizes)), []).append(int(mesh[place]))
    kept = [each for each in found.items() if math.prod(each[0][1])] or list(found.items())[:1]
    return _Layout(
        tuple(ChunkStorageMetadata(offsets, sizes) for (offsets, sizes), _ in kept),
        tuple(tuple(sorted(holders)) for _, holders in kept),
        {rank: number for number, (_, holders) in enumerate(kept) for rank in holders},
        hashlib.sha256(repr((mesh.tolist(), tensor.placements)).encode()).digest(),
    )


def _rows(size: int, at: int, count: int) -> tuple[int, int]:
    """The first row and the number of rows of the part `at` of `count`, as torch cuts."""
    step = -(-size // count)
    begin = min(at * step, size)
    return begin, min(step, size - begin)


def _is_at(chunk: ChunkStorageMetadata, layout: _Layout, rank: int) -> bool:
    """Whether what a rank holds, as torch says, is what others think it holds."""
    number = layout.chunk_of.get(rank)
    return math.prod(chunk.sizes) == 0 if number is None else chunk == layout.chunks[number]


def _digest(entries: Sequence[_Entry]) -> bytes:
    told = hashlib.sha256()
    for entry in entries:
        dtype = entry.properties.dtype if entry.properties else None
        told.update(repr((entry.name, dtype, tuple(entry.size), entry.layout.digest)).encode())
    return told.digest()
