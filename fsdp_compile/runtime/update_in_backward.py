"""Updates in backward: which optimizer asked for them, and when a parameter group may be updated.

A group is updated once per backward: when its gradient is complete, and nothing in this backward reads it any more. A
compiled graph reads its flat parameters for the last time before its `update`; so what has to be known of other
graphs is how many forwards have read a group whose backward has not run. If there are any, gradients stay in the
`.grad` of the flat parameter, for the last of these graphs or for the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.layout.spec import Update
from fsdp_compile.runtime import read_order

if TYPE_CHECKING:
    from fsdp_compile.runtime.units import FSDPParamGroup

_UPDATER = "_fsdp_updater"
"""Attribute of a parameter that an optimizer updates in backward; sharding copies it, as all attributes."""
_INSTEAD = (
    "add the losses and call backward once, accumulate all backwards but the last under no_sync(), or leave "
    "step_in_backward() out and call optimizer.step()"
)
WITHOUT_SCALER = (
    "bfloat16, which needs no scaling; or flat_step(optimizer) in place of step_in_backward(optimizer), and "
    "scaler.step(optimizer) after backward"
)
"""What to write instead of scaling losses."""


class Updater(Protocol):
    """An optimizer that updates parameters in backward."""

    def update(self, group: FSDPParamGroup) -> None:
        """Steps those parameters of a group that have gradients and are its own, and clears these gradients."""
        ...


def set_updater(parameter: torch.Tensor, updater: Updater) -> None:
    """Registers the updater of a parameter, sharded or not yet."""
    setattr(parameter, _UPDATER, updater)


def updater_of(parameter: torch.Tensor) -> Updater | None:
    """The updater of a parameter."""
    return getattr(parameter, _UPDATER, None)


def move_updater(old: nn.Parameter, new: nn.Parameter) -> None:
    """Registers the updater of `old` for `new`."""
    if _UPDATER in vars(old):
        setattr(new, _UPDATER, vars(old)[_UPDATER])


def wanted(group: FSDPParamGroup) -> Update:
    """When the parameters of a group are to be updated: in backward if any of them is."""
    marked = group.flat_param.requires_grad and any(updater_of(param.parameter) is not None for param in group.params)
    return Update.IN_BACKWARD if marked else Update.AFTER_BACKWARD


def begin(group: FSDPParamGroup) -> None:
    """Marks the start of a forward: gradients from now on belong to another step."""
    group.update_state.is_updated = False


def note_new_grads(group: FSDPParamGroup) -> None:
    """Records that parameters of a group got gradients."""
    group.update_state.has_new_grads = group.update_state.update is Update.IN_BACKWARD


def note_late_grads(group: FSDPParamGroup) -> None:
    """Records whether graphs from before its parameters were sharded may still send them gradients."""
    group.update_state.expects_late_grad |= any(param.is_read_before for param in group.params)


def end_backward(group: FSDPParamGroup) -> None:
    """Runs the updates that are left at the end of the last backward of a step."""
    # Autograd is done: no late gradient can follow.
    group.update_state.expects_late_grad = False
    run(group)


def choose_update(group: FSDPParamGroup) -> Update:
    """Sets when the parameters of a group are to be updated from now on."""
    group.update_state.update = wanted(group)
    return group.update_state.update


def reset(group: FSDPParamGroup) -> None:
    """Forgets forwards without a backward, and gradients without an update."""
    group.update_state.open_forwards, group.update_state.has_new_grads = 0, False


def note_read(group: FSDPParamGroup) -> None:
    """Counts a forward that reads a group, or refuses its recomputation in backward after the update.

    Raises:
        UnsupportedModelError: If this backward has updated the group already.
    """
    if backward_in_progress() == -1:
        group.update_state.open_forwards += 1
    elif group.update_state.is_updated:
        raise UnsupportedModelError(
            "a forward that runs again in backward reads parameters which this backward has updated already",
            where=f"step_in_backward(), unit {group.unit.title}",
            instead="checkpoint(..., use_reentrant=False) around modules that are called more than once",
        )


def note_backward(group: FSDPParamGroup) -> None:
    """Counts a backward that reads a group, and is about to run."""
    group.update_state.open_forwards = max(0, group.update_state.open_forwards - 1)


def is_complete(group: FSDPParamGroup) -> bool:
    """Whether no gradient of this step is missing for a group."""
    waits = any(group.grads.pending.values()) or group.update_state.expects_late_grad
    return group.unit.comm_settings.last_backward and not waits


def refuse_second(group: FSDPParamGroup) -> None:
    """Raises `UnsupportedModelError` for a gradient of a forward that ran before the update."""
    if group.update_state.is_updated:
        raise UnsupportedModelError(
            "a gradient arrives after the parameters that it belongs to were updated",
            where=f"step_in_backward(), unit {group.unit.title}",
            instead=_INSTEAD,
        )


def refuse_whole_gradients(parameters: Iterable[torch.Tensor], *, where: str, instead: str) -> None:
    """Raises `ConfigError` if an optimizer updates one of some parameters in backward, which leaves no gradients.

    Args:
        parameters: The parameters.
        where: The call that works on all their gradients at once.
        instead: A call that does the same with updates in backward.
    """
    if any(updater_of(parameter) is not None for parameter in parameters):
        raise ConfigError(
            "step_in_backward() updates parameters unit by unit: their gradients are never all there",
            where=where,
            instead=instead,
        )


def run(group: FSDPParamGroup) -> None:
    """Updates the parameters of a group that got gradients since the last update."""
    if not group.update_state.has_new_grads:
        return
    group.update_state.has_new_grads = False
    if _updaters(group):
        read_order.compare(in_backward=backward_in_progress() != -1)  # before numbers change
    updaters = _updaters(group)  # some gradients may have been dropped
    for updater in updaters:
        updater.update(group)
    if updaters:
        group.update_state.open_forwards, group.update_state.is_updated = 0, True
        # So that autograd refuses a backward through a graph that has saved it: foreach kernels do not count.
        torch.autograd.graph.increment_version(group.flat_param)


def _updaters(group: FSDPParamGroup) -> list[Updater]:
    """The updaters of those parameters of a group that have gradients."""
    trained = [param.parameter for param in group.params if param.parameter.grad is not None]
    return list(dict.fromkeys(updater for p in trained if (updater := updater_of(p)) is not None))
