"""From the gradient of a flat shard to the `.grad` of its parameters.

Autograd accumulates one gradient per flat shard. After it has, the parameters get their parts as DTensors, their own
hooks run, and the flat gradient is forgotten, so that `zero_grad`, clipping and optimizers see parameters only.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch import nn

from fsdp_compile._torch import allow_any_gradient_dtype, clear_own_gradient, make_dtensor, own_gradient
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters import epilogue
from fsdp_compile.parameters.flat import FlatShard, ParameterSlot
from fsdp_compile.parameters.reads import READS
from fsdp_compile.parameters.spec import Sync


def install(flat: FlatShard) -> None:
    """Makes every gradient that autograd accumulates into `flat.leaf` reach the parameters."""
    reference = weakref.ref(flat)

    def after_accumulation(_leaf: torch.Tensor) -> None:
        owner = reference()
        if owner is not None:
            arrived(owner)

    if flat.leaf.requires_grad:
        flat.leaf.register_post_accumulate_grad_hook(after_accumulation)


@torch.compiler.disable
def arrived(flat: FlatShard) -> None:
    """Notes that `flat.leaf` has a gradient; in the last backward of a step, hands it over to the parameters."""
    flat.held.confirm()
    flat.partial.confirm()
    flat.undelivered |= flat.noted_gradients(Sync.ALL)
    if flat.unit.accumulation.last_backward:
        hand_over(flat)
    epilogue.expect(flat.unit)


def hand_over(flat: FlatShard) -> None:
    """Moves the gradient of `flat.leaf` into the parameters whose gradients arrived, and clears it."""
    gradient, flat.leaf.grad = flat.leaf.grad, None
    offsets, flat.undelivered = flat.undelivered, set()
    if gradient is not None:
        refuse_double_backward(flat, gradient)
        deliver(flat, gradient, offsets)


def deliver(flat: FlatShard, gradient: torch.Tensor, offsets: Collection[int]) -> None:
    """Adds a gradient, laid out and typed as the flat shard, to the `.grad` of the slots at `offsets`."""
    for slot in flat.slots:
        if slot.spec.offset in offsets:
            _accumulate(slot, gradient)


def refuse_double_backward(flat: FlatShard, gradient: torch.Tensor) -> None:
    """Refuses a gradient that has a history.

    Raises:
        UnsupportedModelError: If it has.
    """
    if gradient.requires_grad:
        raise UnsupportedModelError(
            "a gradient of the parameters' gradients is asked for (double backward)",
            where=f"backward(create_graph=True), unit {flat.unit.title}",
            instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, "
            "without torch.compile",
        )


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
            leaf, text, _ = getattr(module, READS)[attribute]  # the text by which gradients are reduced at once
            with torch.no_grad():
                _accumulate(slot, torch.ops.fsdp.reduce_grad(leaf, gradient.to(slot.spec.param_dtype), text))

    parameter.register_post_accumulate_grad_hook(reduce)


def _accumulate(slot: ParameterSlot, flat_gradient: torch.Tensor) -> None:
    """Adds a gradient in the parameter's dtype; what is kept may be narrower (`keep_low_precision_grads`)."""
    parameter = slot.parameter
    kept = slot.kept_gradient_dtype
    gradient: torch.Tensor = make_dtensor(slot.view_of(flat_gradient), slot.dtensor)
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if kept is not None:
        held = parameter.grad
        with torch.no_grad():
            total = gradient if held is None else held.to(gradient.dtype) + gradient
            allow_any_gradient_dtype(parameter)
            parameter.grad = total.to(kept)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad += gradient
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
