"""FSDP1's older functions for optimizer state, with its meaning; `optim_state_dict` and its inverse do what they say.

Their results go to `optimizer.load_state_dict`, and to and from files, as with FSDP1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, ShardedOptimStateDictConfig
from torch.optim import Optimizer

from fsdp_compile.errors import ConfigError
from fsdp_compile.state.optim_names import GROUPS, PARAMS, STATE, OptimInput, kind_of_keys, named_groups
from fsdp_compile.state.optim_state import optim_state_dict, optim_state_dict_to_load, target_of, to_load


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput | None = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Full state on the host, by name; `{}` on other ranks than the first, unless `rank0_only=False`."""
    _warn("full_optim_state_dict", "optim_state_dict(model, optim, config=FullOptimStateDictConfig(...))", optim_input)
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return optim_state_dict(model, optim, group=group, config=config)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """State by name, as DTensors on the host."""
    _warn("sharded_optim_state_dict", "optim_state_dict(model, optim, config=ShardedOptimStateDictConfig())")
    return optim_state_dict(model, optim, group=group, config=ShardedOptimStateDictConfig())


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that every rank has; each keeps its part, without communication."""
    where = "shard_full_optim_state_dict()"
    _warn(where[:-2], "optim_state_dict_to_load(model, optim, state)", optim_input)
    return to_load(full_optim_state_dict, target_of(model, optim, where, None, optim_input=optim_input), optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """What an optimizer loads of sharded state."""
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load(model, optim, state)")
    return optim_state_dict_to_load(model, optim, sharded_optim_state_dict, config=ShardedOptimStateDictConfig())


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that the first rank alone has: each rank receives its part."""
    where = "scatter_full_optim_state_dict()"
    new = "optim_state_dict_to_load(model, optim, state, config=FullOptimStateDictConfig(rank0_only=True))"
    _warn(where[:-2], new, optim_input)
    config = FullOptimStateDictConfig(rank0_only=True)
    target = target_of(model, optim, where, config, group=group, optim_input=optim_input)
    return to_load(full_optim_state_dict, target, optim)


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """An optimizer's state with names in the place of numbers, or the other way round; for plain models, too.

    Args:
        optim_state_dict: Of an optimizer of all of the groups' parameters, in this order if it numbers them. Names that
            the optimizer does not have are left out when numbers take their place.
        optim_state_key_type: `torch.distributed.fsdp.OptimStateKeyType`; nothing is done if it is the type already.
        model: That has the parameters.
        optim_input: What the optimizer was made of, where there is no `optim`; without both, `model.parameters()`.
        optim: The optimizer.

    Returns:
        A dict of the same values; an optimizer of the same parameters loads one with numbers.

    Raises:
        ConfigError: For another type, a state dict that has both names and numbers or those of another optimizer, or
            names that the model does not have.
    """
    where = "rekey_optim_state_dict()"
    if optim_input is not None:
        _warn_input(stacklevel=3)
    if optim_state_key_type not in tuple(OptimStateKeyType):
        raise ConfigError(
            f"optim_state_key_type is {optim_state_key_type!r}",
            where=where,
            instead="torch.distributed.fsdp.OptimStateKeyType.PARAM_NAME or PARAM_ID",
        )
    given = kind_of_keys(optim_state_dict, where)
    if given in (None, optim_state_key_type):
        return dict(optim_state_dict)
    named = named_groups(model, where, optim, optim_input)
    state: dict[Any, Any] = optim_state_dict[STATE]
    groups = optim_state_dict.get(GROUPS)
    if given is OptimStateKeyType.PARAM_ID:
        sizes, expected = [len(group[PARAMS]) for group in groups or ()], [len(group) for group in named.groups]
        numbers = [key for key in state if isinstance(key, int)]
        if (groups is not None and sizes != expected) or any(number >= sum(expected) for number in numbers):
            raise ConfigError(
                f"groups of {sizes} parameters were saved, and the optimizer's are of {expected}",
                where=where,
                instead="the optimizer that it was saved from (optim=...), made of the same groups in the same order",
            )
        state = {named.name_of(key) or key: value for key, value in state.items()}
        regrouped = None if groups is None else named.renamed(groups)
    else:
        keys, first = named.numbers, named.first_names
        settings = [{} for _ in named.groups] if optim is None else optim.param_groups
        regrouped = None if groups is None else named.regrouped(groups, settings, keys, where)
        state = {
            keys.get(first.get(key, ""), key): value
            for key, value in state.items()
            if key not in first or first[key] in keys
        }
    return {**optim_state_dict, STATE: state, **({} if regrouped is None else {GROUPS: regrouped})}


def _warn(old: str, new: str, optim_input: OptimInput | None = None) -> None:
    warnings.warn(f"{old} is FSDP1's older name: {new} does the same", FutureWarning, stacklevel=3)
    if optim_input is not None:
        _warn_input(stacklevel=4)


def _warn_input(stacklevel: int) -> None:
    warnings.warn("optim_input is deprecated: give optim, the optimizer itself", FutureWarning, stacklevel)
