"""Files of `torch.save`: a state dict, or nested dictionaries of them. They are mapped into memory, and not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.causes import naming
from fsdp_compile.formats.entries import Checkpoint, Entry, Place, TensorInfo, check_names, contiguous
from fsdp_compile.formats.file_part import FilePart, check_sums
from fsdp_compile.formats.options import Format


class TorchFile(Checkpoint):
    """A file of `torch.save`."""

    format = Format.TORCH
    _numbered: list[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = "a file of torch.save"
        if path.suffix == ".distcp":
            raise CheckpointError(
                f"{path} is one file of a folder of torch.distributed.checkpoint", instead=str(path.parent)
            )
        with naming("read", path):
            loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{path} holds a {type(loaded).__name__}, and no dictionary of tensors")
        self._numbered = []
        self._values = list(self._flat(loaded, ()))
        self.entries = tuple(self._entries())
        check_names(path, self.entries)
        self._by_name = {entry.name: value for entry, (_, value) in zip(self.entries, self._values, strict=True)}

    def read_tensor(self, name: str) -> Tensor:
        """The tensor; its memory is the file's where that has the values in their order."""
        return contiguous(self._by_name[name])

    def read_other(self, name: str) -> Any:
        """The value."""
        return self._by_name[name]

    def numbered(self) -> Sequence[str]:
        """Names of dictionaries with keys that are no text."""
        return self._numbered

    def check_files(self) -> str:
        """Compare every record of the file with its checksum."""
        with naming("read", self.path), FilePart(self.path, 0, self.path.stat().st_size) as file:
            check_sums(file, str(self.path))
        return "checksums"

    def _flat(self, value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
        """Tensors, and whatever DCP takes as one value, with their places."""
        if isinstance(value, Mapping) and value:
            if any(type(key) is not str for key in value):
                self._numbered.append(".".join(map(str, place)) or "the outermost dictionary")
            for key, each in value.items():
                yield from self._flat(each, (*place, str(key)))
        elif isinstance(value, list) and any(isinstance(each, Mapping | list | Tensor) for each in value):
            for position, each in enumerate(value):
                yield from self._flat(each, (*place, position))
        else:
            yield place, value

    def _entries(self) -> Iterator[Entry]:
        by_memory: dict[object, str] = {}
        for place, value in self._values:
            if not isinstance(value, Tensor):
                yield Entry(place, None)
                continue
            name = ".".join(map(str, place))
            self._check_plain(name, value)
            entry = Entry(place, TensorInfo(tuple(value.shape), value.dtype))
            # A conjugated or negated view of a tensor has its memory, and other values.
            memory = value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
            tied_to = by_memory.setdefault(memory, name) if value.numel() else name
            yield entry if tied_to == name else Entry(place, entry.tensor, tied_to)

    def _check_plain(self, name: str, value: Tensor) -> None:
        kind = type(value).__name__ if type(value) not in (Tensor, nn.Parameter) else None
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            kind = f"tensor of layout {value.layout} on {value.device}"
        if kind is not None:
            raise CheckpointError(
                f"{name} in {self.path} is a {kind}", instead="full, plain tensors, as full_tensors(model) gives them"
            )
