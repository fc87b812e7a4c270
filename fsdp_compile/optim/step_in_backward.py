"""`step_in_backward`: an optimizer that updates each unit in backward, as soon as its gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn, optim

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.module_class import refresh_reads
from fsdp_compile.fsdp2.take_over import models
from fsdp_compile.fsdp2.updates import update_by, updater_of
from fsdp_compile.optim.flat_step import Chosen, require_elementwise

_WHERE = "step_in_backward(optimizer)"


def step_in_backward(optimizer: Chosen, *, elementwise: bool = False) -> Chosen:
    """Makes backward passes update sharded parameters, and free gradients unit by unit.

    Each backward that reduces gradients is a step: a compiled one updates a unit in the middle of its graph, right
    after its reduction. `optimizer.step()` is still called, for learning rate schedules and for parameters that have
    gradients then. Under `set_requires_gradient_sync(False)` nothing is updated. Settings are read from
    `optimizer.param_groups` when a unit is updated. State dicts are those of the optimizer without this call.

    Args:
        optimizer: One of torch's elementwise optimizers, of a sharded model.
        elementwise: Asserts of any other optimizer that its update of an element depends on the value, the gradient and
            the state of that element alone.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to be elementwise; or if another one updates a parameter in
            backward. In backward, if the optimizer counts its steps in its groups.
    """
    if not elementwise:
        require_elementwise(optimizer, where=_WHERE)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:  # all of them before the first is changed
        _refuse(optimizer, parameter)
    updater = InBackward(optimizer)
    for parameter in parameters:
        if updater_of(parameter) is None and (parameter.requires_grad or parameter.is_floating_point()):
            update_by(parameter, updater)
    for group in (group for model in models() for group in model.groups):
        if any(param.parameter in updater.numbers() for param in group.params):
            group.refresh_specs()
            refresh_reads(group)
    return optimizer


def _refuse(optimizer: optim.Optimizer, parameter: nn.Parameter) -> None:
    other = updater_of(parameter)
    if other is not None and not (isinstance(other, InBackward) and other.optimizer is optimizer):
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is updated in backward by another optimizer",
            where=_WHERE,
            instead="change the settings of that one in its param_groups, or load a state dict into it",
        )
    if not parameter.is_leaf:
        raise ConfigError(
            f"a tensor of shape {tuple(parameter.shape)} has no gradient of its own",
            where=_WHERE,
            instead="parameters of the model",
        )


class InBackward:
    """The updater of one optimizer's parameters."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._step = optimizer.step

    def numbers(self) -> dict[nn.Parameter, int]:
        """The number of each parameter's group."""
        groups = enumerate(self.optimizer.param_groups)
        return {parameter: number for number, group in groups for parameter in group["params"]}

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Steps some parameters, and clears their gradients.

        Raises:
            ConfigError: If the step counts in the optimizer's groups, which have other units, too.
        """
        groups, numbers = self.optimizer.param_groups, self.numbers()
        given = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = [p for p in parameters if numbers.get(p) == number]
        before = [_settings(group) for group in groups]
        try:
            self._step()
        finally:
            after = [_settings(group) for group in groups]
            for group, its in zip(groups, given, strict=True):
                group["params"] = its
        for parameter in parameters:
            parameter.grad = None
        changed = [k for old, new in zip(before, after, strict=True) for k in new if old.get(k) != new[k]]
        if changed:
            raise ConfigError(
                f"{type(self.optimizer).__name__} changes {changed[0]!r} of its groups in each step, and would in the "
                "update of each unit",
                where=_WHERE,
                instead="optimizer.step() after backward, which updates all units at once",
            )


def _settings(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}
