"""`step_in_backward`: an optimizer that updates each unit in backward, as soon as its gradients are reduced."""

from __future__ import annotations

import torch
from torch import optim

from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import rebuild_specs
from fsdp_compile.optim.flat_step import ELEMENTWISE, Chosen, flat_step, flat_step_of
from fsdp_compile.optim.group_values import difference, values_of
from fsdp_compile.runtime import update_in_backward
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.runtime.units import FSDPParamGroup

_WHERE = "step_in_backward(optimizer)"


def step_in_backward(optimizer: Chosen, *, elementwise: bool = False) -> Chosen:
    """Makes backward passes update sharded parameters, and free gradients unit by unit.

    Each backward that reduces gradients is a step: a compiled one updates a unit in the middle of its graph, right
    after its reduction. `optimizer.step()` is still called, for learning rate schedules and for parameters that are not
    sharded; sharded ones have no gradients then. Under `no_sync` nothing is updated. Settings are read from
    `optimizer.param_groups` when a unit is updated. State dicts are those of the optimizer without this call.

    Args:
        optimizer: As for `flat_step`. It is changed.
        elementwise: As for `flat_step`.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: As `flat_step`; or if another optimizer updates a parameter in backward. In backward, if the
            optimizer counts its steps in its groups.
    """
    flat_step(optimizer, elementwise=elementwise)
    parameters = [current(p) for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:  # all of them before the first is changed
        _refuse(optimizer, parameter)
    updater = _InBackward(optimizer)
    for parameter in parameters:
        update_in_backward.set_updater(parameter, updater)
    for unit in dict.fromkeys(
        f.unit for f in FSDPParamGroup.alive() if update_in_backward.wanted(f) is not f.params[0].spec.update
    ):
        rebuild_specs(unit)
    return optimizer


def _refuse(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
    other = update_in_backward.updater_of(parameter)
    if other is not None and not (isinstance(other, _InBackward) and other.optimizer is optimizer):
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is updated in backward by another optimizer",
            where=_WHERE,
            instead="change the settings of that one in its param_groups, or load a state dict into it",
        )


class _InBackward:
    """The updater of one optimizer's parameters, which own it."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def update(self, flat: FSDPParamGroup) -> None:
        """Steps the optimizer's parameters in a group, and clears their gradients.

        Raises:
            ConfigError: If the step counts in the optimizer's groups, which have other units, too.
        """
        groups = [] if type(self.optimizer) in ELEMENTWISE else self.optimizer.param_groups
        before = [values_of(group) for group in groups]
        for param in flat_step_of(self.optimizer).update(self.optimizer, flat):
            param.parameter.grad = None
        for group, values in zip(groups, before, strict=True):
            key = difference(values, values_of(group))
            if key is not None:
                raise ConfigError(
                    f"{type(self.optimizer).__name__} changes {key!r} of its groups in each step, and would in the "
                    "update of each unit",
                    where=_WHERE,
                    instead="flat_step(optimizer, elementwise=True), whose step updates all units at once",
                )
