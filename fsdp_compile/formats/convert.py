"""`convert_checkpoint`: the values of a checkpoint in another format, there in full or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from fsdp_compile._torch.distributed import save_state_dict, unflatten_state_dict
from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.checkpoint import (
    INDEX,
    SUFFIX,
    Checkpoint,
    Format,
    Place,
    all_finite,
    joined,
    open_checkpoint,
    tied,
)
from fsdp_compile.formats.dcp import NamingFiles, NamingWriter
from fsdp_compile.formats.files import naming, require_safetensors, sync


@dataclass(frozen=True)
class ConvertOptions:
    """What is taken of a checkpoint, under which names, and how it is written.

    Attributes:
        to: The format to write.
        part: The key of the outermost dictionary whose contents alone are taken, such as `model`; None for all.
        strip_prefix: What is removed from the names that begin with it.
        prefix: What is put before every name, after that.
        dtype: The name of the dtype that floating-point tensors are cast to; None for their own.
        max_shard_gb: 1e9 bytes that a file of a folder of safetensors may have; one tensor may have more.
        drop_others: Whether safetensors are written without the values that are no tensors, instead of an error.
    """

    to: Format
    part: str | None = None
    strip_prefix: str = ""
    prefix: str = ""
    dtype: str | None = None
    max_shard_gb: float = 5.0
    drop_others: bool = False


def convert_checkpoint(
    source: Path | str, target: Path | str, options: ConvertOptions
) -> tuple[dict[str, Any], list[str]]:
    """Write a checkpoint in another format. It needs no model, no process group, and memory for one tensor.

    The source is compared with its digests and checksums. The target is written under another name in its folder, and
    renamed when it is complete.

    Args:
        source: What `open_checkpoint` reads.
        target: A path that is free. For safetensors a file if it ends in .safetensors, else a folder; for dcp a folder;
            for torch a file of another ending.
        options: What is taken, and how it is written.

    Returns:
        What was written, by name, and the names, in the source, of what was left out.

    Raises:
        ConfigError: An option, or the target, does not fit what there is.
        CheckpointError: The source is not what was written, or the target cannot be written.
    """
    target = Path(target)
    _check_free(target)
    if options.to is Format.SAFETENSORS:
        require_safetensors()
    if options.to is Format.TORCH and target.suffix in (SUFFIX, ".distcp"):
        what = f"a file of torch.save whose name ends in {target.suffix} is taken for one of another format"
        raise ConfigError(what, where="DST", instead="a name that ends otherwise, as .pt")
    checkpoint = open_checkpoint(source)
    places, left_out = _selected(checkpoint, options)
    checkpoint.check_files()
    with naming("write", target):
        # Beside the target, and so on the same disk.
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.absolute().parent))
        try:
            values = _read(checkpoint, places, options, scratch)
            written = scratch / target.name
            nested = unflatten_state_dict(values, {joined(place): place for place in places.values()})
            match options.to:
                case Format.DCP:
                    save_state_dict(nested, NamingWriter(written), no_dist=True)
                case Format.TORCH:
                    with NamingFiles().create_stream(written, "wb") as stream:
                        torch.save(nested, cast(IO[bytes], stream))
                case Format.SAFETENSORS:
                    _write_safetensors(values, written, 1e9 * options.max_shard_gb)
            open_checkpoint(written)
            for each in (*written.rglob("*"), written):
                sync(each)
            _check_free(target)  # nothing has appeared there meanwhile
            written.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return values, left_out


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists", where="DST", instead="a name that is free")


def _selected(source: Checkpoint, options: ConvertOptions) -> tuple[dict[str, Place], list[str]]:
    """New places, by name in the source, of what is taken; and the names of what is left out."""
    part, places = options.part, dict(source.places)
    parts = " or ".join(dict.fromkeys(str(place[0]) for place in places.values() if len(place) > 1))
    if part is not None:
        places = {name: place[1:] for name, place in places.items() if len(place) > 1 and place[0] == part}
    if not places:
        instead = None if part is None else f"--part {parts}" if parts else f"--strip-prefix {part}."
        raise ConfigError(f"{source.path} has no {part or 'values'} to convert", where="--part", instead=instead)
    if not source.format is options.to is Format.DCP:
        _refuse_numbered(source, places)
    if not (options.to is Format.SAFETENSORS or options.dtype or options.strip_prefix or options.prefix):
        return places, []
    if any(len(place) > 1 for place in places.values()):
        what = f"{source.path} has several dictionaries; safetensors, --dtype, --strip-prefix and --prefix take one"
        raise ConfigError(what, where=str(source.path), instead=f"--part {parts}")
    others = (name for name in places if not isinstance(source.values[name], Tensor))
    left_out = list(others) if options.to is Format.SAFETENSORS else []
    if left_out and not options.drop_others:
        raise ConfigError(
            f"{left_out[0]} is no tensor, and safetensors hold nothing else",
            where=str(source.path),
            instead="--drop-others, which leaves such values out and names them",
        )
    keys = {name: str(place[0]) for name, place in places.items() if name not in left_out}
    if not any(key.startswith(options.strip_prefix) for key in keys.values()):
        raise ConfigError(f"no name begins with {options.strip_prefix or 'anything'}", where="--strip-prefix")
    new = {name: options.prefix + key.removeprefix(options.strip_prefix) for name, key in keys.items()}
    if twice := [key for key, times in Counter(new.values()).items() if times > 1]:
        raise CheckpointError(f"{source.path} has two values of the name {twice[0]}")
    return {name: (key,) for name, key in new.items()}, left_out


def _refuse_numbered(source: Checkpoint, places: Iterable[str]) -> None:
    """Refuse an optimizer that was saved by position."""
    for name in places:
        params = source.read(name) if source.places[name][-3::2] == ("param_groups", "params") else None
        if isinstance(params, list) and any(type(key) is int for key in params):
            what = f"{name} in {source.path} are numbers, of which formats make text in the optimizer's state"
            save = "save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) gives"
            raise ConfigError(what, where=name, instead=f"{save}, whose keys are names; or take another --part")


def _read(source: Checkpoint, places: dict[str, Place], options: ConvertOptions, folder: Path) -> dict[str, Any]:
    """Values by new name, cast; tensors are in files, and those that are one memory stay so."""
    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    second = tied(source.values)
    read: dict[str, Any] = {}
    copies: dict[str, Tensor] = {}
    for name in dict.fromkeys(second.get(name, name) for name in places):
        if not isinstance(value := source.values[name], Tensor):
            read[name] = source.read(name)
            continue
        cast_to = dtype if dtype and value.is_floating_point() else value.dtype
        is_whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes > 0 and not value.is_meta
        read[name] = value.detach()
        if cast_to != value.dtype or not is_whole or value.is_conj() or value.is_neg():
            read[name] = copies[name] = _in_file(value.shape, cast_to, folder / "memory")
    # In a second pass, in which nothing is made that stays: so malloc finds the memory of a tensor again for the next.
    for name, copied in copies.items():
        copied.copy_(value := source.read(name).detach())
        if copied.dtype != value.dtype and all_finite(value) and not all_finite(copied):
            raise CheckpointError(f"{name} has values that {copied.dtype} cannot hold", where="--dtype")
    return {joined(place): read[second.get(name, name)] for name, place in places.items()}


def _in_file(shape: torch.Size, dtype: torch.dtype, path: Path) -> Tensor:
    """A tensor in a file, which the system writes to disk, and drops from memory, as it likes."""
    if (nbytes := shape.numel() * dtype.itemsize) < 1 << 20:  # a process maps 65,530 files at most
        return torch.empty(shape, dtype=dtype)
    with path.open("wb") as file:
        # Where the disk is full, this is an error; a write to mapped memory would end the process.
        os.posix_fallocate(file.fileno(), 0, nbytes)
    mapped = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
    path.unlink()
    return mapped.view(shape)


def _write_safetensors(values: dict[str, Tensor], target: Path, max_bytes: float) -> None:
    """Of tensors that are one memory, write the first, and the names of the others as a note."""
    from safetensors.torch import save_file

    second = tied(values)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name in (name for name in values if name not in second):
        if target.suffix != SUFFIX and shards[-1] and filled + values[name].nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = values[name]
        filled += values[name].nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = target if target.suffix == SUFFIX else target / f"model{part}{SUFFIX}"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        mode = file.stat().st_mode
        # transformers reads no file without the format.
        save_file(shard, file, {"format": "pt"} | {name: kept for name, kept in second.items() if kept in shard})
        file.chmod(mode)  # safetensors gives other users no permission
        index |= dict.fromkeys(shard, file.name)
    if len(shards) > 1:
        total = sum(values[name].nbytes for name in index)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (target / INDEX).write_text(text)
