"""From the gradient of a flat shard to the `.grad` of its parameters.

Autograd accumulates one gradient per flat shard. After it has, the parameters get their parts as DTensors, their own
hooks run, and the flat gradient is forgotten, so that `zero_grad`, clipping and optimizers see parameters only.
"""

from __future__ import annotations

import weakref

import torch

from fsdp_compile._torch import make_dtensor
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters.flat import FlatShard, ParameterSlot


def install(flat: FlatShard) -> None:
    """Makes every gradient that autograd accumulates into `flat.leaf` reach the parameters."""
    reference = weakref.ref(flat)

    def after_accumulation(_leaf: torch.Tensor) -> None:
        owner = reference()
        if owner is not None:
            hand_over(owner)

    if flat.leaf.requires_grad:
        flat.leaf.register_post_accumulate_grad_hook(after_accumulation)


@torch.compiler.disable
def hand_over(flat: FlatShard) -> None:
    """Moves the gradient of `flat.leaf` into the parameters whose gradients arrived, and clears it."""
    gradient, flat.leaf.grad = flat.leaf.grad, None
    arrived, flat.arrived = flat.arrived, set()
    if gradient is None:
        return
    if gradient.requires_grad:
        raise UnsupportedModelError(
            "a gradient of the parameters' gradients is asked for (double backward)",
            where=f"backward(create_graph=True), unit {flat.unit.title}",
            instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, "
            "without torch.compile",
        )
    for slot in flat.slots:
        # Nothing noted: saved-tensor hooks gave backward a copy of the buffer. Then zeros stand for "no gradient".
        if slot.spec.offset in arrived or not arrived:
            _accumulate(slot, gradient)


def _accumulate(slot: ParameterSlot, flat_gradient: torch.Tensor) -> None:
    parameter = slot.parameter
    gradient: torch.Tensor = make_dtensor(slot.view_of(flat_gradient), slot.dtensor)
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad += gradient
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
