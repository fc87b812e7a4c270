"""Checkpoints that are complete or absent: written to another folder, then renamed.

checkpoints/step-000050        complete
checkpoints/.partial           being written, or left over from a run that was interrupted while writing
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.world import World

_NAME = "step-{:06d}"
_PARTIAL = ".partial"


def last_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a folder, None where there is none."""
    return max(folder.glob("step-*"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of steps after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Write a checkpoint; every rank calls this and writes its own shards.

    The checkpoint before stays until this one is complete, and is removed then.

    Args:
        folder: Folder of all checkpoints; all hosts must see the same folder.
        step: Steps done.
        model: Its parameters are DTensors.
        optimizer: Has stepped at least once.
        world: This rank.
    """
    partial = folder / _PARTIAL
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=partial)
    if world.is_first:
        complete = folder / _NAME.format(step)
        older = [path for path in folder.glob("step-*") if path != complete]
        shutil.rmtree(complete, ignore_errors=True)
        # A rename is atomic: a checkpoint with its final name is complete.
        partial.rename(complete)
        # Only now, so that there is a complete checkpoint at any time.
        for path in older:
            shutil.rmtree(path)
    world.barrier()


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last complete checkpoint into sharded parameters; every rank calls this. Returns the steps done.

    Parameters are written in place. The number of ranks may differ from that which wrote it.

    Raises:
        ConfigError: There is no complete checkpoint.
    """
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        raise ConfigError(f"there is no complete checkpoint in {folder}", where="--resume")
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step_of(checkpoint)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
