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
from fsdp_compile.layout.spec import Sync, Update
from fsdp_compile.runtime import accumulation, gradients, pending, unshard, update_in_backward
from fsdp_compile.runtime.units import READS, FlatShard, ParameterSlot, Unit
from fsdp_compile.runtime.unshard_args import publish, sync_of

_expected: set[int] = set()
"""Outermost modules, by `id`, whose end is asked for in the backward pass `_of[0]`."""
_of = [-1]


def expect(flat: FlatShard) -> None:
    """Asks for the end of this backward pass to be noticed, once for all units of a model, if it has work to do.

    Args:
        flat: A flat shard that something was done for.
    """
    if _of[0] != backward_in_progress():
        _expected.clear()
        _of[0] = backward_in_progress()
    pending.note(flat)
    outermost = flat.unit.outermost
    assert outermost is not None
    if id(outermost) not in _expected and pending.is_anything():
        _expected.add(id(outermost))
        after_this_backward(functools.partial(_finish, flat.unit.of_model))


@torch.compiler.disable
def _finish(units: Sequence[Unit]) -> None:
    """Delivers and reduces what waited for this backward, unit by unit in the same order on every rank."""
    waiting = [flat for flat in pending.among(units) if flat.owes_gradients]
    for flat in waiting:
        if any([flat.held.give_back(), flat.partial.give_back()]):
            publish(flat)
    for flat in waiting:
        if flat.unit.accumulation.last_backward:
            gradients.hand_over(flat)
            accumulation.reduce_rest(flat)
            flat.progress.has_late = False
            update_in_backward.run(flat)
    unshard.after_backward(flat for flat in pending.among(units) if flat.unit.accumulation.last_backward)


def install_grad_hooks(flat: FlatShard) -> None:
    """Makes every gradient that autograd accumulates into `flat.leaf` reach the parameters."""
    reference = weakref.ref(flat)

    def after_accumulation(leaf: torch.Tensor) -> None:
        if leaf.grad is None:  # an update inside of the graph has taken it, or it waits for another
            return
        owner = reference()
        if owner is not None:
            # Leaving Dynamo out takes longer than all that is done for a small unit.
            (_on_gradient_beside_dynamo if calls_are_compiled() else _on_gradient)(owner)

    skip_code(after_accumulation.__code__)
    if flat.leaf.requires_grad:
        flat.leaf.register_post_accumulate_grad_hook(after_accumulation)


def _on_gradient(flat: FlatShard) -> None:
    gradients.arrived(flat)
    expect(flat)


_on_gradient_beside_dynamo = torch.compiler.disable(_on_gradient)


def install_grad_accumulators(flat: FlatShard) -> None:
    """Makes the leaves that gradients of a flat shard go to which are not summed over all ranks.

    A leaf has the shape of what is accumulated, `[size * numel]` or `[numel]`, and no memory: its stride is 0.
    """
    if not flat.leaf.requires_grad:
        return
    spec = flat.slots[0].spec
    for sync, parts in ((Sync.NONE, spec.size), (Sync.SHARD, 1)):
        element = torch.zeros(1, dtype=spec.reduce_dtype, device=spec.compute or flat.leaf.device)
        holder = element.expand(flat.leaf.numel() * parts).requires_grad_()
        holder.register_post_accumulate_grad_hook(functools.partial(_collect, weakref.ref(flat), sync))
        flat.holders[sync] = holder


@torch.compiler.disable
def _collect(reference: weakref.ref[FlatShard], sync: Sync, holder: torch.Tensor) -> None:
    flat = reference()
    gradient, holder.grad = holder.grad, None
    if flat is None or gradient is None:
        return
    gradients.refuse_double_backward(flat, gradient)
    update_in_backward.refuse_second(flat)
    if sync is Sync.SHARD:
        flat.held.confirm()
    accumulation.place_of(flat, sync).add(gradient, flat.noted_gradients(sync))
    if sync_of(flat) is not sync:  # the next reads may be such that take it along
        publish(flat)
    expect(flat)


def await_late_gradient(parameter: nn.Parameter, slot: ParameterSlot) -> None:
    """Sees to it that the gradient of a plain parameter that was read before it was sharded reaches its successor.

    The first call of a compiled model may run code that Dynamo leaves to Python before the first graph is compiled, and
    with it before anything is sharded. Autograd will then accumulate a full gradient, of this rank alone, into the old
    parameter; it is averaged over the ranks and handed over like any other.
    """

    def reduce(old: torch.Tensor) -> None:
        gradient = own_gradient(old)
        if gradient is not None:
            clear_own_gradient(old)
            module, attribute = slot.owners[0]
            leaf, text, flat = getattr(module, READS)[attribute]  # the text by which gradients are reduced at once
            with torch.no_grad():
                reduced = torch.ops.fsdp.reduce_grad(leaf, gradient.to(slot.spec.param_dtype), text)
                gradients.accumulate(slot, make_dtensor(views_of(reduced, [slot.place])[0], slot.dtensor))
            flat.progress.is_due = flat.progress.update is Update.IN_BACKWARD
            expect(flat)

    slot.is_read_before = True
    parameter.register_post_accumulate_grad_hook(reduce)
