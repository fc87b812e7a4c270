"""Files of safetensors: one, or a folder as Hugging Face lays it out.

model.safetensors                       all of a small model, or
model-00001-of-00002.safetensors        a part of a large one
model.safetensors.index.json            which tensor is in which file
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.causes import naming
from fsdp_compile.formats.complete import size_of
from fsdp_compile.formats.entries import Checkpoint, Entry, TensorInfo, check_names
from fsdp_compile.formats.options import SUFFIX, Format, check_safetensors

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Names of dtypes in files."""
_SHARDED_BY_TORCH: Final = "DCP_SHARDING_INFO"


class SafetensorsFiles(Checkpoint):
    """One file of safetensors, or a folder of them."""

    format = Format.SAFETENSORS

    def __init__(self, path: Path) -> None:
        check_safetensors(path)
        self.path = path
        self._index = _read_index(path / INDEX) if (path / INDEX).exists() else None
        self.description = "a file of safetensors" if path.is_file() else "a folder of safetensors, Hugging Face"
        self._open_files = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        entries = [entry for file in self._tensor_files() for entry in self._entries(file)]
        self.entries = tuple(entries)
        check_names(path, self.entries)
        self._tied = {entry.name: entry.tied_to for entry in entries if entry.tied_to is not None}
        if self._index is not None:
            self._check_index(self._index)

    def read_tensor(self, name: str) -> Tensor:
        """The tensor; its memory is the file's."""
        name = self._tied.get(name, name)
        file = self._file_of[name]
        with naming(f"read {name} in", file):
            return self._handles[file].get_tensor(name)

    def read_other(self, name: str) -> Any:
        """There is none."""
        raise CheckpointError(f"{self.path} has no {name}")

    def check_files(self) -> str:
        """Nothing more: opening has compared the index with the files, and each file with its header."""
        return "names and sizes"

    def files(self) -> list[Path]:
        """The files of tensors, and the index."""
        return [*self._handles, *([self.path / INDEX] if self._index is not None else [])]

    def _tensor_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if self._index is not None:
            return [self.path / name for name in sorted(set(self._index.values()))]
        found = sorted(file for file in self.path.iterdir() if file.suffix == SUFFIX)
        if len(found) > 1:
            raise CheckpointError(f"{self.path} has {len(found)} files of safetensors, and no {INDEX}")
        return found

    def _entries(self, file: Path) -> Iterator[Entry]:
        from safetensors import safe_open

        with naming("read", file):
            size_of(file)
            handle = self._open_files.enter_context(safe_open(file, framework="pt"))
            self._handles[file] = handle
            notes = handle.metadata() or {}
            if _SHARDED_BY_TORCH in notes:
                raise CheckpointError(
                    f"{file} has rows of one rank, and does not say of how many",
                    instead="write it with torch.distributed.checkpoint.save and no other writer, then convert it",
                )
            # In the order of the file, which `keys()` does not have.
            names = handle.offset_keys()
            for name in names:
                part = handle.get_slice(name)
                self._file_of[name] = file
                yield Entry((name,), TensorInfo(tuple(part.get_shape()), _dtype(part.get_dtype(), name, file)))
                # As `safetensors.torch.save_model` notes tensors that are one memory.
                for tied in (tied for tied, kept in notes.items() if kept == name and tied not in (*names, "format")):
                    yield Entry((tied,), TensorInfo(tuple(part.get_shape()), DTYPES[part.get_dtype()]), tied_to=name)

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file_name in index.items():
            if self._file_of.get(name) != self.path / file_name:
                raise CheckpointError(f"{self.path / file_name} has no {name}, which {self.path / INDEX} says it has")
        if left := self._file_of.keys() - index.keys():
            name = min(left)
            raise CheckpointError(f"{self._file_of[name]} has {name}, which {self.path / INDEX} does not name")


def _read_index(path: Path) -> dict[str, str]:
    with naming("read", path):
        index = json.loads(path.read_bytes())["weight_map"]
        for name, file in index.items():
            if not (isinstance(name, str) and isinstance(file, str) and file == Path(file).name):
                raise CheckpointError(f"{path} refers to {file}, which is no file of its folder")
        return index


def _dtype(text: str, name: str, file: Path) -> torch.dtype:
    if text not in DTYPES:
        raise CheckpointError(f"{name} in {file} is of {text}, which has no dtype here")
    return DTYPES[text]
