"""State that was loaded into optimizers and models: what was saved by another rank, or in full, is refused.

`torch.save(optimizer.state_dict())` on one rank writes that rank's rows. Loaded on another rank they have the right
shape and the wrong place, which nothing later would notice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile._torch.tensors import local_tensor, make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime import refused_optimizers
from fsdp_compile.runtime.replaced_params import is_number, update_optimizer
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters

_CHECKED = "_fsdp_checked_state"
"""Attribute of an optimizer: the dict of its state that was checked; loading a state dict makes another one."""
_INSTEAD = (
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)) on all ranks before rank 0 saves, and set_optimizer_state_dict() "
    "with the same options to load it; or torch.distributed.checkpoint, which saves every rank's part"
)


@functools.cache
def follow_optimizers() -> None:
    """Makes every optimizer of the process take sharded parameters and check its state at the start of its steps."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    prepare(optimizer)
    refused_optimizers.refuse(optimizer)


def prepare(optimizer: Optimizer) -> None:
    """Replaces the replaced parameters of an optimizer, and checks its state; raises `ConfigError` as these do."""
    update_optimizer(optimizer)
    check(optimizer)


def check(optimizer: Optimizer) -> None:
    """Checks the state of sharded parameters that was loaded since the last step.

    Raises:
        ConfigError: If it is that of another rank, or a full tensor; nothing is changed then.
    """
    state = optimizer.state
    if vars(optimizer).get(_CHECKED) is state or not any(isinstance(p, DTensor) for p in state):
        return
    sharded = sharded_parameters()
    for parameter, held in state.items():
        if parameter in sharded and isinstance(held, dict):
            _refuse(optimizer, held, sharded[parameter])
    for parameter, held in state.items():
        if parameter in sharded and isinstance(held, dict) and parameter.dim() == 0:
            held.update(_as_dtensors(held, sharded[parameter]))
    setattr(optimizer, _CHECKED, state)


def is_of_other_rank(value: object, parameter: DTensor) -> bool:
    """Whether a DTensor that is laid out like a parameter holds the part of another rank: it was saved there."""
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        return False
    split = [dim for dim, placement in enumerate(value.placements) if isinstance(placement, Shard)]
    mesh = value.device_mesh
    # A mesh that was unpickled says the place of the rank that pickled it. torch also caches meshes of earlier worlds,
    # where this process may have been another rank: these are in parameters, too.
    saved = mesh.get_coordinate()
    if saved is None or saved == parameter.device_mesh.get_coordinate():
        return False
    own = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
    return not own or any(own[dim] != saved[dim] for dim in split)


def _refuse(optimizer: Optimizer, held: dict[str, Any], param: FSDPParam) -> None:
    for key, value in held.items():
        if not isinstance(value, torch.Tensor):
            continue
        if is_of_other_rank(value, param.dtensor) or _has_other_rows(value, param):
            raise ConfigError(
                f"the optimizer's state {key!r} was saved by another rank, and holds that rank's part of it",
                where=f"{type(optimizer).__name__}.load_state_dict(), {param.name}",
                instead=_INSTEAD,
            )
        if _is_full(optimizer, value, param):
            raise ConfigError(
                f"the optimizer's state {key!r} is a full tensor, and its parameter is sharded",
                where=f"{type(optimizer).__name__}.load_state_dict(), {param.name}",
                instead="torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, "
                "state_dict, options=StateDictOptions(full_state_dict=True)), which shards it",
            )


def _has_other_rows(value: torch.Tensor, param: FSDPParam) -> bool:
    if not isinstance(value, DTensor) or value.shape != param.dtensor.shape:
        return False
    # By elements: empty parts may have any shape.
    same = value.placements == param.dtensor.placements
    return same and local_tensor(value).numel() != param.sharded_view.numel()


def _is_full(optimizer: Optimizer, value: torch.Tensor, param: FSDPParam) -> bool:
    # Other optimizers may hold what they like: torch's hold a DTensor for each of a DTensor's states of its shape.
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    is_plain = not isinstance(value, DTensor) and value.dim() > 0
    return is_of_torch and is_plain and tuple(value.shape) == tuple(param.dtensor.shape) != param.sharded_size


def _as_dtensors(held: dict[str, Any], param: FSDPParam) -> dict[str, DTensor]:
    """State of a 0-d parameter as DTensors: torch loads it as plain tensors, which do not mix with its gradient."""
    plain = {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and not isinstance(v, DTensor)}
    return {
        key: make_dtensor(value.clone(), param.dtensor)
        for key, value in plain.items()
        if value.dim() == 0 and not is_number(key, value.shape)
    }
