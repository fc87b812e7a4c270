"""What a conversion takes of a checkpoint, under which names and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.entries import Checkpoint, Entry, Place, TensorInfo, Values, check_names
from fsdp_compile.formats.options import ConvertOptions, Format, Others
from fsdp_compile.formats.verify import all_finite


class Selection(Values):
    """The values of a checkpoint that are written, as they are written.

    Attributes:
        left_out: Names, in the checkpoint, of what the target has no place for.

    Raises:
        ConfigError: The checkpoint has nothing that the options ask for, or the target has no place for it.
        CheckpointError: Two values would have the same name.
    """

    def __init__(self, source: Checkpoint, options: ConvertOptions) -> None:
        self._source, self._options = source, options
        self._dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
        places = _renamed(source, options, _inside(source, options))
        chosen = [entry for entry in source.entries if entry.name in places]
        self.left_out = tuple(_without_place(source, options, chosen))
        chosen = [entry for entry in chosen if entry.name not in self.left_out]
        if not chosen:
            raise ConfigError(f"{source.path} has nothing to convert", where=str(source.path))
        self.entries = tuple(self._entry(entry, places) for entry in chosen)
        check_names(source.path, self.entries)
        self._source_of = {new.name: old.name for new, old in zip(self.entries, chosen, strict=True)}

    def read_tensor(self, name: str) -> Tensor:
        """A tensor of the checkpoint, cast.

        Raises:
            CheckpointError: It cannot be read, or finite values would become infinite.
        """
        value = self._source.read_tensor(self._source_of[name])
        if self._dtype is None or not value.is_floating_point() or value.dtype is self._dtype:
            return value
        cast = value.to(self._dtype)
        if all_finite(value) and not all_finite(cast):
            raise CheckpointError(
                f"{name} has values that {self._options.dtype} cannot hold", where="--dtype", instead="bfloat16"
            )
        return cast

    def read_other(self, name: str) -> Any:
        """A value of the checkpoint that is no tensor."""
        return self._source.read_other(self._source_of[name])

    def _entry(self, old: Entry, places: dict[str, Place]) -> Entry:
        info = old.tensor
        if info is not None and self._dtype is not None and info.dtype.is_floating_point:
            info = TensorInfo(info.shape, self._dtype)
        tied_to = places.get(old.tied_to) if old.tied_to is not None else None
        return Entry(places[old.name], info, ".".join(map(str, tied_to)) if tied_to else None)


def _inside(source: Checkpoint, options: ConvertOptions) -> dict[str, Place]:
    """New places by name in the source: all, or those in one of the outermost dictionaries, which is left away."""
    part = options.part
    for name in () if source.format is options.to is Format.DCP else source.numbered():
        if part is None or name.split(".")[0] == part:
            raise ConfigError(
                f"{name} in {source.path} has keys that are numbers, which formats turn into text",
                where=str(source.path),
                instead="for an optimizer, save what torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict(model, optimizer) gives, whose keys are names; or take another --part",
            )
    if part is None:
        return {entry.name: entry.place for entry in source.entries}
    found = {e.name: e.place[1:] for e in source.entries if len(e.place) > 1 and e.place[0] == part}
    if not found:
        raise ConfigError(
            f"{source.path} has no dictionary {part}",
            where="--part",
            instead=f"--part {_parts(source)}" if _parts(source) else f"--strip-prefix {part}.",
        )
    if isinstance(next(iter(found.values()))[0], int):
        raise ConfigError(f"{part} is a list", where="--part", instead="a dictionary")
    return found


def _renamed(source: Checkpoint, options: ConvertOptions, places: dict[str, Place]) -> dict[str, Place]:
    asked = {
        "--to safetensors": options.to is Format.SAFETENSORS,
        "--dtype": options.dtype,
        "--strip-prefix": options.strip_prefix,
        "--prefix": options.prefix,
    }
    where = next((option for option, value in asked.items() if value), None)
    if where is not None and any(len(place) > 1 for place in places.values()):
        raise ConfigError(
            f"{source.path} has dictionaries in dictionaries, and this is for the tensors of one",
            where=where,
            instead=f"--part {_parts(source)}",
        )
    if where is None:
        return places
    flat = {name: str(place[0]) for name, place in places.items()}
    if options.strip_prefix and not any(key.startswith(options.strip_prefix) for key in flat.values()):
        raise ConfigError(f"no name begins with {options.strip_prefix}", where="--strip-prefix")
    return {name: (options.prefix + key.removeprefix(options.strip_prefix),) for name, key in flat.items()}


def _without_place(source: Checkpoint, options: ConvertOptions, chosen: list[Entry]) -> list[str]:
    names = [entry.name for entry in chosen if entry.tensor is None]
    match options.to:
        case Format.TORCH:
            return []
        case Format.DCP:  # it has no place for an empty dictionary
            return [name for name in names if source.read_other(name) == {}]
        case Format.SAFETENSORS:
            if names and options.others is Others.REFUSE:
                raise ConfigError(
                    f"{names[0]} is no tensor, and safetensors hold nothing else",
                    where=str(source.path),
                    instead="--drop-others, which leaves such values out and names them",
                )
            return names


def _parts(source: Checkpoint) -> str:
    """Keys of the dictionaries in the outermost one."""
    return " or ".join(dict.fromkeys(str(entry.place[0]) for entry in source.entries if len(entry.place) > 1))
