"""Writes a folder of torch.distributed.checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fsdp_compile.formats.dcp_files import NamingWriter
from fsdp_compile.formats.entries import Values, nested


def write_dcp(values: Values, target: Path) -> None:
    """Write values as one rank does; as many ranks as there are can load them.

    Raises:
        CheckpointException: It cannot be written.
    """
    placed = {
        entry.place: values.read_other(entry.name)
        if entry.tensor is None
        else torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
        for entry in values.entries
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
        dcp.save(nested(placed), storage_writer=NamingWriter(target), planner=_Planner(values), no_dist=True)


class _Planner(DefaultSavePlanner):
    """Plans with tensors without memory, and reads each when it is written."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._read = values.read_tensor

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is written."""
        if write_item.type is WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._read(write_item.index.fqn)
