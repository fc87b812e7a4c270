"""Updates in backward: which optimizer asked for them, and when the parameters of a group may be updated.

    compiled      the graph has an `update`, right after its last read of a group, which returns no gradient
    otherwise     a hook on each parameter, as PyTorch's own recipe: it runs when `.grad` is there

A group is updated once per backward: when its gradient is complete, and nothing in this backward reads it any more.
What has to be known of that is how many forwards have read a group whose backward has not run. If there are any,
gradients stay in `.grad`, for the last of these backwards, or for the end of this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.layout.spec import Update

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.param_group import Param, ParamGroup


Updater = Callable[[Sequence[nn.Parameter]], object]
"""What steps some parameters of an optimizer in backward, which have gradients, and clears these."""


class UpdateHook:
    """The hook that updates one parameter when its gradient is there.

    Attributes:
        updater: What updates it.
        group: The group of the parameter, if its model was taken over.
    """

    def __init__(self, updater: Updater) -> None:
        self.updater = updater
        self.group: weakref.ref[ParamGroup] | None = None

    @torch.compiler.disable
    def __call__(self, parameter: nn.Parameter) -> None:
        """Updates the parameter, or leaves it to a later backward of the same step."""
        group = None if self.group is None else self.group()
        if group is None:
            self.updater([parameter])
        else:
            group.updates.note([p for p in group.params if p.parameter is parameter])


def updater_of(parameter: torch.Tensor) -> Updater | None:
    """The updater of a parameter."""
    hook = _hook_of(parameter)
    return None if hook is None else hook.updater


def update_by(parameter: torch.Tensor, updater: Updater) -> None:
    """Makes an updater update a parameter in backward, also one that is thawed later."""
    # Autograd takes hooks of trained leaves alone, and keeps them.
    is_trained = parameter.requires_grad
    parameter.requires_grad_().register_post_accumulate_grad_hook(UpdateHook(updater))
    parameter.requires_grad_(is_trained)


def update_as(old: torch.Tensor, new: torch.Tensor) -> None:
    """Makes what updates one parameter in backward update another, which is to take its place."""
    updater = updater_of(old)
    if updater is not None and updater_of(new) is None:
        update_by(new, updater)


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


def _hook_of(parameter: torch.Tensor) -> UpdateHook | None:
    return next((hook for hook in _hooks_of(parameter) if isinstance(hook, UpdateHook)), None)


def _hooks_of(parameter: torch.Tensor) -> list[object]:
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def user_hooks(parameter: torch.Tensor) -> list[object]:
    """The hooks on a parameter's gradient that are no updater's."""
    hooks = [*(parameter._backward_hooks or {}).values(), *_hooks_of(parameter)]
    return [hook for hook in hooks if not isinstance(hook, UpdateHook)]


def deliver(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    """Adds a gradient to `.grad` and calls the user's hooks, as autograd does."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    with torch.no_grad():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    for after in _hooks_of(parameter):
        if not isinstance(after, UpdateHook):
            after(parameter)  # type: ignore[operator]


class Updates:
    """The updates of one group.

    Attributes:
        chosen: Offsets of the parameters that the backward graph which runs may update.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)
        self._open_forwards = 0
        self._is_updated = False
        self._ends_with = -1
        self.chosen: Collection[int] = ()

    @property
    def group(self) -> ParamGroup:
        """The group."""
        group = self._group()
        assert group is not None
        return group

    def wanted(self, parameters: Iterable[nn.Parameter]) -> Update:
        """When the group's parameters are to be updated; its hooks know of the group from then on."""
        hooks = [hook for p in parameters if (hook := _hook_of(p)) is not None]
        for hook in hooks:
            hook.group = self._group
        return Update.IN_BACKWARD if hooks else Update.AFTER_BACKWARD

    def begin_forward(self) -> None:
        """Counts a forward that reads the group, and that autograd records."""
        if backward_in_progress() == -1:  # else it runs again
            self._open_forwards = max(0, self._open_forwards) + 1
            self._is_updated = False

    def begin_backward(self) -> None:
        """Counts a backward of such a forward, which is about to run."""
        self._open_forwards -= 1

    def receive(self, gradient: torch.Tensor, offsets: Collection[int]) -> None:
        """Takes what a graph has for the parameters at some offsets: memory of the graph, which is used again."""
        group = self.group
        trained = set(self.chosen).intersection(offsets)
        params = group.params_at(trained)
        if not params:
            return  # `torch.autograd.grad` asks for other gradients
        if any(user_hooks(param.parameter) for param in params):
            # Autograd calls them once more, for the gradient that the graph does not return.
            raise UnsupportedModelError(
                "a parameter that a compiled backward updates has a hook on its gradient",
                where=f"step_in_backward(), register_hook() or the like, unit {group.title}",
                instead="optimizer.step() after backward",
            )
        if not self._is_last() or any(updater_of(param.parameter) is None for param in params):
            gradient = gradient.clone()
        for param, grad in zip(group.params, group.sharded_grads(gradient, trained), strict=True):
            if grad is not None:
                deliver(param.parameter, grad)
        self.note(params)

    def note(self, params: Sequence[Param]) -> None:
        """Updates parameters that got gradients, or leaves it to a later backward of the same step.

        Raises:
            UnsupportedModelError: For gradients of a forward that ran before the update.
        """
        if all(updater_of(param.parameter) is None for param in params):
            return
        if self._open_forwards < 0 and self._is_updated:
            for param in params:
                param.parameter.grad = None
            raise UnsupportedModelError(
                "a gradient arrives after the parameters that it belongs to were updated",
                where=f"step_in_backward(), unit {self.group.title}",
                instead="add the losses and call backward once, accumulate all backwards but the last under no_sync(), "
                "or leave step_in_backward() out and call optimizer.step()",
            )
        task = backward_in_progress()
        if self._is_last():
            self._update(params)
        elif fsdp2.is_last_backward(self.group.unit.state) and task != self._ends_with:
            self._ends_with = task
            after_this_backward(self._end)

    def _is_last(self) -> bool:
        return self._open_forwards <= 0 and fsdp2.is_last_backward(self.group.unit.state)

    def _end(self) -> None:
        # What has not run by now does not belong to this step.
        self._open_forwards, self._ends_with = 0, -1
        self._update(self.group.params)

    def _update(self, params: Sequence[Param]) -> None:
        its: dict[Updater, list[nn.Parameter]] = {}
        for parameter in (param.parameter for param in params):
            updater = updater_of(parameter)
            if updater is not None and parameter.grad is not None:
                its.setdefault(updater, []).append(parameter)
        for updater, parameters in its.items():
            updater(parameters)
        if its:
            self._is_updated = True
            # So that autograd refuses a backward through a graph that has saved it: foreach kernels do not count.
            torch.autograd.graph.increment_version(self.group.flat)
