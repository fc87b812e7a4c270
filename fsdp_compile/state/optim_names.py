"""Names for what an optimizer numbers: its parameters in state dicts, by their names in a model, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.optim import Optimizer

from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.module_state import unwrap
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.state.full_tensors import plain_name

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NAMES = "param_names"
"""What torch keeps beside the parameters of a group that were given with names; no setting of it."""
Keys = OptimStateKeyType
_REKEY = (
    "fsdp_compile.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain_model, optim=its_optimizer), with "
    "the optimizer that it was saved from"
)


@dataclasses.dataclass(frozen=True)
class NamedGroups:
    """The parameter groups of an optimizer, by the names of their parameters in a model.

    Attributes:
        groups: The names of each group's parameters, in the optimizer's order: a state dict numbers them so, through
            all groups. A parameter with several names has the first one in the model's order.
        parameters: The parameters of these names.
        first_names: Of every parameter of the model, by each of its names.
    """

    groups: tuple[tuple[str, ...], ...]
    parameters: Mapping[str, torch.Tensor]
    first_names: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """The names of all groups: a parameter's place is its number in state dicts."""
        return [name for group in self.groups for name in group]

    def name_of(self, key: object) -> str | None:
        """The name of the parameter that a key of a state dict stands for; `None` for a key of the user's own."""
        if isinstance(key, int):
            names = self.names
            return names[key] if key < len(names) else None
        return self.first_names.get(key) if isinstance(key, str) else None

    def keys(self, kind: Keys) -> dict[str, int | str]:
        """What state dicts call the parameters, by name."""
        return {name: number if kind is Keys.PARAM_ID else name for number, name in enumerate(self.names)}


def groups_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """The parameters of an optimizer's groups."""
    return [[current(parameter) for parameter in group[PARAMS]] for group in optimizer.param_groups]


def name_groups(model: nn.Module, groups: Sequence[Sequence[torch.Tensor]], where: str) -> NamedGroups:
    """Names the parameters of an optimizer.

    Raises:
        ConfigError: If the model does not have one of them.
    """
    module = unwrap(model)
    assert isinstance(module, nn.Module)
    first_name: dict[torch.Tensor, str] = {}
    first_names: dict[str, str] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        first_names[plain_name(name)] = first_name.setdefault(parameter, plain_name(name))
    for number, group in enumerate(groups):
        for tensor in group:
            if tensor not in first_name:
                raise ConfigError(
                    f"the optimizer's group {number} has a parameter of shape {tuple(tensor.shape)} that the model "
                    "does not have",
                    where=where,
                    instead="the whole model, and an optimizer of parameters that it has now",
                )
    named = tuple(tuple(first_name[tensor] for tensor in group) for group in groups)
    parameters = {first_name[tensor]: tensor for group in groups for tensor in group}
    return NamedGroups(named, parameters, first_names)


def require_state(state_dict: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` for what is no state dict of an optimizer."""
    if STATE not in state_dict:
        raise ConfigError(
            f"the state dict has no {STATE!r}, but {sorted(map(str, state_dict)) or 'nothing'}",
            where=where,
            instead="what optim_state_dict() or optimizer.state_dict() gave; where the first rank alone has it, "
            "config=FullOptimStateDictConfig(rank0_only=True) on all ranks",
        )


def kind_of_keys(state_dict: Mapping[str, Any], where: str) -> Keys | None:
    """Whether a state dict calls parameters by name or by number; `None` if it has neither.

    Raises:
        ConfigError: If it has no state, or does both.
    """
    require_state(state_dict, where)
    in_groups = [key for group in state_dict.get(GROUPS, ()) for key in group[PARAMS]]
    kinds = {type(key) for key in in_groups or state_dict[STATE]}
    if len(kinds) > 1 or kinds - {int, str}:
        raise ConfigError(
            f"parameters have keys of types {sorted(kind.__name__ for kind in kinds)}",
            where=where,
            instead="names for all of them, or numbers for all of them",
        )
    return Keys.PARAM_ID if int in kinds else Keys.PARAM_NAME if kinds else None


def refuse_numbers(state_dict: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` if a state dict numbers parameters, or has no state at all."""
    if kind_of_keys(state_dict, where) is Keys.PARAM_ID:
        raise ConfigError("the state dict numbers parameters and does not name them", where=where, instead=_REKEY)


def unknown_names(state_dict: Mapping[str, Any], named: NamedGroups) -> list[str]:
    """Names of parameters in the groups of a state dict that the model does not have."""
    given = (name for group in state_dict.get(GROUPS, ()) for name in group[PARAMS])
    return [name for name in given if name not in named.first_names]


def with_names(groups: Iterable[Mapping[str, Any]], named: NamedGroups) -> list[dict[str, Any]]:
    """Copies of the groups of an optimizer's own state dict, with names in the place of numbers."""
    copies = [copy.deepcopy(dict(group)) for group in groups]
    for group in copies:
        group[PARAMS] = [named.name_of(key) for key in group[PARAMS]]
    return copies


def regrouped(
    saved: Sequence[Mapping[str, Any]],
    named: NamedGroups,
    settings: Sequence[Mapping[str, Any]],
    keys: Mapping[str, int | str],
    where: str,
) -> list[dict[str, Any]]:
    """The groups that an optimizer can load: its own parameters in its order, each group with its saved settings.

    Optimizers match saved parameters by their place, whatever their keys are, so the groups that were saved may stand
    in another order, or have others' parameters, too.

    Args:
        saved: Groups with names.
        named: Of the optimizer.
        settings: Its groups now, which stay as they are where none of a group's parameters was saved.
        keys: What the result calls parameters.
        where: In errors.

    Raises:
        ConfigError: If parameters of one group were saved with different settings.
    """
    found = {named.first_names.get(name, name): group for group in saved for name in group[PARAMS]}
    empty = [group for group in saved if not group[PARAMS]]
    result = []
    for number, names in enumerate(named.groups):
        sources = {id(found[name]): found[name] for name in names if name in found}
        if not names and len(empty) == 1:
            sources = {id(empty[0]): empty[0]}
        given = [_settings(group) for group in sources.values()]
        if any(_exactly(one) != _exactly(given[0]) for one in given):
            raise ConfigError(
                f"the parameters of group {number} were saved in several groups, whose settings differ",
                where=where,
                instead="an optimizer with the groups that were saved, or one group whose settings are set afterwards",
            )
        chosen = given[0] if given else _settings(settings[number])
        own = {_NAMES: list(settings[number][_NAMES])} if _NAMES in settings[number] else {}
        result.append({**chosen, **own, PARAMS: [keys[name] for name in names]})
    return result


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in (PARAMS, _NAMES)}


def _exactly(settings: Mapping[str, Any]) -> str:
    """Settings as a text that differs where they do: tensors print some of their digits."""
    items = settings.items()
    return repr({key: (v.dtype, v.tolist()) if isinstance(v, torch.Tensor) else v for key, v in items})
