"""Checkpoints of every format on disk: which values they have, whether they are what was written, and each value."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_compile._torch.distributed import flatten_state_dict, load_state_dict
from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.dcp import METADATA, SafePlanner, SafeReader
from fsdp_compile.formats.files import MARKER, naming, read_marker, require_safetensors, size_of

INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
Place = tuple[str | int, ...]
"""Where a value is: keys of dictionaries (text) and positions in lists (numbers), outermost first."""
_FLAT_PARAMETER = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


class Format(StrEnum):
    """What wrote a checkpoint, or will: torch.distributed.checkpoint, `torch.save`, or safetensors."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What is in a file or folder.

    Attributes:
        values: By name, in the order of the files. Tensors are mapped files, not read yet; those of DCP are on meta,
            and its other values None, until `read` gives them.
        places: Where values are. A name is a place, joined by dots.
    """

    path: Path
    format: Format
    values: dict[str, Any]
    places: dict[str, Place]
    reader: SafeReader | None = None

    def read(self, name: str) -> Any:
        """A value; a tensor is full and on the host. Raises a `CheckpointError` if a file is damaged."""
        described = self.values[name]
        if self.reader is None:
            return described
        with naming(f"read {name} in", self.path):
            state = {name: None if described is None else torch.empty_like(described, device="cpu")}
            planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load_state_dict(state, self.reader, planner=planner, no_dist=True)
            return state[name]

    def check_files(self) -> None:
        """Raise a `CheckpointError` if a file has a digest or checksums, and is not what was written."""
        if self.format is Format.TORCH:
            with naming("read", self.path), self.path.open("rb") as file:
                _check_sums(file, str(self.path))
        if self.reader is None:
            return
        if (self.path / MARKER).exists():
            self.reader.check(read_marker(self.path).files)
        for index, info in self.reader.read_metadata().storage_data.items():
            path = self.path / info.relative_path
            with naming("read", path), path.open("rb") as file:
                dtype = getattr(self.values.get(index.fqn), "dtype", None)
                file.seek(info.offset)
                chunk = io.BytesIO(file.read(info.length))
                _check_sums(chunk, f"{path}, bytes {info.offset} to {info.offset + info.length}")
                chunk.seek(0)
                if getattr(torch.load(chunk, weights_only=True), "dtype", None) is not dtype:
                    raise CheckpointError(f"{path} has no {dtype} for {index.fqn}")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read what describes the values of a checkpoint. Nothing in it is executed.

    Args:
        path: A folder of DCP, a file of `torch.save` (torch 1.6 or later), a file of safetensors, or a folder of them.

    Raises:
        ConfigError: There is no such path, or the package to read it.
        CheckpointError: It is no checkpoint, or not what was written, or says too little to be read by others.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"there is no {path}", where="PATH", instead="a file or folder of a checkpoint")
    with naming("read", path):
        if (path / METADATA).exists():
            checkpoint = _open_dcp(path)
        elif path.suffix == SUFFIX or path.is_dir():
            checkpoint = _open_safetensors(path)
        else:
            checkpoint = _open_torch(path)
    for name in checkpoint.values:
        if _FLAT_PARAMETER.fullmatch(name):
            raise CheckpointError(
                f"{path} is a LOCAL_STATE_DICT of FSDP1: {name} holds several parameters, and no file says which",
                instead="load it with FSDP1 on as many ranks, then save it as a SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
    return checkpoint


def verify_checkpoint(path: Path | str, *, finite: bool = False) -> Checkpoint:
    """Read all of a checkpoint, one tensor at a time.

    Digests and checksums are compared, files must be there and as long as they should be, chunks cover each tensor
    once, an index says what is in files, and every value can be read. With `finite` none is infinite or NaN.

    Raises:
        ConfigError: There is no such path, or the package to read it.
        CheckpointError: The first problem, with file and cause.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.check_files()
    for name in checkpoint.values:
        value = checkpoint.read(name)
        if finite and isinstance(value, Tensor) and not all_finite(value):
            raise CheckpointError(f"{name} in {path} has values that are not finite")
    return checkpoint


def all_finite(value: Tensor) -> bool:
    """Whether no element is infinite or NaN; makes no second tensor of that size unless the dtype is 8-bit."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return True
    real = torch.view_as_real(value) if value.is_complex() else value
    low, high = torch.aminmax(real.float() if real.dtype.itemsize == 1 else real)  # NaN if any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def joined(place: Place) -> str:
    """The name of a place, as DCP makes it."""
    return ".".join(map(str, place))


def tied(values: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that are the memory of another one, with the name before them that has it."""
    first: dict[object, str] = {}
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() and not value.is_meta:
            # A conjugated or negated view of a tensor has its memory, and other values.
            memory = value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
            if (kept := first.setdefault(memory, name)) != name:
                found[name] = kept
    return found


def _open_dcp(path: Path) -> Checkpoint:
    reader = SafeReader(path)
    values: dict[str, Tensor | None] = {}
    places: dict[str, Place] = {}
    with naming("read", path / METADATA):
        size_of(path / METADATA)
        metadata: Any = reader.read_metadata()
        positions = range(len(metadata.state_dict_metadata))
        for name, value in metadata.state_dict_metadata.items():
            is_tensor = isinstance(value, TensorStorageMetadata)
            values[name] = torch.empty(value.size, dtype=value.properties.dtype, device="meta") if is_tensor else None
            # DCP notes it unless its planner was told to leave nested dictionaries as they are.
            place = places[name] = tuple((metadata.planner_data or {}).get(name, (name,)))
            are_keys = all(type(key) is str or (type(key) is int and key in positions) for key in place)
            if not are_keys or joined(place) != name:
                raise ValueError(f"the place of {name} is {place}")
    for info in metadata.storage_data.values():
        file, end = path / info.relative_path, info.offset + info.length
        if (size := size_of(file)) < end:
            raise CheckpointError(f"{file} has {size} bytes, and should have {end} at least")
    return Checkpoint(path, Format.DCP, values, places, reader)


def _open_torch(path: Path) -> Checkpoint:
    if not size_of(path) or not zipfile.is_zipfile(path) or path.suffix == ".distcp":
        raise CheckpointError(f"{path} is cut off, or no file of torch.save (1.6 or later), or its name lacks {SUFFIX}")
    loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, and no dictionary of tensors")
    values, places = flatten_state_dict(dict(loaded))
    for name, value in values.items():
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized
        if isinstance(value, Tensor) and not is_plain:
            raise CheckpointError(
                f"{name} in {path} is a {type(value).__name__} of layout {value.layout}",
                instead="full, plain tensors, as full_tensors(model) gives them",
            )
    return Checkpoint(path, Format.TORCH, values, places)


def _open_safetensors(path: Path) -> Checkpoint:
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
    index: dict[str, str] | None = None
    if (path / INDEX).exists():
        with naming("read", path / INDEX):
            index = dict(json.loads((path / INDEX).read_bytes())["weight_map"])
            if elsewhere := [file for file in index.values() if file != Path(file).name]:
                raise CheckpointError(f"{path / INDEX} refers to {elsewhere[0]}, which is no file of its folder")
        files = [path / file for file in sorted(set(index.values()))]
    elif len(files) != 1:
        raise CheckpointError(f"{path} has no {METADATA}, {len(files)} files of safetensors and no {INDEX}")
    found = {file: _mapped(file) for file in files}
    if index is not None:
        # The second name of a memory is noted in its file alone.
        in_files = {(n, file.name) for file, each in found.items() for n in each if n in index or n not in tied(each)}
        if wrong := in_files ^ index.items():
            name, file_name = min(wrong)
            raise CheckpointError(f"{path / INDEX} and {path / file_name} disagree about {name}")
    values = {name: value for each in found.values() for name, value in each.items()}
    return Checkpoint(path, Format.SAFETENSORS, values, {name: (name,) for name in values})


def _mapped(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors."""
    require_safetensors()
    with naming("read", file):
        from safetensors import safe_open

        size_of(file)
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata() or {}
            found = {name: opened.get_tensor(name) for name in opened.offset_keys()}
    if "DCP_SHARDING_INFO" in notes:
        raise CheckpointError(
            f"{file} has rows of one rank, and does not say of how many",
            instead="write it with torch.distributed.checkpoint.save and no other writer, then convert it",
        )
    # As `safetensors.torch.save_model` notes tensors that are one memory.
    return found | {n: found[kept] for n, kept in notes.items() if kept in found and n not in (*found, "format")}


def _check_sums(file: IO[bytes], what: str) -> None:
    """Compare each record that `torch.save` wrote with its CRC-32, which is 0 under `set_crc32_options(False)`."""
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC:
                    archive.read(record)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"the contents of {what} have changed: {error}") from None
