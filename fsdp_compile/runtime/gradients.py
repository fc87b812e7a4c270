"""From the gradient of a flat parameter to the `.grad` of its parameters, which is all that optimizers see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.autograd import (
    allow_any_gradient_dtype,
    backward_in_progress,
    is_accumulated_in_this_backward,
    waits_for_other_gradients,
)
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, views_of
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.runtime import unused_params, update_in_backward
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup


def on_flat_grad(group: FSDPParamGroup) -> None:
    """Handles a gradient that autograd accumulated into a flat parameter: the last backward of a step writes it on."""
    if group.update_state.is_updated:
        group.flat_param.grad = None  # or the next step would add it
        group.grads.take_produced(GradPlacement.REDUCED)
        update_in_backward.refuse_second(group)
    produced = group.grads.take_produced(GradPlacement.REDUCED)
    for param in group.params:  # no call: this runs for each group in every backward, and hardly ever finds one
        if not param.parameter.requires_grad:
            produced = produced - frozen_since(group, produced)
            break
    group.grads.commit()
    group.grads.unwritten |= produced
    if group.unit.comm_settings.last_backward:
        write_sharded_grads(group)
    # Safe to update: everything in this backward that reads the flat parameter has run.
    if group.update_state.has_new_grads and update_in_backward.is_complete(group):
        update_in_backward.run(group)


def write_sharded_grads(group: FSDPParamGroup) -> None:
    """Moves the gradient of a flat parameter to the `.grad` of its parameters."""
    gradient, group.flat_param.grad = group.flat_param.grad, None
    offsets, group.grads.unwritten = group.grads.unwritten, set()
    if gradient is None:
        return
    refuse_double_backward(group, gradient)
    accumulate_sharded_grads(group, gradient, offsets)


def part_of(param: FSDPParam, flat: torch.Tensor) -> torch.Tensor:
    """The part of one parameter in a tensor without history that is laid out like the flat parameter."""
    return views_of(flat, [param.place])[0]


def accumulate_sharded_grads(group: FSDPParamGroup, gradient: torch.Tensor, offsets: Collection[int]) -> None:
    """Adds a gradient, laid out and typed as the flat parameter, to the `.grad` of the parameters at `offsets`."""
    if group.grads.wanted is not None:
        offsets = group.grads.wanted.intersection(offsets)
    params = group.params_at(offsets)
    if group.is_replaced:
        _refuse_changed(group, params)
    zeros: Collection[int] = ()
    if group.grads.zeros:
        zeros = group.grads.take_zeros(offsets)
    else:
        group.grads.used.difference_update(offsets)
    new = [param for param in params if param.parameter.grad is None] if zeros else []
    parts = views_of(gradient, [param.place for param in params])
    failure: Exception | None = None
    for param, part in zip(params, parts, strict=True):
        try:
            accumulate(param, make_dtensor(part, param.parameter))
        except Exception as error:  # of a user's hook: the others' gradients are nowhere else
            failure = failure or error
    if new:
        unused_params.note_written(group, new, zeros)
    update_in_backward.note_new_grads(group)
    if failure is not None:
        raise failure


def frozen_since(group: FSDPParamGroup, produced: Collection[int]) -> set[int]:
    """Of the parameters at `produced`, which a backward has made gradients of, those that are frozen now.

    They take none: one process asks at this time, too.

    Raises:
        UnsupportedModelError: If their gradients are a sum with those of earlier backwards, which they do take.
    """
    frozen = {param.spec.offset for param in group.params_at(produced) if not param.parameter.requires_grad}
    if frozen:
        summed = group.grads.unwritten | group.grads.consumed
        if frozen & summed or not group.unit.comm_settings.last_backward:
            group.flat_param.grad = None  # or the next backward would add to it
            group.grads.unwritten.clear()
            raise UnsupportedModelError(
                "a parameter was frozen between a forward and its backward, which adds gradients of earlier backwards",
                where=group.unit.parameter_name(group.params_at(frozen)[0]),
                instead="requires_grad_(False) before the forward, or after the backward that reduces gradients",
            )
        group.grads.forget_use(frozen)
    return frozen


def _refuse_changed(group: FSDPParamGroup, params: Iterable[FSDPParam]) -> None:
    """Raises `UnsupportedModelError` for parameters of a replaced group that are other ones since."""
    for param in params:
        now, then = local_tensor(param.dtensor), param.sharded_view
        is_alike = (now.dtype, now.shape, now.device) == (then.dtype, then.shape, then.device)
        if not is_alike or group.update_state.update is Update.IN_BACKWARD:
            raise UnsupportedModelError(
                "between a forward and its backward another forward ran, before which a parameter changed "
                + ("or others of its unit did, under step_in_backward()" if is_alike else "its dtype, shape or device"),
                where=group.unit.parameter_name(param),
                instead="the backward before the change",
            )


def refuse_double_backward(group: FSDPParamGroup, gradient: torch.Tensor) -> None:
    """Raises `UnsupportedModelError` for a gradient that has a history."""
    if gradient.requires_grad:
        raise UnsupportedModelError(
            "a gradient of the parameters' gradients is asked for (double backward)",
            where=f"backward(create_graph=True), unit {group.unit.title}",
            instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, "
            "without torch.compile",
        )


def accumulate(param: FSDPParam, gradient: torch.Tensor) -> None:
    """Adds a gradient in the parameter's dtype to `.grad`, which may be narrower (`keep_low_precision_grads`)."""
    parameter = param.parameter
    # This runs once per parameter in every step, so hooks, which few parameters have, are asked for once.
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if (before or after) and backward_in_progress() != -1 and is_accumulated_in_this_backward(parameter):
        raise refusal_of_parts(param)
    if before:
        gradient = through_hooks(param, gradient)
    if param.grad_dtype is not None:
        _add_in(param.grad_dtype, parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad += gradient
    if after:
        for hook in tuple(after.values()):  # a hook may remove itself
            hook(parameter)


def through_hooks(param: FSDPParam, gradient: torch.Tensor) -> torch.Tensor:
    """What the hooks that users registered on a parameter (`register_hook`) make of its gradient."""
    for hook in tuple((param.parameter._backward_hooks or {}).values()):  # a hook may remove itself
        refuse_hook_of_several(hook, param.name)
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def refusal_of_parts(param: FSDPParam) -> UnsupportedModelError:
    """The error for a parameter with hooks whose gradient autograd accumulates, too, without that of the forward."""
    return UnsupportedModelError(
        "hooks of a parameter would run twice, each time with a part of its gradient: what was computed with it "
        "outside of the forward (a penalty) sends it a gradient beside that of the forward",
        where=f"register_hook() or register_post_accumulate_grad_hook(), parameter {param.name}",
        instead="the penalty inside of the forward, or code after loss.backward() in place of the hooks",
    )


def refuse_hook_of_several(hook: Callable[..., Any], name: str) -> None:
    """Raises `UnsupportedModelError` for a hook that waits for the gradients of all of several parameters."""
    if waits_for_other_gradients(hook):
        raise UnsupportedModelError(
            "a hook that waits for the gradients of several parameters would never be called: autograd accumulates "
            "into flat parameters, and their gradients reach the parameters one by one",
            where=f'register_multi_grad_hook(mode="all"), parameter {name}',
            instead='code after loss.backward(), a hook per parameter (parameter.register_hook), or mode="any" for the '
            "first gradient of a backward",
        )


def _add_in(dtype: torch.dtype, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    with torch.no_grad():
        total = gradient if parameter.grad is None else parameter.grad.to(gradient.dtype) + gradient
        allow_any_gradient_dtype(parameter)
        parameter.grad = total.to(dtype)


def mark_produced(group: FSDPParamGroup, offsets: Iterable[int], placement: GradPlacement) -> None:
    """Records which parameters the gradient that autograd is about to accumulate covers, and how far it is reduced."""
    group.grads.mark_produced(offsets, placement)


def drop(group: FSDPParamGroup) -> None:
    """Drops gradients that have not reached the parameters."""
    group.grads.clear()
    group.flat_param.grad = None
