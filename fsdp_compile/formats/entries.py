"""What every format has in common: values with names and places in nested dictionaries, read one by one."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.options import Format

Place = tuple[str | int, ...]
"""Where a value is: keys of dictionaries (text) and positions in lists (numbers), outermost first."""
_FLAT_PARAMETER = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read; `shape` is that of the full one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A value of a checkpoint.

    Attributes:
        place: Where it is in nested dictionaries and lists.
        tensor: None for a value that is no tensor.
        tied_to: The name of an entry before this one that is the same memory, None for none.
    """

    place: Place
    tensor: TensorInfo | None
    tied_to: str | None = None

    @property
    def name(self) -> str:
        """The place as text, as torch.distributed.checkpoint joins it."""
        return ".".join(map(str, self.place))


class Values(ABC):
    """Values that are read one by one."""

    entries: tuple[Entry, ...]
    """In the order of the files; names are unique."""

    @abstractmethod
    def read_tensor(self, name: str) -> Tensor:
        """A full tensor, contiguous, on the host.

        Raises:
            CheckpointError: A file is not what it should be.
        """

    @abstractmethod
    def read_other(self, name: str) -> Any:
        """A value that is no tensor; nothing in its file is executed.

        Raises:
            CheckpointError: A file is not what it should be.
        """


class Checkpoint(Values):
    """A checkpoint on disk. Making one reads what describes the values, and refuses what cannot be right.

    Attributes:
        path: The file or folder.
        format: What wrote it.
        description: The same in words.
        writers: How many ranks wrote values that are in it, None if no file says so.
        step: The steps that were done, None if no file says so.
    """

    path: Path
    format: Format
    description: str
    writers: int | None = None
    step: int | None = None

    def numbered(self) -> Sequence[str]:
        """Names of dictionaries whose keys were no text when they were saved: state of an optimizer by position."""
        return ()

    @abstractmethod
    def check_files(self) -> str:
        """Compare files with their digests, or whatever else they have to be checked by.

        Returns:
            What was compared, in words.

        Raises:
            CheckpointError: A file is not what it should be.
        """

    def files(self) -> list[Path]:
        """Every file that belongs to it."""
        return [self.path] if self.path.is_file() else sorted(path for path in self.path.iterdir() if path.is_file())


def tensors(entries: Iterable[Entry]) -> Iterator[tuple[Entry, TensorInfo]]:
    """The entries that are tensors."""
    return ((entry, entry.tensor) for entry in entries if entry.tensor is not None)


def others(entries: Iterable[Entry]) -> list[str]:
    """Names of values that are no tensors."""
    return [entry.name for entry in entries if entry.tensor is None]


def nbytes(entries: Iterable[Entry]) -> int:
    """Bytes of all tensors, those that are the same memory once."""
    return sum(info.nbytes for entry, info in tensors(entries) if entry.tied_to is None)


def contiguous(value: Tensor) -> Tensor:
    """The values of a tensor in their order in memory: torch conjugates and negates views only when they are read."""
    return value.detach().resolve_conj().resolve_neg().contiguous()


def check_names(path: Path, entries: Iterable[Entry]) -> None:
    """Refuse entries that no other format could tell apart, or that are flat parameters.

    Raises:
        CheckpointError: Two have the same name, or one is a flat parameter of FSDP1's LOCAL_STATE_DICT.
    """
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise CheckpointError(f"{path} has two values of the name {entry.name}")
        seen.add(entry.name)
        if _FLAT_PARAMETER.fullmatch(entry.name):
            raise CheckpointError(
                f"{path} is a LOCAL_STATE_DICT of FSDP1: {entry.name} holds several parameters, and no file says which",
                instead="load it with FSDP1 on as many ranks, then save it under "
                "FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) or FULL_STATE_DICT",
            )


def nested(values: Mapping[Place, Any]) -> dict[str, Any]:
    """Dictionaries and lists that have each value at its place.

    Raises:
        CheckpointError: Places contradict each other.
    """
    root: dict[str | int, Any] = {}
    for place, value in values.items():
        inner = root
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise CheckpointError(f"{'.'.join(map(str, place))} lies in a value that is no dictionary")
        if place[-1] in inner:
            raise CheckpointError(f"there are two values at {'.'.join(map(str, place))}")
        inner[place[-1]] = value
    return {str(key): _with_lists(value, str(key)) for key, value in root.items()}


def _with_lists(value: Any, name: str) -> Any:
    """Lists in the place of dictionaries whose keys are positions."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each, f"{name}.{key}") for key, each in value.items()}
    if not any(isinstance(key, int) for key in inner):
        return inner
    if set(inner) != set(range(len(inner))):
        raise CheckpointError(f"{name} is a list without some of its elements")
    return [inner[position] for position in range(len(inner))]
