"""Folders of torch.distributed.checkpoint (DCP), whatever wrote them; those of `fsdp-compile train` are among them.

.metadata         names, shapes, and in which part of which file each chunk of a tensor is
__0_0.distcp      what rank 0 wrote: chunk after chunk as `torch.save` writes it
complete.json     of `fsdp-compile train`: the digest of every file
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.causes import naming
from fsdp_compile.formats.complete import MARKER, check_contents, read_marker, size_of
from fsdp_compile.formats.coverage import Box, problem_with
from fsdp_compile.formats.dcp_files import SafeReader
from fsdp_compile.formats.dcp_metadata import METADATA
from fsdp_compile.formats.entries import Checkpoint, Entry, Place, TensorInfo, check_names, contiguous
from fsdp_compile.formats.file_part import FilePart, check_sums
from fsdp_compile.formats.options import Format

_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Stored:
    """Where a chunk is, or a value that is no tensor.

    Attributes:
        path: The file.
        offset: The first byte.
        length: How many bytes.
    """

    path: Path
    offset: int
    length: int

    def open(self) -> FilePart:
        """These bytes, to be read."""
        return FilePart(self.path, self.offset, self.length)

    def __str__(self) -> str:
        return f"{self.path}, bytes {self.offset} to {self.offset + self.length}"


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where it is."""

    box: Box
    stored: Stored


class DcpFolder(Checkpoint):
    """A checkpoint of DCP."""

    format = Format.DCP

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata_path = path / METADATA
        with naming("read", self._metadata_path):
            size_of(self._metadata_path)
            metadata = SafeReader(path).read_metadata()
            self.entries = tuple(_entries(metadata))
            check_names(path, self.entries)
            self._chunks = {e.name: self._chunks_of(e.name, e.tensor, metadata) for e in self.entries if e.tensor}
            self._values = {e.name: self._stored(MetadataIndex(e.name), metadata) for e in self.entries if not e.tensor}
        self._infos = {entry.name: entry.tensor for entry in self.entries if entry.tensor}
        self._check_sizes()
        self._is_step = (path / MARKER).exists()
        self.step = read_marker(path).step if self._is_step else None
        kind = "a step of fsdp-compile train" if self._is_step else "a folder"
        self.description = f"{kind}, torch.distributed.checkpoint"
        # Not by all files of the folder, where an earlier save by more ranks may have left some.
        named = [_FILE.fullmatch(stored.path.name) for stored in self._all_stored()]
        self.writers = len({match[1] for match in named if match}) or None

    def read_tensor(self, name: str) -> Tensor:
        """Put a full tensor together of its chunks."""
        info, chunks = self._infos[name], self._chunks[name]
        if len(chunks) == 1 and chunks[0].box.sizes == info.shape:
            return self._read_chunk(name, chunks[0], info.dtype)
        with naming("read", self.path):
            whole = torch.empty(info.shape, dtype=info.dtype)
        for chunk in chunks:
            whole[chunk.box.index].copy_(self._read_chunk(name, chunk, info.dtype))
        return whole

    def read_other(self, name: str) -> Any:
        """Unpickle with `weights_only`."""
        stored = self._values[name]
        with naming(f"read {name} in", stored.path), stored.open() as file:
            return torch.load(cast(IO[bytes], file), weights_only=True, map_location="cpu")

    def numbered(self) -> Sequence[str]:
        """Names of the states of optimizers whose groups have numbers for parameters: DCP made text of their keys."""
        found: dict[Place, None] = {}
        for entry in self.entries:
            match entry.place:
                case (*outer, "param_groups", int(), "params") if entry.tensor is None:
                    params = self.read_other(entry.name)
                    if isinstance(params, list) and any(type(key) is int for key in params):
                        found[*outer, "state"] = None
        inside = {entry.place[:depth] for entry in self.entries for depth in range(1, len(entry.place))}
        return [".".join(map(str, place)) for place in found if place in inside]

    def check_files(self) -> str:
        """Compare files with `complete.json`, and each chunk with its checksums."""
        compared = "checksums"
        if self._is_step:
            marker = read_marker(self.path)
            for name, digest in marker.files.items():
                check_contents(self.path / name, digest)
            named = {METADATA, *(stored.path.name for stored in self._all_stored())}
            if left := named - marker.files.keys():
                raise CheckpointError(f"{self.path / MARKER} does not name {min(left)}")
            compared = "digests and checksums"
        for stored in self._all_stored():
            with naming("read", stored.path), stored.open() as file:
                check_sums(file, str(stored))
        return compared

    def _read_chunk(self, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        path = chunk.stored.path
        with naming(f"read {name} in", path), chunk.stored.open() as file:
            value = torch.load(cast(IO[bytes], file), weights_only=True, map_location="cpu")
            if not isinstance(value, Tensor) or value.shape != chunk.box.sizes or value.dtype != dtype:
                raise CheckpointError(f"{path} has no {dtype} of shape {list(chunk.box.sizes)} for {name}")
            return contiguous(value)

    def _chunks_of(self, name: str, info: TensorInfo, metadata: Metadata) -> tuple[Chunk, ...]:
        """Where the chunks of a tensor are; those without elements are left out, since ranks may share them."""
        described: Any = metadata.state_dict_metadata[name]
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]
        if problem := problem_with(info.shape, boxes):
            raise CheckpointError(f"{self._metadata_path} describes {name} wrongly: {problem}")
        filled = [box for box in boxes if 0 not in box.sizes]
        return tuple(Chunk(box, self._stored(MetadataIndex(name, box.offsets), metadata)) for box in filled)

    def _stored(self, index: MetadataIndex, metadata: Metadata) -> Stored:
        storage: Any = metadata.storage_data
        if index not in storage:
            raise CheckpointError(f"{self._metadata_path} does not say where {_part(index)} is")
        info = storage[index]
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.path} was written with an extension of torch.distributed.checkpoint that changes what is in "
                f"files: {', '.join(map(str, info.transform_descriptors))}",
                instead="load it with that extension, and save it without",
            )
        if not (type(info.offset) is type(info.length) is int and min(info.offset, info.length) >= 0):
            raise CheckpointError(f"{self._metadata_path} says wrongly where {_part(index)} is")
        return Stored(self.path / info.relative_path, info.offset, info.length)

    def _all_stored(self) -> list[Stored]:
        chunks = [chunk.stored for chunks in self._chunks.values() for chunk in chunks]
        return sorted([*chunks, *self._values.values()], key=lambda stored: (stored.path, stored.offset))

    def _check_sizes(self) -> None:
        """Compare files with what is in them, so that nothing larger than a file is allocated for it."""
        sizes: dict[Path, int] = {}
        for stored in self._all_stored():
            if stored.path not in sizes:
                with naming("read", stored.path):
                    sizes[stored.path] = size_of(stored.path)
            if stored.offset + stored.length > sizes[stored.path]:
                raise CheckpointError(
                    f"{stored.path} has {sizes[stored.path]} bytes, and should have "
                    f"{stored.offset + stored.length} at least"
                )
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                needed = TensorInfo(chunk.box.sizes, self._infos[name].dtype).nbytes
                if chunk.stored.length < needed:
                    raise CheckpointError(
                        f"{chunk.stored.path} has {chunk.stored.length} bytes for {name}{chunk.box}, which has {needed}"
                    )


def _entries(metadata: Metadata) -> list[Entry]:
    entries = []
    for name, described in metadata.state_dict_metadata.items():
        info = None
        if isinstance(described, TensorStorageMetadata):
            info = TensorInfo(tuple(described.size), described.properties.dtype)
            if not isinstance(info.dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
        elif not isinstance(described, BytesStorageMetadata):
            raise TypeError(f"{name} is neither a tensor nor bytes")
        entries.append(Entry(_place(name, metadata.planner_data), info))
    return entries


def _place(name: str, mapping: Any) -> Place:
    """Where a value was in nested dictionaries; DCP notes it unless its planner was told to leave them as they are."""
    place = tuple(mapping[name]) if isinstance(mapping, dict) and name in mapping else (name,)
    if not all(type(key) in (str, int) for key in place) or ".".join(map(str, place)) != name:
        raise ValueError(f"the place of {name} is {place}")
    return place


def _part(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn}, from {list(index.offset)} on,"
