"""Updates in backward: whose optimizer asked for them, and when a parameter group may be updated.

A parameter group is updated once per backward: when its gradient is complete, and nothing in this backward reads it any
more. A compiled graph reads its flat parameters for the last time before it offers their gradients; so what has to be
known of other graphs is how many forwards have read a parameter group whose backward has not run. If there are any,
gradients wait in the leaf, for the last of these graphs or for the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.layout.spec import Update

if TYPE_CHECKING:
    from fsdp_compile.runtime.units import FSDPParamGroup

_UPDATER = "_fsdp_updater"
"""Attribute of a parameter that an optimizer updates in backward; it survives sharding, as all attributes do."""
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
    """Who updates parameters in backward."""

    def update(self, group: FSDPParamGroup) -> None:
        """Steps the parameters of a group that have gradients and are its own, and forgets these gradients."""
        ...


def set_updater(parameter: torch.Tensor, updater: Updater) -> None:
    """Notes that `updater` updates a parameter, sharded or not yet, in backward."""
    setattr(parameter, _UPDATER, updater)


def updater_of(parameter: torch.Tensor) -> Updater | None:
    """Who updates a parameter in backward."""
    return getattr(parameter, _UPDATER, None)


def move_updater(old: nn.Parameter, new: nn.Parameter) -> None:
    """Gives `new` the updater of `old`."""
    if _UPDATER in vars(old):
        setattr(new, _UPDATER, vars(old)[_UPDATER])


def wanted(group: FSDPParamGroup) -> Update:
    """When the parameters of a parameter group are to be updated: in backward if any of them is."""
    marked = group.flat_param.requires_grad and any(updater_of(param.parameter) is not None for param in group.params)
    return Update.IN_BACKWARD if marked else Update.AFTER_BACKWARD


def begin(group: FSDPParamGroup) -> None:
    """Notes that a forward starts: gradients that come from now on are of another step."""
    group.update_state.is_updated = False


def note_new_grads(group: FSDPParamGroup) -> None:
    """Notes that parameters of a group got gradients."""
    group.update_state.has_new_grads = group.update_state.update is Update.IN_BACKWARD


def note_late_grads(group: FSDPParamGroup) -> None:
    """Notes whether graphs from before its parameters were sharded may still send them gradients."""
    group.update_state.expects_late_grad |= any(param.is_read_before for param in group.params)


def end_backward(group: FSDPParamGroup) -> None:
    """Updates what is left at the end of the last backward of a step: no late gradient can come any more."""
    group.update_state.expects_late_grad = False
    run(group)


def choose_update(group: FSDPParamGroup) -> Update:
    """When the parameters of a group are to be updated, from now on."""
    group.update_state.update = wanted(group)
    return group.update_state.update


def reset(group: FSDPParamGroup) -> None:
    """Forgets forwards without a backward, and gradients that no update has seen."""
    group.update_state.open_forwards, group.update_state.has_new_grads = 0, False


def note_read(group: FSDPParamGroup) -> None:
    """Counts a forward that will read a parameter group, or its copy that backward runs again, which reads the same.

    Raises:
        UnsupportedModelError: If this backward has updated the parameter group already.
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
    """Counts a backward that reads a parameter group, and is about to run."""
    group.update_state.open_forwards = max(0, group.update_state.open_forwards - 1)


def is_complete(group: FSDPParamGroup) -> bool:
    """Whether the gradient that is there now is the last that this step adds to a parameter group."""
    waits = any(group.grads.pending.values()) or group.update_state.expects_late_grad
    return group.unit.comm_settings.last_backward and not waits


def refuse_second(group: FSDPParamGroup) -> None:
    """Refuses a gradient of a forward that ran before the update.

    Raises:
        UnsupportedModelError: If a parameter group was updated, and no forward ran since.
    """
    if group.update_state.is_updated:
        raise UnsupportedModelError(
            "a gradient arrives after the parameters that it belongs to were updated",
            where=f"step_in_backward(), unit {group.unit.title}",
            instead=_INSTEAD,
        )


def refuse_whole_gradients(parameters: Iterable[torch.Tensor], *, where: str, instead: str) -> None:
    """Refuses to work on the gradients of all parameters at once: updates in backward leave none.

    Args:
        parameters: Those concerned.
        where: The call that works on their gradients.
        instead: What does the same.

    Raises:
        ConfigError: If an optimizer updates one of them in backward.
    """
    if any(updater_of(parameter) is not None for parameter in parameters):
        raise ConfigError(
            "step_in_backward() updates parameters unit by unit: their gradients are never all there",
            where=where,
            instead=instead,
        )


def run(group: FSDPParamGroup) -> None:
    """Updates the parameters of a parameter group that were given gradients since the last time."""
    if not group.update_state.has_new_grads:
        return
    group.update_state.has_new_grads = False
    trained = [param.parameter for param in group.params if param.parameter.grad is not None]
    updaters = dict.fromkeys(updater for p in trained if (updater := updater_of(p)) is not None)
    for updater in updaters:
        updater.update(group)
    if updaters:
        group.update_state.open_forwards, group.update_state.is_updated = 0, True
        # Autograd refuses a backward through a graph that has saved it, whatever the optimizer told the counter.
        torch.autograd.graph.increment_version(group.flat_param)
