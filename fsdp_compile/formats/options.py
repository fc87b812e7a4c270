"""What a conversion is asked for, without torch: a command line is read, and refused, before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fsdp_compile.errors import ConfigError

SUFFIX = ".safetensors"


class Format(StrEnum):
    """What wrote a checkpoint, or will."""

    DCP = "dcp"
    """A folder of torch.distributed.checkpoint."""
    TORCH = "torch"
    """A file of `torch.save`."""
    SAFETENSORS = "safetensors"
    """A file of safetensors, or a folder of them as Hugging Face lays it out."""


class Others(StrEnum):
    """What becomes of values that are no tensors where the target has no place for them."""

    REFUSE = "refuse"
    DROP = "drop"


SHARD_GB: Final = 5.0
"""1e9 bytes that a file of a folder of safetensors may have unless the user says otherwise."""


@dataclass(frozen=True)
class ConvertOptions:
    """What is taken of a checkpoint, under which names, and how it is written.

    Attributes:
        to: The format to write.
        part: The key of the outermost dictionary whose contents alone are taken, such as `model`; None for all.
        strip_prefix: What is removed from the names that begin with it.
        prefix: What is put before every name, after that.
        dtype: The name of the dtype that floating-point tensors are cast to; None for their own.
        max_shard_gb: How many 1e9 bytes a file of a folder of safetensors may have; one tensor may have more. None for
            `SHARD_GB`.
        others: For safetensors, which hold tensors alone.
    """

    to: Format
    part: str | None = None
    strip_prefix: str = ""
    prefix: str = ""
    dtype: str | None = None
    max_shard_gb: float | None = None
    others: Others = Others.REFUSE


def check_convert(source: Path, target: Path, options: ConvertOptions) -> None:
    """Refuse what cannot be converted, as far as names and options tell.

    Raises:
        ConfigError: There is no source, there is a target, or an option has no meaning.
    """
    check_exists(source)
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists", where="DST", instead="a name that is free")
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", where="DST", instead="a path in a folder that exists")
    _check_shards(target, options)
    if options.to is Format.SAFETENSORS:
        check_safetensors(target)
    elif options.others is Others.DROP:
        raise ConfigError(
            f"{options.to} has a place for values that are no tensors", where="--drop-others", instead="leave it out"
        )


def _check_shards(target: Path, options: ConvertOptions) -> None:
    if options.max_shard_gb is None:
        return
    if not options.max_shard_gb > 0:
        raise ConfigError(f"files of {options.max_shard_gb} GB hold nothing", where="--max-shard-gb", instead="5")
    if options.to is not Format.SAFETENSORS or target.suffix == SUFFIX:
        raise ConfigError(
            "only a folder of safetensors is divided into files of some size",
            where="--max-shard-gb",
            instead=f"--to {Format.SAFETENSORS} and a DST that does not end in {SUFFIX}, or leave it out",
        )


def check_exists(path: Path) -> None:
    """Refuse a path that leads to nothing.

    Raises:
        ConfigError: There is no such file or folder.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}", where="PATH", instead="a file or folder of a checkpoint")


def check_safetensors(path: Path) -> None:
    """Refuse to read or write safetensors where the package of that name is missing.

    Raises:
        ConfigError: It is.
    """
    if find_spec("safetensors") is None:
        raise ConfigError(
            "this takes the package safetensors, which is not installed",
            where=str(path),
            instead="pip install 'fsdp-compile[safetensors]'",
        )
