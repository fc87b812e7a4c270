"""Where a step became infinite or not a number: the first unit that backward gave such a gradient, by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.fully_shard import groups_of, modules_of, params_of, state_of
from fsdp_compile._torch.fully_shard_params import sharded_param
from fsdp_compile.training.world import World


def describe_nonfinite(model: nn.Module, loss: Tensor, world: World) -> str:
    """One sentence on the losses and gradients of a step that are not finite; every rank calls this and gets the same.

    Gradients are averages over ranks by now, so that a rank with such a loss may not be one with such a gradient.

    Args:
        model: Sharded; has the gradients.
        loss: That of this rank.
        world: This rank.
    """
    unit_of = _units(model)
    # Backward reaches what is registered last first, and takes what is not finite on from there.
    parameters = list(model.named_parameters())[::-1]
    broken = [number for number, (_, each) in enumerate(parameters) if not _is_finite(each.grad)]
    found = world.gather((loss.item(), broken[:1]))
    parts = [f"the loss of rank {rank} is {value}" for rank, (value, _) in enumerate(found) if not math.isfinite(value)]
    numbers = [number for _, first in found for number in first]
    if numbers:
        name, parameter = parameters[min(numbers)]
        ranks = ", ".join(str(rank) for rank, (_, first) in enumerate(found) if first == [min(numbers)])
        unit = unit_of.get(id(parameter), "(none)")
        parts.append(f"the first gradient that is not finite is that of unit {unit}, {name}, in rows of rank {ranks}")
    else:
        parts.append("all gradients are finite, but not their norm" if not parts else "all gradients are finite")
    return "; ".join(parts)


def _units(model: nn.Module) -> dict[int, str]:
    """By `id` of each sharded parameter, the names of the modules that its unit was made of."""
    paths = {module: path for path, module in model.named_modules()}
    states = dict.fromkeys(state for module in paths if (state := state_of(module)) is not None)
    return {
        id(sharded_param(param)): "+".join(paths[module] for module in modules_of(state)) or "(root)"
        for state in states
        for group in groups_of(state)
        for param in params_of(group)
    }


def _is_finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(torch.isfinite(local).all())
