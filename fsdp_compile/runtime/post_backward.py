"""Hooks of autograd: gradients of flat parameters and of accumulators, and the end of a backward pass."""

from __future__ import annotations

import functools
import warnings
import weakref

import torch
from torch import nn

from fsdp_compile._torch.autograd import (
    after_this_backward,
    any_backward_runs,
    backward_in_progress,
    clear_own_gradient,
    follow_ends_of_backwards,
    is_called_by_another,
    own_gradient,
)
from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile._torch.eval_frame import calls_are_compiled
from fsdp_compile._torch.tensors import make_dtensor
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.runtime import accumulation, chosen_gradients, gradients, read_order, unshard, update_in_backward
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, ModelState

_unfinished: weakref.WeakSet[ModelState] = weakref.WeakSet()
"""Models with work for the end of a backward that another one has called: it is left to the end of that one."""
_has_failed = [False]
"""Whether a backward has raised since what failed ones had consumed was last made pending again."""


@functools.cache
def follow_backwards() -> None:
    """Makes every backward of the process leave gradients in order, whether it calls others or fails."""
    follow_ends_of_backwards(_after_backward)


@torch.compiler.disable
def _after_backward(failed: bool) -> None:  # noqa: FBT001
    if failed:
        _has_failed[0] = True
    if _unfinished and backward_in_progress() != -1:
        for model in list(_unfinished):
            _unfinished.discard(model)
            _queue(model)
    if _has_failed[0] and not any_backward_runs():
        _has_failed[0] = False
        _clean_up_after_failure()


def _clean_up_after_failure() -> None:
    # No end of a backward comes for what it has consumed, and the next one would take it for reduced.
    _unfinished.clear()
    for group in FSDPParamGroup.alive():
        group.unit.model.queued_in_backwards.clear()
        accumulation.roll_back(group)


def queue_post_backward(group: FSDPParamGroup) -> None:
    """Queues `post_backward_final_callback` for the end of this backward, once per model, if `group` gives it work."""
    model = group.unit.model
    if not group.is_idle:
        model.mark_pending(group)
    if backward_in_progress() not in model.queued_in_backwards and model.is_any_pending():
        _queue(model)


def _queue(model: ModelState) -> None:
    backward = backward_in_progress()
    if backward not in model.queued_in_backwards:
        model.queued_in_backwards.add(backward)
        after_this_backward(functools.partial(_end_backward, model))


@torch.compiler.disable
def _end_backward(model: ModelState) -> None:
    if is_called_by_another():
        # Groups whose gradients the other one is computing have consumed what is pending, and not reduced it yet.
        _unfinished.add(model)
    else:
        model.backwards_with_grads += 1
        post_backward_final_callback(model)
    model.queued_in_backwards.discard(backward_in_progress())


@torch.compiler.disable
def post_backward_final_callback(model: ModelState) -> None:
    """Reduces and writes gradients that are left at the end of a backward."""
    with profiled(Range.ROOT_POST_BACKWARD):
        _finish_backward(model)
    read_order.compare()  # what was left to reduce


def _finish_backward(model: ModelState) -> None:
    # In the order of the units, since reductions have to be started in the same order on every rank.
    # Replaced groups first: what their forwards have read was there first.
    replaced = [group for unit in model.units for group in unit.replaced_groups]
    waiting = [group for group in (*replaced, *model.pending_in(model.units)) if group.has_pending_grads]
    for group in waiting:
        accumulation.roll_back(group)
    for group in waiting:
        if group.unit.comm_settings.last_backward:
            gradients.write_sharded_grads(group)
            accumulation.reduce_rest(group)
            update_in_backward.end_backward(group)
    done = [group for group in model.pending_in(model.units) if group.unit.comm_settings.last_backward]
    unshard.post_backward(done)


def install_grad_hooks(group: FSDPParamGroup) -> None:
    """Makes every gradient that autograd accumulates into a flat parameter reach its parameters."""
    reference = weakref.ref(group)

    def after_accumulation(flat_param: torch.Tensor) -> None:
        if flat_param.grad is None:  # an update inside of the graph has taken it
            return
        owner = reference()
        if owner is None:
            warnings.warn("a model was deleted before its backward: its parameters get no gradients", stacklevel=2)
        else:
            # Leaving Dynamo out takes longer than all that is done for a small unit.
            (_on_flat_grad_disabled if calls_are_compiled() else _on_flat_grad)(owner)

    skip_code(after_accumulation.__code__)
    if group.flat_param.requires_grad:
        group.flat_param.register_post_accumulate_grad_hook(after_accumulation)


def _on_flat_grad(group: FSDPParamGroup) -> None:
    gradients.on_flat_grad(group)
    queue_post_backward(group)


_on_flat_grad_disabled = torch.compiler.disable(_on_flat_grad)


def install_grad_accumulators(group: FSDPParamGroup) -> None:
    """Makes the leaves that autograd accumulates gradients into which are not fully reduced."""
    if not group.flat_param.requires_grad:
        return
    spec = group.params[0].spec
    for placement, parts in ((GradPlacement.UNREDUCED, spec.size), (GradPlacement.REDUCE_SCATTERED, 1)):
        # Autograd checks shape and dtype of what it accumulates, never the leaf's values: stride 0 needs no memory.
        element = torch.zeros(1, dtype=spec.unreduced_dtype, device=spec.compute or group.flat_param.device)
        accumulator = element.expand(group.flat_param.numel() * parts).requires_grad_()
        accumulator.register_post_accumulate_grad_hook(functools.partial(_collect, weakref.ref(group), placement))
        group.grads.accumulators[placement] = accumulator


@torch.compiler.disable
def _collect(reference: weakref.ref[FSDPParamGroup], placement: GradPlacement, accumulator: torch.Tensor) -> None:
    group = reference()
    gradient, accumulator.grad = accumulator.grad, None
    if group is not None and gradient is not None:
        if group.grads.wanted is not None:
            raise chosen_gradients.refusal_of_unreduced(group.params[0])
        accumulation.collect(group, placement, gradient)
        queue_post_backward(group)


def await_late_gradient(parameter: nn.Parameter, param: FSDPParam) -> None:
    """Passes the gradient of a plain parameter that was read before it was sharded on to the sharded one.

    The first call of a compiled model may run code that Dynamo leaves to Python before the first graph is compiled, and
    so before anything is sharded. Autograd then accumulates a full gradient, of this rank alone, into the old
    parameter; it is averaged over the ranks and accumulated like any other.
    """

    def reduce(old: torch.Tensor) -> None:
        gradient = own_gradient(old)
        if gradient is not None:
            clear_own_gradient(old)
            module, attribute = param.module_refs[0]
            text, group, _ = reads_of(module)[attribute]  # the text by which gradients are reduced at once
            with torch.no_grad():
                sent = gradient.to(param.spec.param_dtype)
                reduced = torch.ops.fsdp_compile.reduce_grad(group.flat_param, sent, text)
                gradients.accumulate(param, make_dtensor(gradients.part_of(param, reduced), param.dtensor))
            update_in_backward.note_new_grads(group)
            queue_post_backward(group)

    param.is_read_before = True
    parameter.register_post_accumulate_grad_hook(reduce)
