"""Names for what an optimizer numbers, its parameters in state dicts: `rekey_optim_state_dict` gives and takes them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import plain_name, unwrap

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NAMES = "param_names"
"""What torch keeps with the parameters of a group that were given with names; no setting of it."""
OptimInput = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
"""What an optimizer was made of: parameters, or groups of them."""


@dataclasses.dataclass(frozen=True)
class NamedGroups:
    """The parameter groups of an optimizer, by the names of their parameters in a model.

    Attributes:
        groups: The names of each group's parameters, in the optimizer's order: a state dict numbers them so, through
            all groups. A parameter with several names has the first one in the model's order.
        parameters: The parameters of these names, in the model's order.
        first_names: Of every parameter of the model, by each of its names, in the model's order.
    """

    groups: tuple[tuple[str, ...], ...]
    parameters: Mapping[str, torch.Tensor]
    first_names: Mapping[str, str]

    @property
    def numbers(self) -> dict[str, int]:
        """What state dicts call the parameters, by name."""
        return {name: number for number, name in enumerate(name for group in self.groups for name in group)}

    @functools.cached_property
    def names(self) -> dict[Any, str]:
        """The name of the parameter that a key of a state dict stands for, a number or a name."""
        return {**self.first_names, **{number: name for name, number in self.numbers.items()}}

    def renamed(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the groups of an optimizer's own state dict, with names in the place of numbers."""
        copies = [copy.deepcopy(dict(group)) for group in groups]
        for group in copies:
            group[PARAMS] = [self.names.get(key, key) for key in group[PARAMS]]
        return copies

    def regrouped(
        self,
        saved: Sequence[Mapping[str, Any]],
        settings: Sequence[Mapping[str, Any]],
        keys: Mapping[str, int | str],
        where: str,
    ) -> list[dict[str, Any]]:
        """The groups that an optimizer can load: its own parameters in its order, each group with its saved settings.

        Args:
            saved: Groups with names, in any order, and with parameters of others.
            settings: The optimizer's groups now; they stay as they are where none of a group's parameters was saved.
            keys: What the result calls parameters.
            where: In errors.

        Raises:
            ConfigError: If parameters of one group were saved with different settings, or the model has no such ones.
        """
        unknown = [name for group in saved for name in group[PARAMS] if name not in self.first_names]
        if unknown:
            raise ConfigError(f"the model does not have {', '.join(map(str, unknown))}", where=where)
        found = {self.first_names[name]: group for group in saved for name in group[PARAMS]}
        result = []
        for number, names in enumerate(self.groups):
            sources = [_settings(found[name]) for name in names if name in found] or [_settings(settings[number])]
            if any(_exactly(one) != _exactly(sources[0]) for one in sources):
                raise ConfigError(
                    f"the parameters of group {number} were saved in several groups, whose settings differ",
                    where=where,
                    instead="an optimizer with the groups that were saved, or one group whose settings are set later",
                )
            own = {_NAMES: list(settings[number][_NAMES])} if _NAMES in settings[number] else {}
            result.append({**sources[0], **own, PARAMS: [keys[name] for name in names]})
        return result


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
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
        warn_of_input(stacklevel=3)
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
        state = {named.names.get(key, key): value for key, value in state.items()}
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


def warn_of_input(stacklevel: int) -> None:
    """Warns who gives `optim_input`; `stacklevel` is that of `warnings.warn`."""
    warnings.warn("optim_input is deprecated: give optim, the optimizer itself", FutureWarning, stacklevel)


def named_groups(
    model: nn.Module, where: str, optim: torch.optim.Optimizer | None, optim_input: OptimInput | None = None
) -> NamedGroups:
    """Names the parameters of an optimizer, or of what one was made of; without both, all of the model's.

    Raises:
        ConfigError: If the model does not have one of them.
    """
    first_name: dict[torch.Tensor, str] = {}
    first_names: dict[str, str] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        first_names[plain_name(name)] = first_name.setdefault(parameter, plain_name(name))
    groups = _groups(list(first_name), optim, optim_input)
    for number, group in enumerate(groups):
        for tensor in group:
            if tensor not in first_name:
                raise ConfigError(
                    f"the optimizer's group {number} has a parameter of shape {tuple(tensor.shape)} that the model "
                    "does not have",
                    where=where,
                    instead="the whole model, and an optimizer of parameters that it has now",
                )
    used = {tensor for group in groups for tensor in group}
    parameters = {name: tensor for tensor, name in first_name.items() if tensor in used}
    return NamedGroups(tuple(tuple(first_name[t] for t in group) for group in groups), parameters, first_names)


def _groups(
    every: list[torch.Tensor], optim: torch.optim.Optimizer | None, optim_input: OptimInput | None
) -> list[list[torch.Tensor]]:
    if optim is not None:
        return [list(group[PARAMS]) for group in optim.param_groups]
    if optim_input is None:
        return [every]
    given: list[Any] = list(optim_input)
    if all(isinstance(each, torch.Tensor) for each in given):
        return [given]
    if all(isinstance(each, Mapping) and PARAMS in each for each in given):
        return [list(each[PARAMS]) for each in given]
    raise ConfigError(
        f"optim_input has {sorted({type(each).__name__ for each in given})}",
        where="optim_input",
        instead="optim=, the optimizer itself",
    )


def require_state(state_dict: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` for what is no state dict of an optimizer."""
    if STATE not in state_dict:
        raise ConfigError(
            f"the state dict has no {STATE!r}, but {sorted(map(str, state_dict)) or 'nothing'}",
            where=where,
            instead="a state dict of optim_state_dict() or optimizer.state_dict(); if only the first rank has it, "
            "config=FullOptimStateDictConfig(rank0_only=True) on all ranks",
        )


def kind_of_keys(state_dict: Mapping[str, Any], where: str) -> OptimStateKeyType | None:
    """Whether a state dict calls parameters by name or by number; `None` if it has neither.

    Raises:
        ConfigError: If it is no state dict of an optimizer, or does both.
    """
    require_state(state_dict, where)
    in_groups = {type(key) for group in state_dict.get(GROUPS, ()) for key in group[PARAMS]}
    kinds = in_groups or {type(key) for key in state_dict[STATE]}
    if len(kinds) > 1:
        raise ConfigError(f"the state dict has keys of types {sorted(kind.__name__ for kind in kinds)}", where=where)
    return OptimStateKeyType.PARAM_ID if int in kinds else OptimStateKeyType.PARAM_NAME if kinds else None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in (PARAMS, _NAMES)}


def _exactly(settings: Mapping[str, Any]) -> str:
    """Settings as a text that differs where they do: tensors print some of their digits."""
    items = settings.items()
    return repr({key: (v.dtype, v.tolist()) if isinstance(v, torch.Tensor) else v for key, v in items})
