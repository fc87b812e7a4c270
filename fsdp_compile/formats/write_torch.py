"""Writes a file of `torch.save`, one tensor in memory at a time.

`torch.save` takes all tensors at once. They lie in a scratch file that is mapped into memory, which the system writes
to disk and drops as it likes: so a conversion takes the disk twice, and memory for one tensor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from fsdp_compile.formats.dcp_files import NamingWriter
from fsdp_compile.formats.entries import Place, TensorInfo, Values, nbytes, nested

_ALIGNMENT = 64


def write_torch(values: Values, target: Path) -> None:
    """Write values to a file, in nested dictionaries; tensors that are one memory stay so.

    Raises:
        OSError: It cannot be written; the file is named.
    """
    scratch = target.with_name(f"{target.name}.scratch")
    try:
        placed = _mapped(values, scratch)
        with NamingWriter(target.parent).fs.create_stream(target, "wb") as stream:
            torch.save(nested(placed), cast(IO[bytes], stream))
    finally:
        scratch.unlink(missing_ok=True)


def _mapped(values: Values, scratch: Path) -> dict[Place, Any]:
    """Values by place; tensors lie in a file."""
    memory = _Memory(scratch, nbytes(values.entries) + _ALIGNMENT * len(values.entries))
    by_name: dict[str, Any] = {}
    for entry in values.entries:
        if entry.tensor is None:
            by_name[entry.name] = values.read_other(entry.name)
        elif entry.tied_to is not None:
            by_name[entry.name] = by_name[entry.tied_to]
        else:
            by_name[entry.name] = memory.empty(entry.tensor).copy_(values.read_tensor(entry.name))
    return {entry.place: by_name[entry.name] for entry in values.entries}


class _Memory:
    """A file that tensors lie in, one after the other, each in a storage of its own."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        with path.open("wb") as file:
            try:
                # Where the disk is full, this is an error; a write to mapped memory would end the process.
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
        self._storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=max(1, size_bytes))
        self._used = 0

    def empty(self, info: TensorInfo) -> Tensor:
        """A tensor in the file."""
        start = self._used
        # Empty ones, too, begin where no other does: torch.save takes tensors of one address for one storage.
        self._used += max(1, -(-info.nbytes // _ALIGNMENT)) * _ALIGNMENT
        storage = self._storage[start : start + info.nbytes]
        return torch.empty(0, dtype=info.dtype).set_(storage, 0, info.shape)  # type: ignore[call-overload]
