"""Arguments of `fsdp_compile.unshard` besides the flat parameter: accumulated gradients, and unsharded parameters.

By default none. While gradients are not reduced, the accumulator; once some are accumulated, these, which backward adds
to its own before it reduces both; while parameters stay unsharded, their values. Each combination is a graph of its
own, compiled once: Dynamo guards on the text and on which tensors there are, not on their values.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fsdp_compile._torch.dynamo import keep_sizes_fixed
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

UNSHARD_ARGS = "_fsdp_unshard_args"
"""Attribute of a module: parameter name to `UnshardArgs`, or to a tensor that is read in the place of the parameter.

The class has `None`, for a module without any.
"""
UnshardArgs = tuple[str, str | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Text of the `UnshardSpec`; the same for eval mode, where that differs; then tensors.

They are the unsharded parameter, the accumulator, the unsharded accumulated and the partially reduced gradient.
"""


def set_unshard_args(module: nn.Module, name: str, args: UnshardArgs | None) -> None:
    """Sets the arguments of a parameter's reads besides the flat parameter; `None` for none."""
    if swapped_value(module, name) is None:
        _set(module, name, args)


def swap_in(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Makes reads of a parameter give `value` in its place; `None` ends that."""
    _set(module, name, value)


def swapped_value(module: nn.Module, name: str) -> torch.Tensor | None:
    """What reads of a parameter give in its place, if `swap_in` has set anything."""
    known = (module.__dict__.get(UNSHARD_ARGS) or {}).get(name)
    return known if isinstance(known, torch.Tensor) else None


def _set(module: nn.Module, name: str, args: UnshardArgs | torch.Tensor | None) -> None:
    every = {**(module.__dict__.get(UNSHARD_ARGS) or {}), name: args}
    present = {n: a for n, a in every.items() if a is not None}
    if present:
        object.__setattr__(module, UNSHARD_ARGS, present)
    elif UNSHARD_ARGS in module.__dict__:
        # Dynamo would guard on an empty dict in another way than on the class's `None`, and compile once more.
        object.__delattr__(module, UNSHARD_ARGS)


def refresh_unshard_args(group: FSDPParamGroup) -> None:
    """Sets the arguments of the next reads of a group's parameters to what its unit asks for now."""
    group.unit.model.mark_pending(group)
    if group.is_replaced:  # no read is of it
        return
    placement = grad_placement_of(group)
    is_reduced = placement is GradPlacement.REDUCED
    accumulator = None if is_reduced else group.grads.accumulators[placement]
    is_unreduced = placement is GradPlacement.UNREDUCED
    unsharded_grad = None if is_unreduced else group.grads.unsharded_accumulated_grad.value
    partial_grad = group.grads.partial_reduce_output.value if is_reduced else None
    unsharded = group.unsharded.params
    is_default = is_reduced and unsharded_grad is None and partial_grad is None and unsharded is None
    for tensor in (
        accumulator,
        unsharded_grad,
        partial_grad,
        *(() if unsharded is None else unsharded.values.values()),
    ):
        if tensor is not None:
            keep_sizes_fixed(tensor)  # also with `dynamic=True`
    gradients = (accumulator, unsharded_grad, partial_grad)
    for param in group.params:
        args: UnshardArgs | None = None
        if not is_default:
            text = dataclasses.replace(param.spec, grad_placement=placement).text
            in_eval = _eval_text(param, placement, gradients)
            value = None if unsharded is None else unsharded.values[param.spec.offset]
            args = (text, in_eval, value, *gradients)
        for module, attribute in param.module_refs:
            set_unshard_args(module, attribute, args)


def _eval_text(param: FSDPParam, placement: GradPlacement, gradients: tuple[torch.Tensor | None, ...]) -> str | None:
    """The text by which eval mode reads a parameter, where that differs, and its gradients go to `gradients`."""
    spec = param.eval_spec
    if spec is None:
        return None
    if any(gradient is not None for gradient in gradients):
        # They are sums of both modes' gradients.
        sums = param.spec
        spec = dataclasses.replace(
            spec,
            grad_placement=placement,
            reduce_dtype=sums.reduce_dtype,
            accumulate_dtype=sums.accumulate_dtype,
        )
    return spec.text


def grad_placement_of(group: FSDPParamGroup) -> GradPlacement:
    """How far the gradients of a group are reduced now; frozen parameters accumulate none."""
    return group.unit.grad_placement if group.flat_param.requires_grad else GradPlacement.REDUCED
