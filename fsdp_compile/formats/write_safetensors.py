"""Writes safetensors, one tensor in memory at a time: one file, or a folder as Hugging Face lays it out.

A file is the length of its header (8 bytes, little endian), the header (JSON: name, dtype, shape, bytes from-to of each
tensor, padded with spaces to 8 bytes), and the tensors' bytes one after the other, those of the widest dtype first.
The package `safetensors` writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.formats.dcp_files import NamingWriter
from fsdp_compile.formats.entries import Entry, TensorInfo, Values, tensors
from fsdp_compile.formats.options import SUFFIX
from fsdp_compile.formats.safetensors_files import DTYPES, INDEX, SINGLE

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT: Final = 8
_RESERVED: Final = "__metadata__"
Sized = tuple[Entry, TensorInfo]


def write_safetensors(values: Values, target: Path, max_shard_bytes: float) -> None:
    """Write tensors; of those that are one memory, the first, and the names of the others as a note.

    Args:
        values: They are all tensors.
        target: A file if its name ends in .safetensors, else a folder that is made.
        max_shard_bytes: For files of a folder. A tensor that is larger has a file of its own.

    Raises:
        ConfigError: Safetensors have no such dtype or name.
        OSError: It cannot be written; the file is named.
    """
    found = list(tensors(values.entries))
    _check(found)
    kept = [(entry, info) for entry, info in found if entry.tied_to is None]
    tied = {entry.name: entry.tied_to for entry, _ in found if entry.tied_to is not None}
    if target.suffix == SUFFIX:
        _write_file(values, kept, tied, target)
        return
    target.mkdir()
    shards = _shards(kept, max_shard_bytes)
    if len(shards) == 1:
        _write_file(values, kept, tied, target / SINGLE)
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        _write_file(values, shard, tied, target / name)
        index |= {entry.name: name for entry, _ in shard}
    total = {"total_size": sum(info.nbytes for _, info in kept)}
    text = json.dumps({"metadata": total, "weight_map": index}, indent=2)
    with NamingWriter(target).fs.create_stream(target / INDEX, "wb") as stream:
        stream.write(text.encode())


def _check(found: Sequence[Sized]) -> None:
    for entry, info in found:
        if info.dtype not in _NAMES:
            raise ConfigError(
                f"{entry.name} is of {info.dtype}, which safetensors do not have", where="--to", instead="--to torch"
            )
        if entry.name == _RESERVED:
            raise ConfigError(f"{_RESERVED} is no name for a tensor of safetensors", where="--to", instead="--prefix")


def _shards(found: Sequence[Sized], max_bytes: float) -> list[list[Sized]]:
    """Tensors in their order, in as many files as it takes."""
    shards: list[list[Sized]] = [[]]
    filled = 0
    for entry, info in found:
        if shards[-1] and filled + info.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((entry, info))
        filled += info.nbytes
    return shards


def _write_file(values: Values, found: Sequence[Sized], tied: dict[str, str], path: Path) -> None:
    ordered = sorted(found, key=lambda each: -each[1].dtype.itemsize)  # aligned, since widths are powers of two
    names = {entry.name for entry, _ in ordered}
    # transformers reads no file without the format.
    notes = {"format": "pt"} | {name: kept for name, kept in tied.items() if kept in names}
    with NamingWriter(path.parent).fs.create_stream(path, "wb") as stream:
        stream.write(_header(ordered, notes))
        for entry, _ in ordered:
            value = values.read_tensor(entry.name)
            stream.write(_bytes(value))


def _header(ordered: Sequence[Sized], notes: dict[str, str]) -> bytes:
    header: dict[str, object] = {_RESERVED: notes}
    end = 0
    for entry, info in ordered:
        start, end = end, end + info.nbytes
        header[entry.name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes(value: Tensor) -> Any:
    """The memory of a contiguous tensor, as long as there is the tensor; numpy, which is optional, has no bfloat16."""
    return (ctypes.c_char * value.nbytes).from_address(value.data_ptr()) if value.nbytes else b""
