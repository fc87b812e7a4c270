"""`convert_checkpoint`: the values of a checkpoint in another format, streamed, and there in full or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdp_compile.formats.causes import naming
from fsdp_compile.formats.detect import open_checkpoint
from fsdp_compile.formats.entries import Entry
from fsdp_compile.formats.options import SHARD_GB, ConvertOptions, Format, check_convert
from fsdp_compile.formats.select import Selection
from fsdp_compile.formats.write_dcp import write_dcp
from fsdp_compile.formats.write_safetensors import write_safetensors
from fsdp_compile.formats.write_torch import write_torch

_GB = 1e9


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        entries: Names, shapes and dtypes, as they are in the target.
        left_out: Names, in the source, of what the target has no place for.
    """

    path: Path
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


def convert_checkpoint(source: Path | str, target: Path | str, options: ConvertOptions) -> Converted:
    """Write a checkpoint in another format. It needs no model, no process group, and memory for one tensor.

    The source is compared with its digests and checksums first.

    The target is written under another name in its folder, and renamed when it is complete.

    Args:
        source: What `open_checkpoint` reads.
        target: A path that is free. For safetensors a file if it ends in .safetensors, else a folder; for dcp a folder.
        options: What is taken, and how it is written.

    Raises:
        ConfigError: An option, or the target, does not fit what there is.
        CheckpointError: The source is not what was written, or the target cannot be written.
    """
    source, target = Path(source), Path(target)
    check_convert(source, target, options)
    checkpoint = open_checkpoint(source)
    selection = Selection(checkpoint, options)
    checkpoint.check_files()
    with naming("write", target):
        # Beside the target, and so on the same disk.
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.absolute().parent))
        try:
            _write(selection, scratch / target.name, options)
            _sync(scratch / target.name)
            check_convert(source, target, options)  # nothing has appeared there meanwhile
            (scratch / target.name).rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Converted(target, selection.entries, selection.left_out)


def _write(selection: Selection, path: Path, options: ConvertOptions) -> None:
    match options.to:
        case Format.DCP:
            write_dcp(selection, path)
        case Format.TORCH:
            write_torch(selection, path)
        case Format.SAFETENSORS:
            most_gb = SHARD_GB if options.max_shard_gb is None else options.max_shard_gb
            write_safetensors(selection, path, most_gb * _GB)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder with its files, is on disk."""
    for each in [*path.iterdir(), path] if path.is_dir() else [path]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
