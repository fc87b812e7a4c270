"""FSDP1's older functions for optimizer state, with its meaning; `optim_state_dict` and its inverse do what they say.

Their results go to `optimizer.load_state_dict`, and to and from files, as with FSDP1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, ShardedOptimStateDictConfig
from torch.optim import Optimizer

from fsdp_compile.comm.gather import Receivers
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime import loaded_state
from fsdp_compile.runtime.module_state import stored_parameters, unwrap
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.state import optim_names
from fsdp_compile.state.optim_form import between_steps, form_of
from fsdp_compile.state.optim_names import GROUPS, PARAMS, STATE, Keys
from fsdp_compile.state.optim_state import optim_state_dict, optim_state_dict_to_load
from fsdp_compile.state.optim_to_load import Target, to_load

OptimInput = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
"""What an optimizer was made of: parameters, or groups of them."""


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput | None = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Full state on the host, by name; `{}` on other ranks than the first, unless `rank0_only=False`.

    Raises:
        ConfigError: As `optim_state_dict`.
    """
    _warn("full_optim_state_dict", "optim_state_dict(model, optim, config=FullOptimStateDictConfig(...))", optim_input)
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return optim_state_dict(model, optim, group=group, config=config)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """State by name, as DTensors on the host.

    Raises:
        ConfigError: As `optim_state_dict`.
    """
    _warn("sharded_optim_state_dict", "optim_state_dict(model, optim, config=ShardedOptimStateDictConfig())")
    return optim_state_dict(model, optim, group=group, config=ShardedOptimStateDictConfig())


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that every rank has; each keeps its part, without communication.

    Raises:
        ConfigError: As `optim_state_dict_to_load`.
    """
    where = "shard_full_optim_state_dict()"
    _warn(where[:-2], "optim_state_dict_to_load(model, optim, state)", optim_input)
    return _to_load(full_optim_state_dict, model, optim_input, optim, None, Receivers.ALL, where)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """What an optimizer loads of sharded state.

    Raises:
        ConfigError: As `optim_state_dict_to_load`.
    """
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load(model, optim, state)")
    return optim_state_dict_to_load(model, optim, sharded_optim_state_dict, config=ShardedOptimStateDictConfig())


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What an optimizer loads of full state that the first rank alone has: each rank receives its part.

    Raises:
        ConfigError: As `optim_state_dict_to_load`.
    """
    where = "scatter_full_optim_state_dict()"
    new = "optim_state_dict_to_load(model, optim, state, config=FullOptimStateDictConfig(rank0_only=True))"
    _warn(where[:-2], new, optim_input)
    return _to_load(full_optim_state_dict, model, optim_input, optim, group, Receivers.FIRST, where)


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
    _warn_input(optim_input)
    if optim_state_key_type not in tuple(Keys):
        raise ConfigError(
            f"optim_state_key_type is {optim_state_key_type!r}",
            where=where,
            instead="torch.distributed.fsdp.OptimStateKeyType.PARAM_NAME or PARAM_ID",
        )
    given = optim_names.kind_of_keys(optim_state_dict, where)
    if given in (None, optim_state_key_type):
        return dict(optim_state_dict)
    named = optim_names.name_groups(model, _groups(model, optim_input, optim), where)
    if given is Keys.PARAM_ID:
        return _with_names(optim_state_dict, named, where)
    unknown = optim_names.unknown_names(optim_state_dict, named)
    if unknown:
        raise ConfigError(
            f"the model does not have {', '.join(unknown)}", where=where, instead="the model that it was saved from"
        )
    keys = named.keys(Keys.PARAM_ID)
    first = named.first_names
    state = {
        keys.get(first.get(key, ""), key): value
        for key, value in optim_state_dict[STATE].items()
        if key not in first or first[key] in keys
    }
    groups = optim_state_dict.get(GROUPS)
    settings = [{} for _ in named.groups] if optim is None else optim.param_groups
    regrouped = {} if groups is None else {GROUPS: optim_names.regrouped(groups, named, settings, keys, where)}
    return {**optim_state_dict, STATE: state, **regrouped}


def _with_names(numbered: Mapping[str, Any], named: optim_names.NamedGroups, where: str) -> dict[str, Any]:
    sizes = [len(group[PARAMS]) for group in numbered.get(GROUPS, ())]
    expected = [len(group) for group in named.groups]
    numbers = [key for key in numbered[STATE] if isinstance(key, int)]
    if (GROUPS in numbered and sizes != expected) or any(number >= len(named.names) for number in numbers):
        raise ConfigError(
            f"groups of {sizes} parameters were saved, and the optimizer's are of {expected}",
            where=where,
            instead="the optimizer that it was saved from (optim=...), made of the same groups in the same order",
        )
    state = {named.name_of(key) or key: value for key, value in numbered[STATE].items()}
    groups = {GROUPS: optim_names.with_names(numbered[GROUPS], named)} if GROUPS in numbered else {}
    return {**numbered, STATE: state, **groups}


def _to_load(
    state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput | None,
    optim: Optimizer | None,
    group: dist.ProcessGroup | None,
    holders: Receivers,
    where: str,
) -> dict[str, Any]:
    form = form_of(FullOptimStateDictConfig(rank0_only=holders is Receivers.FIRST), where)
    sharded = between_steps(model, form, group, where)
    if optim is not None:
        loaded_state.update_optimizer(optim)
    named = optim_names.name_groups(sharded.module, _groups(model, optim_input, optim), where)
    return to_load(state_dict, sharded, Target(named, Keys.PARAM_ID, optim, where), holders)


def _groups(
    model: nn.Module, optim_input: OptimInput | None, optim: Optimizer | None
) -> Sequence[Sequence[torch.Tensor]]:
    """The parameters of an optimizer's groups, as FSDP1 finds them."""
    if optim is not None:
        return optim_names.groups_of(optim)
    if optim_input is None:
        module = unwrap(model)
        assert isinstance(module, nn.Module)
        return [list(stored_parameters(module))]
    given = list(optim_input)
    if all(isinstance(each, torch.Tensor) for each in given):
        return [[current(each) for each in given]]  # type: ignore[arg-type]
    if all(isinstance(each, Mapping) and PARAMS in each for each in given):
        return [[current(parameter) for parameter in each[PARAMS]] for each in given]  # type: ignore[index]
    raise ConfigError(
        f"optim_input has {sorted({type(each).__name__ for each in given})}",
        where="optim_input",
        instead="optim=, the optimizer itself",
    )


def _warn(old: str, new: str, optim_input: OptimInput | None = None) -> None:
    warnings.warn(f"{old} is FSDP1's older name: {new} does the same", FutureWarning, stacklevel=3)
    _warn_input(optim_input, stacklevel=4)


def _warn_input(optim_input: OptimInput | None, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn("optim_input is deprecated: give optim, the optimizer itself", FutureWarning, stacklevel)
