"""Whether a checkpoint is what was written: files, digests, chunks, and, if asked for, that values are finite."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import torch
from torch import Tensor

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.detect import open_checkpoint
from fsdp_compile.formats.entries import Checkpoint, others, tensors


class Finite(Enum):
    """Whether infinite values and NaN are a problem."""

    IGNORE = auto()
    REQUIRE = auto()


@dataclass(frozen=True)
class Verified:
    """A checkpoint without problems, and what was compared, in words."""

    checkpoint: Checkpoint
    compared: str


def verify_checkpoint(path: Path | str, finite: Finite = Finite.IGNORE) -> Verified:
    """Read all of a checkpoint, one tensor at a time.

    Digests and checksums are compared where there are any, every file must be there and as long as it should be, the
    chunks of a tensor cover it exactly once, an index says what is in files, and every value can be read.

    Raises:
        ConfigError: There is no such path, or the package safetensors is missing.
        CheckpointError: The first problem, with file and cause.
    """
    checkpoint = open_checkpoint(path)
    compared = checkpoint.check_files()
    for entry, info in tensors(checkpoint.entries):
        value = checkpoint.read_tensor(entry.name)
        if tuple(value.shape) != info.shape or value.dtype != info.dtype:
            raise CheckpointError(f"{entry.name} in {path} is not of {info.dtype} and shape {list(info.shape)}")
        if finite is Finite.REQUIRE and not all_finite(value):
            raise CheckpointError(f"{entry.name} in {path} has values that are not finite")
    for name in others(checkpoint.entries):
        checkpoint.read_other(name)
    return Verified(checkpoint, compared)


def all_finite(value: Tensor) -> bool:
    """Whether no element is infinite or NaN; makes no second tensor of that size unless the dtype is 8-bit."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype.itemsize == 1:
        value = value.float()
    low, high = torch.aminmax(value)  # NaN if any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))
