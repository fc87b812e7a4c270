"""What is done when a backward pass has made all gradients: nothing may be left over that belongs to this step.

Gradients that are not summed over all ranks yet: where they are collected, and how they are reduced in the end.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress, clear_own_gradient, own_gradient
from fsdp_compile._torch.dynamo import calls_are_compiled, skip_code
from fsdp_compile._torch.tensors import make_dtensor, views_of
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.runtime import accumulation, gradients, pending, unshard, update_in_backward
from fsdp_compile.runtime.units import READS, FSDPParam, FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import grad_placement_of, refresh_unshard_args

_queued: set[int] = set()
"""Outermost modules, by `id`, whose end is asked for in the backward pass `_queued_in[0]`."""
_queued_in = [-1]


def queue_post_backward(group: FSDPParamGroup) -> None:
    """Asks for the end of this backward pass to be noticed, once for all units of a model, if it has work to do.

    Args:
        group: A parameter group that something was done for.
    """
    if _queued_in[0] != backward_in_progress():
        _queued.clear()
        _queued_in[0] = backward_in_progress()
    pending.mark_pending(group)
    outermost = group.unit.outermost
    assert outermost is not None
    if id(outermost) not in _queued and pending.is_any_pending():
        _queued.add(id(outermost))
        after_this_backward(functools.partial(post_backward_final_callback, group.unit.of_model))


@torch.compiler.disable
def post_backward_final_callback(units: Sequence[FSDPUnit]) -> None:
    """Delivers and reduces what waited for this backward, unit by unit in the same order on every rank."""
    waiting = [group for group in pending.pending_in(units) if group.has_pending_grads]
    for group in waiting:
        if any([group.unsharded_accumulated_grad.roll_back(), group.partial_reduce_output.roll_back()]):
            refresh_unshard_args(group)
    for group in waiting:
        if group.unit.comm_settings.last_backward:
            gradients.write_sharded_grads(group)
            accumulation.reduce_rest(group)
            group.update_state.expects_late_grad = False
            update_in_backward.run(group)
    unshard.after_backward(group for group in pending.pending_in(units) if group.unit.comm_settings.last_backward)


def install_grad_hooks(group: FSDPParamGroup) -> None:
    """Makes every gradient that autograd accumulates into `flat.flat_param` reach the parameters."""
    reference = weakref.ref(group)

    def after_accumulation(leaf: torch.Tensor) -> None:
        if leaf.grad is None:  # an update inside of the graph has taken it, or it waits for another
            return
        owner = reference()
        if owner is not None:
            # Leaving Dynamo out takes longer than all that is done for a small unit.
            (_on_gradient_beside_dynamo if calls_are_compiled() else _on_gradient)(owner)

    skip_code(after_accumulation.__code__)
    if group.flat_param.requires_grad:
        group.flat_param.register_post_accumulate_grad_hook(after_accumulation)


def _on_gradient(group: FSDPParamGroup) -> None:
    gradients.on_flat_grad(group)
    queue_post_backward(group)


_on_gradient_beside_dynamo = torch.compiler.disable(_on_gradient)


def install_grad_accumulators(group: FSDPParamGroup) -> None:
    """Makes the leaves that gradients of a flat parameter go to which are not summed over all ranks.

    A leaf has the shape of what is accumulated, `[size * numel]` or `[numel]`, and no memory: its stride is 0.
    """
    if not group.flat_param.requires_grad:
        return
    spec = group.params[0].spec
    for sync, parts in ((GradPlacement.UNREDUCED, spec.size), (GradPlacement.REDUCE_SCATTERED, 1)):
        element = torch.zeros(1, dtype=spec.reduce_dtype, device=spec.compute or group.flat_param.device)
        holder = element.expand(group.flat_param.numel() * parts).requires_grad_()
        holder.register_post_accumulate_grad_hook(functools.partial(_on_accumulated_grad, weakref.ref(group), sync))
        group.grad_accumulators[sync] = holder


@torch.compiler.disable
def _on_accumulated_grad(
    reference: weakref.ref[FSDPParamGroup], placement: GradPlacement, accumulator: torch.Tensor
) -> None:
    group = reference()
    gradient, accumulator.grad = accumulator.grad, None
    if group is None or gradient is None:
        return
    gradients.refuse_double_backward(group, gradient)
    update_in_backward.refuse_second(group)
    if placement is GradPlacement.REDUCE_SCATTERED:
        group.unsharded_accumulated_grad.commit()
    accumulation.pending_grads_of(group, placement).add(gradient, group.take_produced(placement))
    if grad_placement_of(group) is not placement:  # the next reads may be such that take it along
        refresh_unshard_args(group)
    queue_post_backward(group)


def await_late_gradient(parameter: nn.Parameter, param: FSDPParam) -> None:
    """Sees to it that the gradient of a plain parameter that was read before it was sharded reaches its successor.

    The first call of a compiled model may run code that Dynamo leaves to Python before the first graph is compiled, and
    with it before anything is sharded. Autograd will then accumulate a full gradient, of this rank alone, into the old
    parameter; it is averaged over the ranks and accumulated like any other.
    """

    def reduce(old: torch.Tensor) -> None:
        gradient = own_gradient(old)
        if gradient is not None:
            clear_own_gradient(old)
            module, attribute = param.module_refs[0]
            leaf, text, group = getattr(module, READS)[attribute]  # the text by which gradients are reduced at once
            with torch.no_grad():
                reduced = torch.ops.fsdp.reduce_grad(leaf, gradient.to(param.spec.param_dtype), text)
                gradients.accumulate(param, make_dtensor(views_of(reduced, [param.place])[0], param.dtensor))
            group.update_state.has_new_grads = group.update_state.update is Update.IN_BACKWARD
            queue_post_backward(group)

    param.is_read_before = True
    parameter.register_post_accumulate_grad_hook(reduce)
