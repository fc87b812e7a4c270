"""Checkpoints of a run, through torch.distributed.checkpoint: each rank writes its own shards, and all are verified.

`checkpoint_folder.py` says what lies where. Here is what all ranks do together: a problem of one is raised on all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.dcp import METADATA, SafePlanner, SafeReader
from fsdp_compile.formats.files import MARKER, FileDigest, check_contents
from fsdp_compile.training.checkpoint_folder import CheckpointFolder, step_of
from fsdp_compile.training.save_plan import OwnPlanner, PlannedWriter
from fsdp_compile.training.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from.

    Attributes:
        step: Steps that were done.
        skipped: Why newer checkpoints were not loaded, one sentence each.
    """

    step: int
    skipped: tuple[str, ...]


def save_checkpoint(
    folder: CheckpointFolder,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    keep: int,
) -> tuple[str, ...]:
    """Write a checkpoint; every rank calls this and writes its own shards.

    Args:
        folder: Checkpoints of the run.
        step: Steps done.
        model: Its parameters are DTensors.
        optimizer: Has stepped at least once.
        world: This rank.
        keep: How many good checkpoints of the run there may be; older ones are removed when this one is complete.

    Returns:
        Which of these cannot be removed and why, one sentence each; the same on all ranks.

    Raises:
        CheckpointError: A value is not finite, or a file cannot be written; on all ranks. Checkpoints that were
            complete are as they were.
    """
    return write_checkpoint(folder, step, finite_state(model, optimizer, step, world), world, keep=keep)


def finite_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world: World) -> dict[str, Any]:
    """What a checkpoint holds: nested dictionaries of DTensors, tensors and plain values, not copied.

    Raises:
        CheckpointError: A value is not finite; on all ranks.
    """
    state = _state(model, optimizer)
    _refuse_non_finite(state, step, world)
    return state


def write_checkpoint(
    folder: CheckpointFolder, step: int, state: dict[str, Any], world: World, *, keep: int
) -> tuple[str, ...]:
    """Write what `finite_state` gave, or a copy of it; as `save_checkpoint`, over the process group of `world`."""
    try:
        return _write(folder, step, state, world, keep)
    except CheckpointError as error:
        _on_first(world, folder.abandon)  # the others wait: with the first rank that ends, a launcher ends all
        newest = _on_first(world, folder.newest)
        instead = f"go on from {newest}, which is complete" if newest else None
        raise CheckpointError(error.what, where=f"step {step}", instead=instead) from None


def load_checkpoint(
    folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Loaded:
    """Load the newest complete checkpoint into sharded parameters; every rank calls this.

    Parameters are written in place. The number of ranks may differ from that which wrote it. Nothing in a checkpoint
    is executed.

    Raises:
        ConfigError: There is no complete checkpoint.
    """
    skipped: list[str] = []
    for checkpoint in world.from_first(folder.candidates()):
        try:
            _load(_verified(folder, checkpoint, world), model, optimizer)
        except CheckpointError as error:
            skipped.append(error.what)
            continue
        return Loaded(step_of(checkpoint) or 0, tuple(skipped))
    raise ConfigError(
        "; ".join([f"there is no complete checkpoint in {folder.path}", *skipped]),
        where="--resume",
        instead="a new run",
    )


def _write(folder: CheckpointFolder, step: int, state: dict[str, Any], world: World, keep: int) -> tuple[str, ...]:
    _on_first(world, folder.begin)
    planner = OwnPlanner(world.rank, world.size)
    writer = PlannedWriter(folder.partial, planner)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=world.group)
    except CheckpointException as error:
        raise _cannot("write a checkpoint", error.failures) from None
    shares = _on_all(world, lambda: _own_digests(folder.partial, world))
    files = {name: digest for share in shares for name, digest in share.items()}
    return _on_first(world, lambda: folder.finish(step, files, keep=keep))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _refuse_non_finite(state: Mapping[str, Any], step: int, world: World) -> None:
    broken = [name for name, value in _tensors(state) if not bool(torch.isfinite(value).all())]
    for rank, names in enumerate(world.gather(broken[:1])):
        if names:
            raise CheckpointError(
                f"{names[0]} has values on rank {rank} that are not finite, so that no checkpoint is written",
                where=f"step {step}",
                instead="a lower --learning-rate",
            )


def _tensors(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """This rank's part of all tensors in nested dictionaries, by name."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value.to_local() if isinstance(value, DTensor) else value


def _own_digests(folder: Path, world: World) -> dict[str, FileDigest]:
    """Digests of the files that this rank has written."""
    own = sorted(folder.glob(f"__{world.rank}_*"))
    if world.is_first:
        own.append(folder / METADATA)
    return {path.name: FileDigest.of(path) for path in own}


def _verified(folder: CheckpointFolder, checkpoint: Path, world: World) -> SafeReader:
    """A reader of a checkpoint whose files are what was written; every rank reads a part of them.

    Raises:
        CheckpointError: They are not; on all ranks.
    """
    reader = SafeReader(checkpoint)

    def check_contents_of_share() -> None:
        files = folder.read_marker(checkpoint).files
        for name in sorted(files)[world.rank :: world.size]:
            check_contents(checkpoint / name, files[name])

    def check_metadata() -> None:
        files = folder.read_marker(checkpoint).files
        if METADATA not in files:
            raise CheckpointError(f"{checkpoint / MARKER} is damaged: it does not name {METADATA}")
        try:
            named = {info.relative_path for info in reader.read_metadata().storage_data.values()}
        except (OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {checkpoint / METADATA}: {_text(error)}") from None
        if left := named - files.keys():
            raise CheckpointError(f"{checkpoint / METADATA} refers to {min(left)}, which is no part of the checkpoint")

    _on_all(world, check_contents_of_share)
    _on_all(world, check_metadata)
    return reader


def _load(reader: SafeReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = _state(model, optimizer)
    try:
        dcp.load(state, storage_reader=reader, planner=SafePlanner())
    except CheckpointException as error:
        raise _cannot(f"load {reader.path}", error.failures) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _on_all(world: World, call: Callable[[], T]) -> list[T]:
    """Call something on every rank; where it cannot write a file on one of them, or finds a problem, all raise."""
    outcome: tuple[T, None] | tuple[None, str]
    try:
        outcome = call(), None
    except CheckpointError as error:
        outcome = None, error.what
    except OSError as error:
        outcome = None, f"rank {world.rank} cannot write a checkpoint: {_text(error)}"
    outcomes = world.gather(outcome)
    for _, problem in outcomes:
        if problem is not None:
            raise CheckpointError(problem)
    return [value for value, _ in outcomes]  # type: ignore[misc]


def _on_first(world: World, call: Callable[[], T]) -> T:
    """Call something on rank 0, while the others wait; what it returns or raises is the same on all."""
    first, *_ = _on_all(world, lambda: call() if world.is_first else None)
    return cast(T, first)


def _cannot(what: str, failures: Mapping[int, Sequence[Any]]) -> CheckpointError:
    """The same error on all ranks; `failures` has the exception of each rank that had one first in its sequence."""
    rank = min(failures)
    return CheckpointError(f"rank {rank} cannot {what}: {_text(failures[rank][0])}")


def _text(error: BaseException) -> str:
    """One line that says what happened to which file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
